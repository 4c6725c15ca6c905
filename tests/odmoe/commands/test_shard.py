"""`odmoe shard`: what it says about a store that it made, took up, found or checked."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sharding.partial_store import Partial
from checkpoint.store import ExpertStore
from odmoe.commands.shard import run_shard
from odmoe.terminal import Output
from odmoe.text import load_tokenizer
from scheduler.errors import ConfigError, CorruptStoreError, NoTokenizerError, StoreMismatchError, StoreWriteError
from support.machines.cli import CommandLine


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def shard(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`shard(verify=..., ...)`: the JSON object."""

    def run(model: Path = tiny, dtype: str | None = None, verify: bool = False) -> dict[str, Any]:
        run_shard(str(model), str(tmp_path / "store"), Output(json=True, quiet=True), dtype, verify=verify)
        return dict(json.loads(capsys.readouterr().out))

    return run


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stores that were read back, one entry a time."""
    seen: list[Path] = []
    verify = ExpertStore.verify
    monkeypatch.setattr(ExpertStore, "verify", lambda self, *a: (seen.append(self.path), verify(self, *a))[1])
    return seen


def test_made_then_found(shard: Any, tmp_path: Path, read: list[Path]) -> None:
    first = shard()
    store = ExpertStore.open(tmp_path / "store")
    assert first["store"] == str(store.path)
    assert first["all_expert_bytes"] == sum(file.stat().st_size for file in store.path.glob("*.experts"))
    assert first["layers_resumed"] == 0
    assert first["written_s"] >= 0
    second = shard()
    assert second == {k: v for k, v in first.items() if k not in ("layers_resumed", "written_s")}
    assert read == [], "a new store is not read again without --verify"


def test_a_store_that_was_complete_is_called_so(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def title(*forms: str) -> str:
        run_shard(str(tiny), str(tmp_path / "store"), Output(), forms=forms)
        return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("expert store"))

    assert title() == "expert store"
    assert title() == "expert store (already complete)"
    assert title("int4") == "expert store"
    assert title("int4") == "expert store (already complete)"


def test_experts_in_groups(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    made = cli("shard", str(demo), str(tmp_path / "store"), "--experts", "int8", "--group", "32", "--json")
    assert json.loads(made.out)["encoding"] == "int8 of bfloat16, groups of 32"
    for flags, words in (
        (("--group", "32"), "--group is 32; it is for --experts int4 and int8"),
        (("--experts", "int4", "--group", "48"), "--group is 48; allowed: 32, 64, 128"),
        (("--experts", "int8"), "experts in int8 of bfloat16, groups of 32, not int8 in groups of 64"),
    ):
        refused = cli("shard", str(demo), str(tmp_path / "store"), *flags)
        assert refused.code != 0
        assert words in " ".join(refused.err.split())


@pytest.mark.parametrize("fresh", [True, False])
def test_verify_says_what_it_has_read(shard: Any, tmp_path: Path, read: list[Path], fresh: bool) -> None:
    if not fresh:
        shard()
    facts = shard(verify=True)
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert facts["verified_bytes"] == sum(file.stat().st_size for file in files)
    assert facts["verified_blobs"] == facts["moe_layers"] * facts["experts"]
    assert facts["verified_dense_files"] == len([file for file in files if file.parent.name == "dense"])
    assert facts["verified_gb_per_s"] >= 0
    assert len(read) == 1


def test_verify_finds_what_the_clock_does_not_tell(shard: Any, tmp_path: Path) -> None:
    """A byte that has changed on the disk behind the file system's back: size and times are as they were."""
    shard()
    file = max((tmp_path / "store").glob("*.experts"))
    with file.open("r+b") as stream:
        stream.seek(5)
        byte = stream.read(1)[0]
        stream.seek(5)
        stream.write(bytes([byte ^ 4]))
    ExpertStore.open(tmp_path / "store").trust(tmp_path / "cache" / "odmoe" / "verified")
    shard()
    with pytest.raises(CorruptStoreError, match=f"expert 0 of layer .* in {file} fails its checksum"):
        shard(verify=True)


def test_verify_reads_the_dense_part_too(shard: Any, tmp_path: Path) -> None:
    shard()
    file = tmp_path / "store" / "dense" / "dense-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CorruptStoreError, match=f"{file} is missing or fails"):
        shard(verify=True)


def test_resumed_layers_are_told(shard: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Partial.add_layer

    def stop(self: Partial, *rest: Any) -> None:
        add(self, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "add_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            shard()
    assert shard()["layers_resumed"] == 1


def test_errors_have_names(shard: Any, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float64"):
        shard(dtype="float64")
    (tmp_path / "store").write_text("mine")
    with pytest.raises(StoreWriteError, match="is a file"):
        shard()
    (tmp_path / "store").unlink()
    shard()
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    weights = next(other.glob("*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreMismatchError, match=f"belongs to another checkpoint .* than {other}"):
        shard(other)
    with pytest.raises(StoreMismatchError, match="holds float32 experts, not bfloat16"):
        shard(dtype="bfloat16")


def test_forms_are_added_to_a_store_that_was_there(
    shard: Any, tiny: Path, tmp_path: Path, read: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def with_forms(*forms: str) -> None:
        run_shard(str(tiny), str(tmp_path / "store"), Output(json=True, quiet=True), forms=forms)

    first = shard()
    with_forms("int4")
    with_forms("int4", "int2")
    capsys.readouterr()
    found = shard()
    manifest = ExpertStore.open(tmp_path / "store").manifest
    sizes = {f"expert_bytes_{form}": manifest.form_bytes(form) for form in ("int4", "int2")}
    assert found == {k: v for k, v in first.items() if k not in ("layers_resumed", "written_s")} | sizes
    assert read == [], "what was just written is not read again"
    with pytest.raises(ConfigError, match="form 'int3' is unknown; allowed: int4, int2"):
        with_forms("int3")


def test_a_model_without_a_tokenizer_is_sharded_with_a_warning(
    tiny: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, warned in ((tiny, True), (demo, False)):
        run_shard(str(model), str(tmp_path / model.name), Output(json=True))
        assert ("has no tokenizer (tokenizer.json" in capsys.readouterr().err) is warned
    with pytest.raises(NoTokenizerError, match="make its store again"):
        load_tokenizer(ExpertStore.open(tmp_path / tiny.name).dense)


def test_a_tokenizer_that_came_later_is_added(
    tiny: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    shutil.copytree(tiny, model)
    run_shard(str(model), str(store), Output(json=True))
    weights = {file: file.stat().st_mtime_ns for file in store.rglob("*.experts")}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, model)
    capsys.readouterr()
    run_shard(str(model), str(store), Output(json=True), verify=True)
    assert "tokenizer" not in capsys.readouterr().err
    assert load_tokenizer(ExpertStore.open(store).dense)("Tom").input_ids == load_tokenizer(demo)("Tom").input_ids
    assert {file: file.stat().st_mtime_ns for file in store.rglob("*.experts")} == weights
    assert not list(store.rglob(".*"))


def test_parts_are_written_beside_the_store(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    """Of eight with two holders of each expert, none has more than 0.26 of the store."""
    asked = ("shard", str(demo), str(tmp_path / "whole"))
    for _ in range(2):  # the second finds them
        facts = json.loads(cli(*asked, "--parts", "8", "--json").out)
        assert (facts["parts"], facts["replicas"], facts["parts_folder"]) == (8, 2, f"{tmp_path / 'whole'}-parts")
        assert facts["largest_part_of_store"] <= 0.26
    parts = [ExpertStore.open(tmp_path / "whole-parts" / f"part-{n}") for n in range(8)]
    assert all(part.verify().blobs == len(part.held or ()) == 16 for part in parts)
    for flags, words in (
        (["--replicas", "2"], "--replicas is 2; it is for --parts"),
        (["--parts", "0"], "--parts is 0; allowed: 1 or more"),
        (["--parts", "2", "--replicas", "3"], "--replicas is 3; allowed: 1 to 2"),
    ):
        assert words in cli(*asked, *flags).err
    refused = cli("generate", "-m", str(tmp_path / "whole-parts" / "part-3"), "x")
    assert "part-3 is a part of a store, with 16 of its experts, for a worker" in refused.err
