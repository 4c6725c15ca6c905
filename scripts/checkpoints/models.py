"""The published models that random checkpoints are shaped after: their config.json and the names of their tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.errors import ConfigError
from scripts.checkpoints.weights import BF16, FP8, MXFP4, ONES, ZEROS, Weight
from scripts.lib.paths import ROOT
from scripts.peers.checkpoints import EMBEDDING_STD, PROJECTION_STD

GATE_DEVIATION = 2.0
"""Standard deviation of a gate's logits, whose inputs have a root mean square of 1. Scores differ clearly, and every
expert is chosen by some token."""
CONFIGS = ROOT / "tests" / "data" / "configs"


@dataclass(frozen=True, slots=True)
class Model:
    """A published model and what a checkpoint of it has less."""

    name: str
    config_file: str
    """In tests/data/configs: the model's published numbers."""
    encoding: str
    """Of the experts: `BF16`, `MXFP4`, `FP8`."""
    added: dict[str, Any] = field(default_factory=dict)
    """What the published config.json has more, or otherwise."""
    experts_key: str = "num_experts"
    layers: int = 6
    """MoE layers, unless another number is asked for."""
    dense_layers: int = 0
    """Layers without experts that a checkpoint keeps, before the MoE layers."""

    def config(self, layers: int | None, experts: int | None, vocabulary: int | None) -> dict[str, Any]:
        """As config.json, with that many MoE layers, experts a layer and tokens. None: as published; layers: 6 or 2.

        Raises ConfigError for numbers of experts that the model's gate cannot choose from.
        """
        found = json.loads((CONFIGS / self.config_file).read_text()) | self.added
        found["num_hidden_layers"] = self.dense_layers + (layers or self.layers)
        if "first_k_dense_replace" in found:
            found["first_k_dense_replace"] = self.dense_layers
        if experts is not None:
            least, step = self._expert_numbers(found)
            if experts < least or experts % step:
                raise ConfigError(
                    f"{experts} experts; {self.name} allows {least}, {least + step}, {least + 2 * step}, ..."
                )
            found[self.experts_key] = experts
        if vocabulary is not None:
            found |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return found

    def _expert_numbers(self, config: dict[str, Any]) -> tuple[int, int]:
        """The fewest experts that the gate can choose from, and by how many there may be more. DeepSeek's gate ranks
        groups of equal size by the two best experts of each."""
        groups = config.get("n_group") or 1
        chosen = config["num_experts_per_tok"] * groups // (config.get("topk_group") or groups)
        least = max(chosen, 2 * groups) if groups > 1 else chosen
        return -(-least // groups) * groups, groups


MODELS = {
    one.name: one
    for one in (
        Model(
            "gpt-oss-20b",
            "gpt-oss-120b.json",
            MXFP4,
            {
                "num_local_experts": 32,
                "swiglu_limit": 7.0,
                "attention_bias": True,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 4096,
                    "truncate": False,
                },
                "eos_token_id": 200002,
                "pad_token_id": 199999,
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": [
                        "model.layers.*.self_attn",
                        "model.layers.*.mlp.router",
                        "model.embed_tokens",
                        "lm_head",
                    ],
                },
            },
            experts_key="num_local_experts",
        ),
        Model(
            "qwen3-30b-a3b",
            "qwen3-30b-a3b.json",
            BF16,
            {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "bos_token_id": 151643, "eos_token_id": 151645},
        ),
        Model(
            "deepseek-v3",
            "deepseek-v3.json",
            FP8,
            {
                "rope_theta": 10000,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                },
                "rms_norm_eps": 1e-6,
                "norm_topk_prob": True,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "num_nextn_predict_layers": 0,  # published with one, which generation does not use
                "bos_token_id": 0,
                "eos_token_id": 1,
                "quantization_config": {
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128],
                },
            },
            experts_key="n_routed_experts",
            layers=2,
            dense_layers=1,
        ),
    )
}


def weights(model: Model, config: dict[str, Any]) -> Iterator[Weight]:
    """Every tensor of the checkpoint, under its published name, layer after layer.

    The dense ones have the same names in Transformers' model. Its experts are merged there, so their names are here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    linear = {f"{name}.weight" for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, value in made.state_dict().items():
        shape = tuple(value.shape)
        if ".experts." in name:
            yield from _experts(model, name, shape)
        elif name.endswith("e_score_correction_bias"):
            yield Weight(name, shape, ZEROS, wide=True)  # published in float32
        elif name == "model.embed_tokens.weight":
            yield Weight(name, shape, BF16, EMBEDDING_STD)
        elif re.search(r"\.(gate|router)\.weight$", name):
            yield Weight(name, shape, BF16, GATE_DEVIATION / shape[1] ** 0.5)
        elif name.endswith("norm.weight"):
            yield Weight(name, shape, ONES)
        else:
            quantised = model.encoding == FP8 and name in linear and name != "lm_head.weight"
            yield Weight(name, shape, FP8 if quantised else BF16, PROJECTION_STD)


def _experts(model: Model, name: str, shape: tuple[int, ...]) -> Iterator[Weight]:
    """The tensors that Transformers merges into this parameter of all experts."""
    stem, _, parameter = name.rpartition(".")
    if model.encoding == MXFP4:
        if parameter.endswith("_bias"):
            yield Weight(name, shape, BF16, PROJECTION_STD)
        else:  # [E, in, out] here, a row of blocks for each output there
            yield Weight(name, (shape[0], shape[2], shape[1]), MXFP4, PROJECTION_STD)
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[parameter]
    each = (shape[1] // len(parts), shape[2])
    for expert in range(shape[0]):
        for part in parts:
            yield Weight(f"{stem}.{expert}.{part}.weight", each, model.encoding, PROJECTION_STD)
