"""A store whose making was interrupted, or that another is making: the same bytes in the end."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.place import Place
from checkpoint.sharding import partial_store as module
from checkpoint.sharding.partial_store import Partial, partial_of
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import Source, open_source
from checkpoint.sharding.weights import places
from scheduler.errors import CorruptCheckpointError, StoreMismatchError, StoreWriteError
from support.models.store_making import (
    contents,
    journaled,
    shard,
    stop_after,
)

LAYERS = 8


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    """Eight small layers."""
    return tiny("mixtral", "bfloat16", num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store that was made in one go."""
    return contents(shard(open_source(model), tmp_path_factory.mktemp("whole") / "store").path)


def test_interrupted(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    stop_after(open_source(model), tmp_path / "store", 3)
    seen: list[tuple[str, int, int]] = []
    made = make_store(open_source(model), tmp_path / "store", progress=lambda *step: seen.append(step))
    assert (made.written, made.resumed) == (True, 3)
    assert [step for step in seen if step[0] == "resume"] == [("resume", n, 3) for n in range(3)]
    assert next(done for what, done, _ in seen if what == "experts") == sum(
        layer.blob_bytes * len(layer.blobs) for layer in list(made.store.manifest.layers.values())[:3]
    )
    assert contents(tmp_path / "store") == whole


def test_dense_part_is_taken_over_too(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Killed between the last file and the rename."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            shard(open_source(model), tmp_path / "store")
    dense = partial_of(tmp_path / "store") / "store" / "dense" / "dense-00000.safetensors"
    before = dense.stat().st_ino
    made = make_store(open_source(model), tmp_path / "store")
    assert made.resumed == LAYERS
    assert (made.store.dense / dense.name).stat().st_ino == before
    assert contents(tmp_path / "store") == whole


# --- damaged between two runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that was stopped after five layers."""
    target = tmp_path_factory.mktemp("half") / "store"
    stop_after(open_source(model), target, 5)
    return partial_of(target)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_may_happen_to_what_is_half_done(
    half: Path, model: Path, tmp_path: Path, whole: dict[str, bytes], data: st.DataObject
) -> None:
    target = tmp_path / "store"
    for old in (target, partial_of(target)):
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(shutil.copytree(half, partial_of(target)))
    for _ in range(data.draw(st.integers(1, 3))):
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        file = data.draw(st.sampled_from(files))
        size = file.stat().st_size
        match data.draw(st.sampled_from(["flip", "cut", "grow", "lose", "zero"])):
            case "flip" if size:
                text = bytearray(file.read_bytes())
                text[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
                file.write_bytes(text)
            case "cut":
                os.truncate(file, data.draw(st.integers(0, size)))
            case "grow":
                os.truncate(file, size + data.draw(st.integers(1, 9000)))
            case "lose":
                file.unlink()
            case _:
                file.write_bytes(bytes(size))
    (folder / "store" / "stranger").write_text("not ours")
    shard(open_source(model), target)
    assert contents(target) == whole
    assert os.listdir(tmp_path) == ["store"]


def test_a_line_of_the_journal_that_was_changed_is_not_believed(
    half: Path, model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Nor what follows it. The bytes agree with their checksums, and would be read from the wrong places."""
    target = tmp_path / "store"
    journal = Path(shutil.copytree(half, partial_of(target))) / "journal"
    lines = journal.read_text().splitlines()
    entry = json.loads(lines[2])
    assert entry["spec"]["tensors"][1]["offset"] > 0
    entry["spec"]["tensors"][1]["offset"] = 0
    lines[2] = json.dumps(entry)
    journal.write_text("\n".join(lines) + "\n")
    assert make_store(open_source(model), target).resumed == 1
    assert contents(target) == whole


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dtype", "weights", "format"])
def test_half_of_another_is_dropped(model: Path, tmp_path: Path, whole: dict[str, bytes], what: str) -> None:
    target, copy = tmp_path / "store", Path(shutil.copytree(model, tmp_path / "model"))
    with pytest.MonkeyPatch.context() as patch:
        if what == "format":
            patch.setattr("checkpoint.sharding.shard.FORMAT", 77)
        stop_after(open_source(copy), target, 5, "float16" if what == "dtype" else None)
    assert journaled(target) == 5
    source = open_source(copy)
    if what == "weights":  # the same header and samples, another byte between them
        place = source_place(source)
        status = place.file.stat()
        with place.file.open("r+b") as stream:
            stream.seek(place.start)
            byte = stream.read(1)[0]
            stream.seek(place.start)
            stream.write(bytes([byte ^ 1]))
        os.utime(place.file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    made = make_store(open_source(copy), target)
    assert made.resumed == 0
    assert (contents(target) == whole) is (what != "weights")
    made.store.verify()


def source_place(source: Source) -> Place:
    """An expert tensor of which at least the first byte is not one of the fingerprint's samples."""
    size = {file: file.stat().st_size for file in source.weight_files()}
    for place in places(source).values():
        step = max(size[place.file] // 256, 1)
        if place.nbytes > 10_000 and place.start % step > 600:
            return place
    raise LookupError("the fingerprint covers everything")


def test_checkpoint_that_is_damaged_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Not even the layers before the damage: they would be of no use."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (last,) = [
        place
        for key, place in places(open_source(copy)).items()
        if key.endswith("7.block_sparse_moe.experts.3.w2.weight")
    ]
    with last.file.open("r+b") as stream:
        stream.seek(last.start)
        stream.write(b"\xff\xff")
    seen: list[tuple[str, float]] = []
    with pytest.raises(CorruptCheckpointError, match=r"layers\.7\.mlp\.experts\.down_proj"):
        shard(open_source(copy), tmp_path / "store", progress=lambda what, done, of: seen.append((what, done / of)))
    assert ("experts", 28 / 32) in seen
    assert os.listdir(tmp_path) == ["model"]


# --- two at once ------------------------------------------------------------------------------------------------------


def test_second_waits_and_uses_what_the_first_made(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    target, results, waits = tmp_path / "store", [], []

    def make() -> None:
        results.append(make_store(open_source(model), target, progress=lambda *step: waits.append(step[0])))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made.written for made in results) == [False, False, True]
    assert "wait" in waits
    assert contents(target) == whole
    assert os.listdir(tmp_path) == ["store"]


def test_first_that_does_not_get_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Partial.claim(tmp_path / "store", lambda *step: None)
    assert held is not None
    monkeypatch.setattr(module, "IDLE_S", 0.3)
    with pytest.raises(StoreWriteError, match=rf"another process \({os.getpid()}\) is writing the store .*end it"):
        shard(open_source(model), tmp_path / "store")
    held.discard()
    shard(open_source(model), tmp_path / "store").verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "dtype"), [(False, "bfloat16"), (True, "float32")], ids=["no directory", "an empty directory"]
)
def test_another_machine_was_faster(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, dtype: str
) -> None:
    """Where locks do not reach: its store is used if it is the same, and named if it is not."""
    other = shard(open_source(model), tmp_path / "other", dtype)
    target, publish = tmp_path / "store", Partial.publish
    if there:
        target.mkdir()

    def late(self: Partial, manifest: str) -> None:
        shutil.copytree(other.path, target, dirs_exist_ok=True)
        publish(self, manifest)

    monkeypatch.setattr(Partial, "publish", late)
    if dtype == "bfloat16":
        shard(open_source(model), target).verify()
    else:
        with pytest.raises(StoreMismatchError, match="float32 experts, not bfloat16"):
            shard(open_source(model), target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "store"]
