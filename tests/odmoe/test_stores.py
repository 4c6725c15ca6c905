"""Stores are found again, made once, and never mistaken for another's."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from checkpoint.sharding.partial_store import Partial, partial_of
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from odmoe.stores import cache_dir, prepare_store
from scheduler.errors import CorruptStoreError, StoreMismatchError, StoreWriteError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "odmoe"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where stores were written."""
    import checkpoint.sharding.shard

    where: list[Path] = []
    real = checkpoint.sharding.shard.make_store

    def make_store(source: Any, target: Path, *rest: Any) -> Any:
        where.append(target)
        return real(source, target, *rest)

    monkeypatch.setattr(checkpoint.sharding.shard, "make_store", make_store)
    return where


def damage(store: Path) -> Path:
    """One bit of the first expert turned over; the file."""
    file = min(store.glob("*.experts"))
    with file.open("r+b") as stream:
        byte = stream.read(1)[0]
        stream.seek(0)
        stream.write(bytes([byte ^ 1]))
    return file


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache" / "odmoe"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == tmp_path / ".cache" / "odmoe"


def test_made_once_in_the_cache_and_found_again(model: Path, cache: Path, made: list[Path]) -> None:
    first = prepare_store(str(model), None, None)
    assert first.path.parent == cache / "stores"
    assert first.path.name.startswith("mixtral-float32-")
    again = prepare_store(f"{model}/../model", None, None)
    assert again.path == first.path
    assert made == [first.path]
    assert sorted(p.name for p in (cache / "stores").iterdir()) == [first.path.name]


def test_bytes_are_verified_once(model: Path) -> None:
    seen: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        seen.append(what)
        assert 0 <= done <= total

    prepare_store(str(model), None, None, progress)
    assert {"experts", "dense", "verify"} <= set(seen)
    seen.clear()
    prepare_store(str(model), None, None, progress)
    assert seen == []


def test_a_store_for_each_dtype(model: Path, made: list[Path]) -> None:
    stores = [prepare_store(str(model), None, dtype) for dtype in (None, "bfloat16", "float16", "bfloat16")]
    assert [store.manifest.dtype for store in stores] == ["float32", "bfloat16", "float16", "bfloat16"]
    assert len(made) == len(set(made)) == 3


def test_a_store_is_named_by_what_is_in_it(
    model: Path, tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a copy elsewhere, nor times, nor templates, generation settings or run-time settings make another."""
    first = prepare_store(str(model), None, None).path
    weights = min(model.glob("*.safetensors"))
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    assert prepare_store(str(model), None, None).path == first
    other = Path(shutil.copytree(model, tmp_path / "snapshots" / ("b" * 40)))
    (other / "chat_template.jinja").write_text("{{ messages }}")
    (other / "generation_config.json").write_text('{"eos_token_id": 7}')
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 17.0, "transformers_version": "5.0.0"}))
    shared = prepare_store(str(other), None, None)
    assert shared.path == first
    assert (shared.dense / "chat_template.jinja").read_text() == "{{ messages }}"
    assert shared.manifest.config["rope_theta"] == 17.0
    again = prepare_store(str(model), None, None)
    assert not (again.dense / "chat_template.jinja").exists()
    assert again.manifest.config == json.loads((model / "config.json").read_text())
    assert again.verify().files == len(again.manifest.dense)
    assert made == [first]


def test_one_byte_of_the_weights_makes_another_store(model: Path) -> None:
    """Wherever it is, also with the size and the times of the file as they were."""
    before = prepare_store(str(model), None, None)
    weights = min(model.glob("*.safetensors"))
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare_store(str(model), None, None).path != before.path


def test_weights_that_become_other_parameters_make_another_store(model: Path) -> None:
    """Fewer layers of the same files."""
    before = prepare_store(str(model), None, None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    after = prepare_store(str(model), None, None)
    assert (after.path != before.path, len(after.manifest.layers)) == (True, len(before.manifest.layers) - 1)


def test_weights_are_read_once_to_name_a_store(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import checkpoint.sharding.identity as identity

    read: list[Path] = []
    pieces = identity.pieces
    monkeypatch.setattr(identity, "pieces", lambda file: (read.append(file), pieces(file))[1])
    first = prepare_store(str(model), None, None)
    files = sorted(model.glob("*.safetensors"))
    assert read == files
    monkeypatch.setattr(identity, "_known", {})  # another process
    assert prepare_store(str(model), None, None).path == first.path
    assert read == files


@pytest.mark.parametrize("given", [True, False])
def test_files_of_the_checkpoint_are_read_as_they_are_now(model: Path, tmp_path: Path, given: bool) -> None:
    """The experts are neither written nor read again."""
    where = str(tmp_path / "store") if given else None
    store = prepare_store(str(model), where, None)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (model / "qwen.tiktoken").write_text("IQ== 0")
    seen: list[tuple[str, int]] = []
    again = prepare_store(str(model), where, None, lambda what, done, total: seen.append((what, total)))
    assert again.path == store.path
    assert seen == [], "what has not changed is not read again"
    for name in ("generation_config.json", "tokenizer_config.json", "qwen.tiktoken"):
        assert (again.dense / name).read_bytes() == (model / name).read_bytes()
    (model / "qwen.tiktoken").unlink()
    assert not (prepare_store(str(model), where, None).dense / "qwen.tiktoken").exists()
    assert prepare_store(str(store.path), None, None).verify().nbytes > 0


def test_files_that_cannot_be_copied_into_the_store_are_not_passed_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import checkpoint.sharding.dense_files as dense_files

    def full(file: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(file))

    store = prepare_store(str(model), str(tmp_path / "store"), None)
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    with monkeypatch.context() as patch:
        patch.setattr(dense_files, "write_synced", full)
        with pytest.raises(StoreWriteError, match=r"have changed, and cannot be copied.*No space"):
            prepare_store(str(model), str(store.path), None)
    again = prepare_store(str(model), str(store.path), None)
    assert (again.dense / "generation_config.json").read_text() == '{"eos_token_id": 5}'


def test_a_store_of_an_earlier_version_goes_on(model: Path, cache: Path, made: list[Path]) -> None:
    """It was named by path and times, and its fingerprint has samples of the weights, and config.json."""
    source = open_source(model)
    former = cache / "stores" / f"model-float32-2-{source.stamp[:16]}"
    made_now = prepare_store(str(model), str(former), None)
    old = replace(made_now.manifest, fingerprint=source.fingerprint)
    (former / "manifest.json").write_text(old.to_json())
    made.clear()
    assert prepare_store(str(model), None, None).path == former
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    again = prepare_store(str(model), None, None)
    assert (again.path, again.manifest.fingerprint) == (former, source.fingerprint)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 17.0}))
    given = prepare_store(str(model), str(former), None)
    assert (given.manifest.config["rope_theta"], made) == (17.0, [])


def test_a_store_may_be_given_as_the_model(model: Path, made: list[Path]) -> None:
    store = prepare_store(str(model), None, None)
    made.clear()
    assert prepare_store(str(store.path), None, None).path == store.path
    assert prepare_store(str(store.path), None, "float32").path == store.path
    with pytest.raises(StoreMismatchError, match=r"holds float32 experts, not bfloat16; .*odmoe shard"):
        prepare_store(str(store.path), None, "bfloat16")
    assert made == []


def test_explicit_store_is_made_when_missing(model: Path, tmp_path: Path, cache: Path, made: list[Path]) -> None:
    where = tmp_path / "deep" / "down" / "store"
    assert prepare_store(str(model), str(where), "bfloat16").path == where
    assert prepare_store(str(model), str(where), "bfloat16").path == where
    assert prepare_store(str(model), str(where), None).manifest.dtype == "bfloat16"
    assert made == [where]
    assert not (cache / "stores").exists()


def test_explicit_store_of_another(model: Path, tiny: Path, tmp_path: Path) -> None:
    where = tmp_path / "store"
    prepare_store(str(model), str(where), None)
    with pytest.raises(StoreMismatchError, match=r"holds float32 experts, not float16"):
        prepare_store(str(model), str(where), "float16")
    for file in model.glob("*.safetensors"):
        save_file({name: -value for name, value in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(StoreMismatchError, match=r"belongs to another checkpoint.*another --store"):
        prepare_store(str(model), str(where), None)
    assert prepare_store(str(tiny), str(where), None).path == where


def test_damaged(model: Path, tmp_path: Path) -> None:
    """A store in the cache was made by us, so the message says how to be rid of it."""
    cached = prepare_store(str(model), None, None).path
    own = prepare_store(str(model), str(tmp_path / "own"), None).path
    file = damage(own)
    with pytest.raises(CorruptStoreError, match=f"expert 0 of layer 0 in {file} fails its checksum; make") as caught:
        prepare_store(str(model), str(own), None)
    assert "remove" not in str(caught.value)
    damage(cached)
    with pytest.raises(CorruptStoreError, match=f"remove {cached}, and the next run makes it again"):
        prepare_store(str(model), None, None)
    shutil.rmtree(cached)
    assert prepare_store(str(model), None, None).path == cached


def test_cache_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    store = prepare_store(str(model), str(tmp_path / "store"), None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreWriteError, match=r"file/cache/odmoe/stores cannot be made: .*--store.*XDG_CACHE_HOME"):
        prepare_store(str(model), None, None)
    assert prepare_store(str(model), str(store.path), None).path == store.path, "a store elsewhere needs no cache"


def test_what_was_just_written_is_not_read_again_and_what_has_changed_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    verify = ExpertStore.verify
    monkeypatch.setattr(ExpertStore, "verify", lambda self, *a: (read.append(self.path), verify(self, *a))[1])
    store = prepare_store(str(model), str(tmp_path / "store"), None)
    assert prepare_store(str(model), str(store.path), None).path == store.path
    assert read == []
    file = damage(store.path)
    with pytest.raises(CorruptStoreError, match=file.name):
        prepare_store(str(model), str(store.path), None)
    assert read == [store.path]


def left_behind(target: Path, age_s: float) -> Path:
    """What a run leaves that was killed `age_s` seconds ago."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Partial.claim(target, lambda *step: None)
    assert partial is not None
    partial.keep()
    (partial.folder / "store").mkdir()
    (partial.folder / "store" / "layer-00000.experts").write_bytes(bytes(4096))
    os.utime(partial.folder / "lock", (time.time() - age_s,) * 2)
    return partial.folder


def test_what_killed_runs_left_in_the_cache_goes_in_the_end(model: Path, cache: Path) -> None:
    """A checkpoint that has changed will never take its old half up again."""
    old, young = (left_behind(cache / "stores" / name, age) for name, age in (("old", 1e6), ("young", 60.0)))
    held = Partial.claim(cache / "stores" / "held", lambda *step: None)
    assert held is not None
    os.utime(held.folder / "lock", (1.0, 1.0))
    store = prepare_store(str(model), None, None)
    assert sorted(cache.joinpath("stores").iterdir()) == sorted([young, held.folder, store.path])
    assert not old.exists()
    assert held.folder == partial_of(cache / "stores" / "held")
    held.discard()


def test_forms_that_a_system_needs_are_made_with_the_store_and_added_to_one_that_is_there(
    model: Path, cache: Path, made: list[Path]
) -> None:
    first = prepare_store(str(model), None, None, forms_needed=lambda store: ("",))
    assert first.manifest.forms == {}
    second = prepare_store(str(model), None, None, forms_needed=lambda store: ("int4", "int2"))
    assert list(second.manifest.forms) == ["int4", "int2"]
    third = prepare_store(str(model), None, None, forms_needed=lambda store: ("int2",))
    assert third.manifest == second.manifest
    assert len(made) == 1
    assert not third.verify_once(cache / "verified"), "what was just written is not read again"


def test_a_damaged_form_is_found_when_the_store_is_prepared(model: Path, cache: Path) -> None:
    store = prepare_store(str(model), None, None, forms_needed=lambda store: ("int4",))
    file = min(store.path.glob("*.int4"))
    data = bytearray(file.read_bytes())
    data[1] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=r"\.int4 fails its checksum; remove .*int4\.json"):
        prepare_store(str(model), None, None, forms_needed=lambda store: ("int4",))
