"""`odmoe pull` from a server that speaks to the Hub's own client, which then finds everything in its cache."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from checkpoint.hub import find_model
from checkpoint.sharding.source import open_source
from odmoe.pull import download
from support.fake_hub import COMMIT, FakeHub, serving
from support.machines.cli import check_one_line
from support.paths import DEMO

CommandLine = Callable[..., Any]


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A repository with a model of two weight files, and what nobody needs."""
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    others = {"pytorch_model.bin": b"pickle", "README.md": b"text", "original/model.safetensors": b"again"}
    with serving(FakeHub({**files, **others})) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(download, "PAUSE_S", 0.01)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        yield found


def weights(hub: FakeHub) -> list[str]:
    return sorted(name for name in hub.files if name.endswith(".safetensors") and "/" not in name)


def test_only_what_is_needed_comes_where_the_client_finds_it(
    cli: CommandLine, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cli("pull", "org/name", "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert (facts["revision"], facts["name"]) == (COMMIT, "org/name")
    asked = {name for name, _ in hub.ranges}
    assert asked == {name for name in hub.files if name.endswith((".json", ".safetensors")) and "/" not in name}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = huggingface_hub.snapshot_download("org/name", cache_dir=str(tmp_path / "hub"), local_files_only=True)
    assert Path(snapshot) == Path(facts["path"])
    for name in weights(hub):
        assert (Path(snapshot) / name).read_bytes() == hub.files[name]
    assert open_source(Path(snapshot)).config["model_type"] == "mixtral"


def test_a_broken_connection_is_taken_up_where_it_broke(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    """Within a command, and by the next one; bytes that have come do not come again."""
    size = max(len(hub.files[name]) for name in weights(hub))
    hub.breaks_after = size // 3
    answer = cli("pull", "org/name", "--to", str(tmp_path / "here"))
    assert answer.code == 0, answer.err
    for name in weights(hub):
        assert (tmp_path / "here" / name).read_bytes() == hub.files[name]
    starts = [asked for name, asked in hub.ranges if name in weights(hub)]
    assert any(starts), "resumed by a range"

    hub.ranges.clear()
    last = tmp_path / "here" / weights(hub)[-1]
    last.with_name(last.name + download.PARTIAL).write_bytes(last.read_bytes()[:100])
    last.unlink()
    hub.breaks_after = None
    assert cli("pull", "org/name", "--to", str(tmp_path / "here")).code == 0
    assert [(name, asked) for name, asked in hub.ranges if name in weights(hub)] == [(last.name, "bytes=100-")]
    assert last.read_bytes() == hub.files[last.name]
    assert not list((tmp_path / "here").glob("*.odmoe-partial"))


def test_a_server_that_only_breaks_is_given_up(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    hub.breaks_after = 0
    check_one_line(
        cli("pull", "org/name", "-q"), 1, "CheckpointError", ["connection broke", "goes on where it stopped"]
    )


def test_wrong_bytes_are_refused(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    hub.wrong_bytes = True
    check_one_line(cli("pull", "org/name", "-q"), 1, "CorruptCheckpointError", ["SHA-256", "fetch it anew"])


def test_errors_name_their_cures(
    cli: CommandLine, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_line(cli("pull", "org/other"), 1, "CheckpointError", ["no repository org/other", "HF_TOKEN"])
    check_one_line(cli("pull", "nothing"), 2, "ConfigError", ["chat-moe", "org/name"])
    check_one_line(cli("pull", "org/name:Q4_K_M"), 1, "CheckpointError", ["no quantisation 'Q4_K_M'", "no GGUF"])
    hub.gated = True
    check_one_line(cli("pull", "org/name"), 1, "CheckpointError", ["gated", f"{hub.url}/org/name", "HF_TOKEN"])
    hub.gated = False
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7))
    check_one_line(cli("pull", "org/name", "-q"), 1, "StoreWriteError", ["GB more", "0.00 GB are free", "--to DIR"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_one_line(cli("pull", "org/name"), 2, "ConfigError", ["HF_HUB_OFFLINE is set", "unset it"])


def test_two_at_once_do_not_write_the_same_file(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    partial = tmp_path / (weights(hub)[0] + download.PARTIAL)
    with partial.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        answer = cli("pull", "org/name", "-q", "--to", str(tmp_path))
    check_one_line(answer, 1, "StoreWriteError", ["another process", partial.name])


def test_one_quantisation_of_a_gguf_repository(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"small-Q4_K_M.gguf": b"GGUF" * 9, "small-Q8_0.gguf": b"GGUF" * 20, "README.md": b"text"}
    check_one_line(cli("pull", "org/name", "-q"), 1, "UnsupportedFormatError", ["Q4_K_M, Q8_0", "NAME:Q4_K_M"])
    answer = cli("pull", "org/name:q4_k_m", "-q")
    assert answer.code == 0, answer.err
    assert Path(answer.out.strip()).read_bytes() == b"GGUF" * 9
    assert [name for name, _ in hub.ranges] == ["small-Q4_K_M.gguf"]


def test_the_demo_model_gets_a_short_name(cli: CommandLine, hub: FakeHub, tmp_path: Path) -> None:
    answer = cli("pull", "demo")
    assert answer.code == 0, answer.err
    path = Path(answer.out.strip())
    assert path == tmp_path / "data" / "odmoe" / "models" / "chat-moe" == find_model("chat-moe")
    assert (path / "model.safetensors").read_bytes() == (DEMO.with_name("chat-moe") / "model.safetensors").read_bytes()
