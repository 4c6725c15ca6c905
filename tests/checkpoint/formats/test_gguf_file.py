"""GGUF files that cannot be read, or are damaged: refused by what they are, and nothing is left of a store."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from checkpoint.sharding import shard as shard_module
from checkpoint.sharding.source import open_source
from odmoe.api.plan_model import read_config
from odmoe.text import check_tokenizer, has_vocabulary, load_tokenizer
from scheduler.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingShardError,
    NoTokenizerError,
    UnsupportedFormatError,
)
from support.models import gguf_files
from support.models.checkpoints import build
from support.models.store_making import shard

_MERGES = "tokenizer.ggml.merges"


def tiny() -> Any:
    return build("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.publish(tiny(), tmp_path_factory.mktemp("gguf") / "model.gguf", Kind.Q8_0)


def check_refused(path: Path, kind: type[CheckpointError], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        shard(open_source(path), path.with_name("store"))
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert os.listdir(path.parent) == [path.name]


def test_what_it_holds(file: Path) -> None:
    """By the package gguf, which reads each tensor on its own."""
    source = open_source(file)
    assert source.weight_files() == [file]
    assert source.gguf is not None
    for one in gguf.GGUFReader(file).tensors:
        held = source.gguf.tensors[one.name]
        assert file.read_bytes()[held.start :][: held.nbytes] == one.data.tobytes()
        assert held.shape == gguf.quants.dequantize(one.data, one.tensor_type).shape


def test_its_configuration(file: Path) -> None:
    config, dtype, *_ = read_config(str(file))
    assert dtype is None
    sizes = {"model_type": "qwen3_moe", "num_local_experts": 8, "moe_intermediate_size": 32, "hidden_size": 32}
    assert sizes | {"eos_token_id": 0, "norm_topk_prob": True} == {
        key: config[key] for key in (*sizes, "eos_token_id", "norm_topk_prob")
    }


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_architectures_whose_experts_transformers_does_not_read(tmp_path: Path, family: str) -> None:
    """It makes a dense model of Mixtral's, and random experts for gpt-oss, with no more than a warning."""
    path = gguf_files.publish(build(family), tmp_path / "model.gguf", Kind.F16)
    architecture = {"mixtral": "'llama'", "gpt_oss": "'gpt-oss'"}[family]
    check_refused(path, UnsupportedFormatError, architecture, "qwen3moe", "give the checkpoint that it was made from")


def test_a_part_of_a_file(tmp_path: Path) -> None:
    path = gguf_files.publish(tiny(), tmp_path / "model-00001-of-00003.gguf", Kind.F16, split__count=3)
    check_refused(path, UnsupportedFormatError, "one of 3 parts", "llama-gguf-split --merge")


@pytest.mark.parametrize("count", ["three", -2])
def test_a_number_of_parts_that_is_damaged(tmp_path: Path, count: Any) -> None:
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.F16, split__count=count)
    check_refused(path, CorruptCheckpointError, f"split.count is {count!r}", "fetch it again")


@pytest.mark.slow
def test_a_tokenizer_is_made_once_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    read = AutoTokenizer.from_pretrained

    def counted(*args: Any, **more: Any) -> Any:
        made.append(more.get("gguf_file", ""))
        return read(*args, **more)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0)
    source = open_source(path)
    check_tokenizer(source)
    shard(source, tmp_path / "store")
    kept = load_tokenizer(path)
    assert made == ["model.gguf"]
    os.utime(path, ns=(1, 1))
    assert load_tokenizer(path) is not kept, "another file may have taken its place"


def test_numbers_that_are_not_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0)

    def refuse(data: Any, kind: Kind) -> None:
        raise NotImplementedError(kind)

    monkeypatch.setattr(gguf, "dequantize", refuse)
    check_refused(path, UnsupportedFormatError, "the type", "cannot be dequantised")


@pytest.mark.parametrize("length", [0, 3, 20, 1000, -1])
def test_a_file_that_ends_early(file: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes()[:length])
    check_refused(path, CorruptCheckpointError, "model.gguf is damaged", "fetch it again")


def test_any_damage_to_its_header_is_named(file: Path, tmp_path: Path) -> None:
    """Or leaves a file that can be read: a letter of a token is another one."""
    whole, path = file.read_bytes(), tmp_path / "model.gguf"
    chance = random.Random(1)
    named = 0
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[chance.randrange(2000)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            open_source(path)
        except CheckpointError:
            named += 1
    assert named > 10


LOST: dict[str, tuple[str, type[CheckpointError], tuple[str, ...]]] = {
    "a gate": ("blk.1.ffn_gate_inp.weight", MissingShardError, ("model.layers.1.mlp.gate.weight",)),
    "down": ("blk.1.ffn_down_exps.weight", MissingShardError, ("model.layers.1.mlp.experts.down_proj",)),
    "up": (
        "blk.1.ffn_up_exps.weight",
        CorruptCheckpointError,
        ("blk.1.ffn_gate_exps.weight [8, 32, 32]", "[8, 64, 32]"),
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_a_tensor_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Transformers makes it random, or zero, with no more than a warning."""
    name, kind, words = LOST[case]
    add = gguf_files._add
    monkeypatch.setattr(gguf_files, "_add", lambda writer, of, *rest: None if of == name else add(writer, of, *rest))
    check_refused(gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0), kind, *words)


def test_more_experts_than_its_settings_say(tmp_path: Path) -> None:
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0, qwen3moe__expert_count=4)
    check_refused(path, CorruptCheckpointError, "ffn_gate_exps.weight [8, 32, 32]", "want as [4, 64, 32]")


def test_a_tied_head(tmp_path: Path) -> None:
    model = build("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[], tie_word_embeddings=True)
    store = shard(open_source(gguf_files.publish(model, tmp_path / "model.gguf", Kind.Q8_0)), tmp_path / "store")
    assert store.manifest.config["tie_word_embeddings"] is True


def test_a_file_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_add_tokenizer", lambda writer, size: writer.add_vocab_size(size))
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0)
    assert not has_vocabulary(path)
    with pytest.raises(NoTokenizerError, match=r"model.gguf has no tokenizer"):
        check_tokenizer(open_source(path))


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before an expert is written."""
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_merges", lambda self, merges: self.add_array(_MERGES, ["h nowhere"])
    )
    path = gguf_files.publish(tiny(), tmp_path / "model.gguf", Kind.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "write_layers", None)
        check_refused(path, CorruptCheckpointError, "no tokenizer can be read from", "fetch it again")


def test_other_bytes_make_another_store(file: Path, tmp_path: Path) -> None:
    other = gguf_files.publish(
        build("qwen3_moe", 1, moe_intermediate_size=32, mlp_only_layers=[]), tmp_path / "b.gguf", Kind.Q8_0
    )
    assert open_source(file).fingerprint != open_source(other).fingerprint


def test_published_sums_are_compared(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes())
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  model.gguf\n{'1' * 64}  another.gguf\n")
    with pytest.raises(CorruptCheckpointError, match=r"model.gguf has SHA-256"):
        shard(open_source(path), tmp_path / "store")


def test_a_few_experts_at_a_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoint.family import config_from_dict, meta_model, parse_dtype
    from checkpoint.sharding import convert, gguf_conversion

    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    source = open_source(file)
    plan = gguf_conversion.GgufConversion(source, meta_model(config_from_dict(source.config), parse_dtype("float32")))
    assert source.gguf is not None
    for layer in plan.layers:
        parts = list(plan.parts(layer))
        assert [(part.first, part.last) for part in parts] == [(n, n + 1) for n in range(8)]
        whole = sum(source.gguf.tensors[f"blk.{layer}.ffn_{one}_exps.weight"].nbytes for one in ("gate", "up", "down"))
        assert {sum(place.nbytes for place in part.places.values()) for part in parts} == {whole // 8}


def test_the_store_has_a_plain_configuration(file: Path, tmp_path: Path) -> None:
    store = shard(open_source(file), tmp_path / "store")
    assert json.loads((store.dense / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert store.manifest.described == "ggml integers of 8 bits"
