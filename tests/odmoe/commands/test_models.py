"""`odmoe models` lists what is here, and `odmoe rm` removes it, but nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from odmoe.stores import prepare_store
from support.fake_hub import FakeHub, serving
from support.machines.cli import check_one_line

CommandLine = Callable[..., Any]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, a models folder and a Hub cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)


@pytest.fixture
def pulled(cli: CommandLine, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of `org/name` in the Hub cache."""
    with serving(FakeHub({path.name: path.read_bytes() for path in tiny.iterdir()})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        answer = cli("pull", "org/name", "-q")
        assert answer.code == 0, answer.err
        return Path(answer.out.strip())


def listed(cli: CommandLine) -> dict[str, dict[str, Any]]:
    answer = cli("models", "--json")
    assert answer.code == 0, answer.err
    return {one["name"]: one for one in json.loads(answer.out)["models"]}


def test_checkpoints_and_stores(cli: CommandLine, tiny: Path, pulled: Path) -> None:
    assert cli("pull", "demo", "-q").code == 0
    store = prepare_store(str(pulled), None, "bfloat16")
    found = listed(cli)
    size = sum(path.stat().st_size for path in tiny.iterdir() if path.suffix in (".json", ".safetensors"))
    assert found["org/name"] | {"last_used": 0, "path": ""} == {
        "name": "org/name", "kind": "checkpoint", "family": "mixtral", "format": "float32", "dense": "",
        "bytes": size, "last_used": 0, "path": "", "model": "",
    }  # fmt: skip
    assert (found["demo-moe"]["kind"], found["deep-moe"]["kind"]) == ("shipped", "shipped")
    assert (found[store.path.name]["kind"], found[store.path.name]["format"]) == ("store", "bfloat16")
    text = cli("models").out
    assert all(name in text for name in found)
    first, second = sorted(line for line in text.splitlines() if line.startswith("chat-moe"))
    assert (first.split()[:2], second.startswith("chat-moe (OD-MoE's own)")) == (["chat-moe", "23.8"], True)


def test_each_kind_is_removed(cli: CommandLine, pulled: Path, tmp_path: Path) -> None:
    assert cli("pull", "demo", "-q").code == 0
    store = prepare_store(str(pulled), None, "bfloat16").path
    copy = tmp_path / "data" / "odmoe" / "models" / "chat-moe"
    for name, path in (("org/name", pulled), (store.name, store), ("chat-moe", copy)):
        would = cli("rm", name, "--dry-run")
        assert (would.code, "would remove" in would.out, path.exists()) == (0, True, True)
        assert cli("rm", name, "-y").code == 0
        assert not path.exists()
    assert not list((tmp_path / "hub").glob("models--*"))
    assert {one["kind"] for one in listed(cli).values()} == {"shipped"}


@pytest.mark.parametrize("name", ["nowhere", "../..", "", "/", ".", "many-moe"])
def test_nothing_else_is_removed(cli: CommandLine, tiny: Path, name: str) -> None:
    prepare_store(str(tiny), None, None)
    before = listed(cli)
    answer = cli("rm", name, "-y")
    assert (answer.code, "ConfigError" in answer.err) == (2, True)
    assert listed(cli) == before


def test_a_damaged_or_unfinished_store_is_listed_and_removed(cli: CommandLine, tiny: Path) -> None:
    store = prepare_store(str(tiny), None, None).path
    (store / "manifest.json").write_text("{")
    shutil.copytree(store, store.with_name(".half.partial"))
    for name, format in ((store.name, "damaged"), (".half.partial", "unfinished")):
        assert listed(cli)[name]["format"] == format
        assert cli("rm", name, "-y").code == 0
    assert {one["kind"] for one in listed(cli).values()} == {"shipped"}


def test_it_asks_first(cli: CommandLine, tiny: Path) -> None:
    store = prepare_store(str(tiny), None, None).path
    check_one_line(cli("rm", store.name, stdin=b"y\n"), 2, "ConfigError", ["no terminal", "-y"])
    assert store.exists()


def test_what_a_process_reads_stays(cli: CommandLine, tiny: Path) -> None:
    store = prepare_store(str(tiny), None, None).path
    with (store / "manifest.json").open() as stream, subprocess.Popen(["sleep", "60"], stdin=stream) as reader:
        try:
            check_one_line(cli("rm", store.name, "-y"), 1, "StoreWriteError", ["in use", str(reader.pid), "sleep 60"])
        finally:
            reader.kill()
    assert cli("rm", store.name, "-y").code == 0


def test_a_link_leads_nowhere(cli: CommandLine, tiny: Path, tmp_path: Path) -> None:
    """A link in the models folder goes; what it leads to stays."""
    own = shutil.copytree(tiny, tmp_path / "own")
    folder = tmp_path / "data" / "odmoe" / "models"
    folder.mkdir(parents=True)
    (folder / "linked").symlink_to(own)
    assert listed(cli)["linked"]["family"] == "mixtral"
    assert cli("rm", "linked", "-y").code == 0
    assert (own / "config.json").is_file()
    assert not (folder / "linked").is_symlink()
