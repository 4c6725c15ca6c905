"""GGUF files: the store and its cluster against Transformers' `from_pretrained(gguf_file=...)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from checkpoint.dense import load_dense
from checkpoint.family import config_from_dict, expert_parameters, experts_modules, parse_dtype
from checkpoint.native.encoded_linear import EncodedLinear
from checkpoint.native.parameters import ExpertParameters
from checkpoint.sharding import convert, gguf_conversion
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from odmoe.commands.shared.whole_model import load_whole
from odmoe.text import load_tokenizer
from support.cases import slow_except
from support.models import families, gguf_files
from support.models.checkpoints import build, randomise
from support.models.published import aligned
from support.models.store_making import shard
from support.nodes.exact import check_as_transformers

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
TOKENS = 8


def qwen2() -> Any:
    return build("qwen2_moe", moe_intermediate_size=1408, shared_expert_intermediate_size=5632)


def qwen3() -> Any:
    return build("qwen3_moe", moe_intermediate_size=768, mlp_only_layers=[])


def qwen3_narrow() -> Any:
    return build("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])


def qwen35() -> Any:
    """With three axes of positions, as real files have them: each takes a part of the rotated dimensions."""
    from transformers import AutoModelForCausalLM

    config = families.configuration("qwen3_5_moe_text")
    config.rope_parameters |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return randomise(AutoModelForCausalLM.from_config(config))


def minimax() -> Any:
    return families.build("minimax_m2")


Build = Callable[[], Any]
CASES: list[tuple[Build, Kind, str]] = [
    (qwen3, Kind.Q8_0, "float32"),
    (qwen3_narrow, Kind.F32, "float32"),
    (qwen3_narrow, Kind.BF16, "bfloat16"),
    (qwen2, Kind.Q4_0, "bfloat16"),
    (minimax, Kind.Q5_1, "bfloat16"),
    (qwen35, Kind.Q8_0, "float32"),
    (qwen35, Kind.F16, "float16"),
]
NARROW = (qwen3_narrow,)
"""Transformers takes the widths of Qwen3-30B-A3B for all files of this family, and refuses others. Here it is given the
right ones."""


def loaded(path: Path, dtype: str, **more: Any) -> Any:
    """Transformers' model of the file, dequantised, with eager experts."""
    from transformers import AutoModelForCausalLM, GgufConfig

    settings = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model, info = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=dtype, experts_implementation="eager", output_loading_info=True, **settings, **more
    )
    assert not info["missing_keys"], "Transformers makes these random: there is nothing to compare with"
    return aligned(model.eval())


class Case:
    """A file, Transformers' model of it, and its store."""

    def __init__(self, made: Build, kind: Kind, dtype: str, folder: Path) -> None:
        self.dtype, self.kind = dtype, kind
        self.path = gguf_files.publish(made(), folder / "model.gguf", kind)
        source = open_source(self.path)
        how = {"config": config_from_dict(source.config)} if made in NARROW else {}
        self.model = loaded(self.path, dtype, **how)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_PART_BYTES", 1)  # an expert at a time, as where it has more than 32 MiB
            patch.setattr(gguf_conversion, "_PIECE_BYTES", 1 << 12)
            self.store: ExpertStore = shard(source, folder / "store", dtype)


NAMES = [f"{build.__name__}-{kind.name}-{dtype}" for build, kind, dtype in CASES]


@pytest.fixture(scope="module", params=slow_except((0,), range(len(CASES))), ids=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*CASES[request.param], tmp_path_factory.mktemp("gguf"))


@pytest.mark.slow
def test_the_experts_that_transformers_loads(case: Case) -> None:
    parameters = ExpertParameters(case.store.manifest, threads=1)
    for layer, (name, module) in experts_modules(case.model).items():
        for key, expected in expert_parameters(name, module).items():
            for expert, wanted in enumerate(expected):
                file, blob = case.store.locate(layer, expert)
                held = bytearray(file.read_bytes()[blob.offset :][: blob.length])
                found = parameters.of(torch.frombuffer(held, dtype=torch.uint8), layer)[key]
                assert torch.equal(found, wanted), f"layer {layer}, expert {expert}: {key}"


def test_the_dense_part_that_transformers_loads(case: Case) -> None:
    expected = case.model.state_dict()
    state: dict[str, Any] = load_dense(
        case.store.dense, case.store.manifest.config, parse_dtype(case.dtype)
    ).state_dict()
    assert state.keys() == {key for key in expected if ".experts." not in key}
    for key, value in state.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key


@pytest.mark.slow
def test_the_dense_part_in_published_numbers(case: Case, tmp_path: Path) -> None:
    store = shard(open_source(case.path), tmp_path / "store", case.dtype, dense="published")
    model = load_dense(store.dense, store.manifest.config, parse_dtype(case.dtype))
    encoded = {name: layer for name, layer in model.named_modules() if isinstance(layer, EncodedLinear)}
    assert bool(encoded) is (case.kind not in (Kind.F32, Kind.F16, Kind.BF16))
    for name, layer in encoded.items():
        assert torch.equal(layer.weight, case.model.get_parameter(f"{name}.weight")), name


def test_tokens_and_logits_of_the_dequantised_model(case: Case, record_property: Any) -> None:
    record_property("family", case.store.manifest.family)
    record_property("published as", "GGUF")
    check_as_transformers(case.model, case.path, case.store, PROMPT, TOKENS)


def test_the_tokenizer_of_transformers(case: Case) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(case.path.parent, gguf_file=case.path.name)
    for folder in (case.path, case.store.dense):
        found = load_tokenizer(folder)
        for text in ("he said: 2+2", "the <|endoftext|> end"):
            ids = found(text)["input_ids"]
            assert ids == expected(text)["input_ids"]
            assert found.decode(ids) == expected.decode(ids)
    assert case.store.manifest.config["eos_token_id"] == 0


def test_verify_compares_with_the_same_model(tmp_path: Path) -> None:
    path = gguf_files.publish(qwen3_narrow(), tmp_path / "model.gguf", Kind.Q8_0)
    expected = loaded(path, "float32", config=config_from_dict(open_source(path).config)).state_dict()
    for key, value in load_whole(path, "float32").state_dict().items():
        assert torch.equal(value, expected[key]), key
