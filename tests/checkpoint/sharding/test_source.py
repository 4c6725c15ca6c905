"""Opening a model directory: what is damaged is refused by a named error that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint.sharding.source import open_source, verify_bytes
from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def refused(model: Path, kind: type[CheckpointError], *names: str) -> None:
    with pytest.raises(kind) as caught:
        open_source(model)
    assert type(caught.value) is kind
    for name in names:
        assert name in str(caught.value)


def publish(model: Path, *names: str) -> None:
    """SHA256SUMS as sha256sum writes it."""
    lines = [f"{hashlib.sha256((model / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (model / "SHA256SUMS").write_text("".join(lines))


def test_demo_opens_with_every_tensor(demo: Path) -> None:
    source = open_source(demo)
    with safe_open(demo / SINGLE, framework="pt") as handle:
        assert set(source.files) == set(handle.keys())
    assert source.weight_files() == [demo / SINGLE]
    assert source.config == json.loads((demo / "config.json").read_text())
    assert {"config.json", "tokenizer.json"} <= {file.name for file in source.aux_files()}
    assert verify_bytes(source)


def test_many_files_open_with_every_tensor(layouts: dict[str, Path]) -> None:
    source = open_source(layouts["many files"])
    assert len(source.weight_files()) > 5
    for file in source.weight_files():
        assert set(load_file(file)) == {key for key, where in source.files.items() if where == file}


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, -1])
def test_truncated_file_is_corrupt(copied: Path, left: int) -> None:
    file = copied / SINGLE
    os.truncate(file, left if left >= 0 else file.stat().st_size + left)
    refused(copied, CorruptCheckpointError, SINGLE)


def test_file_with_bytes_to_spare_is_corrupt(copied: Path) -> None:
    with (copied / SINGLE).open("ab") as stream:
        stream.write(b"\0")
    refused(copied, CorruptCheckpointError, SINGLE)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"17",
        b"null",
        b"\xff\xfe\x00",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": 3}}',
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": ["0", "4"]}}',
        b'{"a": {"data_offsets": [0, null]}}',
        b'{"a": {"data_offsets": [0, 0.5]}}',
        b'{"a":' * 30_000,
    ],
    ids=lambda header: header[:34].decode("latin1"),
)
def test_damaged_header_is_corrupt(copied: Path, header: bytes) -> None:
    (copied / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(copied, CorruptCheckpointError, SINGLE)


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1])
def test_header_length_that_cannot_be_is_corrupt(copied: Path, length: int) -> None:
    with (copied / SINGLE).open("r+b") as stream:
        stream.write(struct.pack("<Q", length))
    refused(copied, CorruptCheckpointError, SINGLE)


def test_shard_that_the_index_names_is_missing(copied_many: Path) -> None:
    lost = sorted(copied_many.glob("*.safetensors"))[1]
    lost.unlink()
    refused(copied_many, MissingShardError, INDEX, lost.name)


def test_tensor_that_its_shard_lacks_is_named(copied_many: Path) -> None:
    index = json.loads((copied_many / INDEX).read_text())
    where = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.extra.weight"] = where
    (copied_many / INDEX).write_text(json.dumps(index))
    refused(copied_many, MissingShardError, INDEX, "model.extra.weight", where)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": None, "b": "c"}}],
    ids=json.dumps,
)
def test_index_without_a_weight_map_is_corrupt(copied_many: Path, index: object) -> None:
    (copied_many / INDEX).write_text(json.dumps(index))
    refused(copied_many, CorruptCheckpointError, INDEX)


def test_index_may_not_lead_outside(copied_many: Path) -> None:
    moved = sorted(copied_many.glob("*.safetensors"))[0]
    moved.rename(copied_many.parent / "outside.safetensors")
    text = (copied_many / INDEX).read_text().replace(moved.name, "../outside.safetensors")
    (copied_many / INDEX).write_text(text)
    refused(copied_many, CorruptCheckpointError, INDEX)


def test_config_that_is_missing(copied: Path) -> None:
    (copied / "config.json").unlink()
    refused(copied, MissingShardError, "config.json", "give one that has")
    for name in ("b", "a"):
        (copied / name).mkdir()
        (copied / name / "config.json").write_text("{}")
    refused(copied, MissingShardError, f"give one of the models in it: {copied / 'a'}, {copied / 'b'}")


@pytest.mark.parametrize("text", [b"", b"{", b"model_type: mixtral", b"\xff\xfe{}", b"[1]", b'"x"', b"[" * 30_000])
def test_config_that_is_no_json_object(copied: Path, text: bytes) -> None:
    (copied / "config.json").write_bytes(text)
    refused(copied, CorruptCheckpointError, "config.json")


def test_only_pytorch_weights(copied: Path) -> None:
    (copied / SINGLE).rename(copied / "pytorch_model.bin")
    refused(copied, CheckpointError, str(copied), ".bin")


def test_no_weights_at_all(copied: Path) -> None:
    (copied / SINGLE).unlink()
    refused(copied, MissingShardError, SINGLE, INDEX)


def test_not_a_directory(copied: Path, tmp_path: Path) -> None:
    refused(copied / SINGLE, CheckpointError, SINGLE)
    refused(tmp_path / "nowhere", CheckpointError, "nowhere")


def test_single_file_beside_an_index_is_read_as_transformers_reads_it(copied: Path, copied_many: Path) -> None:
    """One file wins there, so it does here."""
    from transformers import AutoModelForCausalLM

    weights = load_file(copied / SINGLE)
    weights["model.norm.weight"].fill_(7.0)
    save_file(weights, copied_many / SINGLE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(copied_many).model.norm.weight
    with safe_open(open_source(copied_many).files["model.norm.weight"], framework="pt") as handle:
        assert handle.get_tensor("model.norm.weight").equal(theirs)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_in_what_is_read_gives_a_named_error_or_none(
    copied_many: Path, flip: Callable[[Path, int], None], data: st.DataObject
) -> None:
    """The headers, the index and the configuration are all that opening reads."""
    file = data.draw(st.sampled_from(sorted(copied_many.iterdir())))
    end = file.stat().st_size
    if file.suffix == ".safetensors":
        end = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    bit = data.draw(st.integers(0, end * 8 - 1))
    flip(file, bit)
    said = ""
    try:
        open_source(copied_many)
    except CheckpointError as error:
        said = str(error)
    finally:
        flip(file, bit)
    assert not said or file.name in said


# --- digests ----------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_is_found_and_named(copied: Path, flip: Callable[[Path, int], None]) -> None:
    publish(copied, SINGLE, "config.json")
    assert verify_bytes(open_source(copied))
    size = (copied / SINGLE).stat().st_size
    for bit in (size * 8 - 1, size * 4 + 3):
        flip(copied / SINGLE, bit)
        with pytest.raises(CorruptCheckpointError, match=SINGLE):
            verify_bytes(open_source(copied))
        flip(copied / SINGLE, bit)
    assert verify_bytes(open_source(copied))


def test_nothing_published_is_nothing_verified(copied: Path) -> None:
    assert verify_bytes(open_source(copied)) is False


def test_published_file_that_is_missing(copied: Path) -> None:
    publish(copied, SINGLE, "config.json", "generation_config.json")
    (copied / "generation_config.json").unlink()
    with pytest.raises(MissingShardError, match="generation_config"):
        verify_bytes(open_source(copied))


def test_sums_with_blank_lines_and_stars(copied: Path) -> None:
    digest = hashlib.sha256((copied / SINGLE).read_bytes()).hexdigest()
    (copied / "SHA256SUMS").write_text(f"\n{digest.upper()} *{SINGLE}\n\n")
    assert verify_bytes(open_source(copied))


def test_sums_that_are_no_text(copied: Path) -> None:
    (copied / "SHA256SUMS").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CorruptCheckpointError, match="SHA256SUMS"):
        verify_bytes(open_source(copied))


def test_blob_of_the_hub_cache_names_its_own_digest(copied: Path, flip: Callable[[Path, int], None]) -> None:
    blobs = copied.parent / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256((copied / SINGLE).read_bytes()).hexdigest()
    (copied / SINGLE).rename(blob)
    (copied / SINGLE).symlink_to(blob)
    assert verify_bytes(open_source(copied))
    flip(blob, blob.stat().st_size * 8 - 1)
    with pytest.raises(CorruptCheckpointError, match=SINGLE):
        verify_bytes(open_source(copied))


# --- what names a checkpoint ------------------------------------------------------------------------------------------


def test_copy_has_the_same_fingerprint_and_another_stamp(copied: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(copied, tmp_path / "again"))
    one, two = open_source(copied), open_source(again)
    assert one.fingerprint == two.fingerprint
    assert one.stamp != two.stamp
    assert open_source(copied) == one


def test_another_configuration_or_header_is_another_fingerprint(copied: Path, layouts: dict[str, Path]) -> None:
    before = open_source(copied).fingerprint
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert open_source(copied).fingerprint == before, "the order of the fields says nothing"
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 17.0}))
    assert open_source(copied).fingerprint != before
    assert len({open_source(layout).fingerprint for layout in layouts.values()}) == len(layouts)


def test_touched_weights_have_another_stamp(copied: Path) -> None:
    before = open_source(copied)
    status = (copied / SINGLE).stat()
    os.utime(copied / SINGLE, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    after = open_source(copied)
    assert after.fingerprint == before.fingerprint
    assert after.stamp != before.stamp


# --- what the files may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["extra.json", "tokenizer.model", "config.json", SINGLE, "vocab.txt", "a.tiktoken"])
def test_link_that_leads_out_of_the_model(copied: Path, tmp_path: Path, name: str) -> None:
    """Its content would be copied into the store, and to every host."""
    secret = tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    if (copied / name).exists():
        (copied / name).rename(secret)
    else:
        secret.write_text('{"password": "x"}')
    (copied / name).symlink_to(secret)
    refused(copied, CheckpointError, str(copied / name), f"is a link to {secret}", "outside")


def test_link_that_leads_nowhere(copied: Path) -> None:
    (copied / "tokenizer.json").symlink_to(copied / "gone.json")
    refused(copied, MissingShardError, "tokenizer.json", "gone.json, which is not there")


def test_links_of_the_hub_cache_and_into_the_model_are_read(copied: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in copied.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (snapshot / "again.json").symlink_to(snapshot / "config.json")
    linked = tmp_path / "link"
    linked.symlink_to(snapshot)
    assert {"config.json", "again.json"} <= {file.name for file in open_source(linked).aux_files()}


@pytest.mark.parametrize("name", [SINGLE, "tokenizer.json", "config.json"])
def test_pointer_of_git_lfs_is_named_as_such(copied: Path, name: str) -> None:
    (copied / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 11234567\n")
    refused(copied, CorruptCheckpointError, name, "git-lfs pointer", f"run git lfs pull in {copied}")


def test_adapter_beside_the_weights_is_not_passed_over(copied: Path) -> None:
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    (copied / "adapter_model.safetensors").write_bytes(b"")
    refused(copied, CheckpointError, "adapter_config.json, adapter_model.safetensors", "org/base", "merge_and_unload")


def test_only_what_was_downloaded_is_to_be_fetched_again(copied: Path, tmp_path: Path) -> None:
    os.truncate(copied / SINGLE, 100)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(copied)
    assert "fetch" not in str(caught.value)
    snapshot = tmp_path / "snapshots" / "abc"
    shutil.copytree(copied, snapshot)
    refused(snapshot, CorruptCheckpointError, "fetch it again")
    (copied / ".cache" / "huggingface").mkdir(parents=True)  # as `hf download --local-dir` leaves it
    refused(copied, CorruptCheckpointError, "fetch it again")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**5},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"vision_config": {"depth": 10**9}},
        {"first_k_dense_replace": 10**9},
        {"num_local_experts": 10**9},
        {"hidden_size": 10**15},
        {"num_attention_heads": 10**12},
        {"layer_sizes": [{"n_layer": 10**8}]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_sizes_that_the_weights_cannot_have(copied: Path, change: dict[str, object]) -> None:
    """Told before anything is built: a list of 10^9 layer types takes all memory."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | change))
    refused(copied, CorruptCheckpointError, "config.json has", "the weight files hold")


@pytest.mark.parametrize("deep", ["[", '{"a": '])
def test_config_that_is_nested_deeply(copied: Path, deep: str) -> None:
    config = (copied / "config.json").read_text().rstrip().removesuffix("}")
    close = {"[": "]", '{"a": ': "}"}[deep]
    (copied / "config.json").write_text(f'{config}, "deep": {deep * 400}1{close * 400}}}')
    refused(copied, CorruptCheckpointError, "config.json is nested")


@pytest.mark.parametrize("shape", [[-1, 4], "x", [1.5], None])
def test_shape_that_cannot_be_is_corrupt(copied: Path, shape: object) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (copied / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(copied, CorruptCheckpointError, SINGLE)
