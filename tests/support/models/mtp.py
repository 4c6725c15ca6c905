"""Tiny checkpoints with a multi-token-prediction head, under the names that each family publishes it with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models import families
from support.models.checkpoints import randomise

PUBLISHED = {
    "deepseek_v3": ("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm4_moe": ("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3_next": ("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
"""The beginning of the names, what follows in those of the layer, and the names of the other modules."""

LITTLE = 0.003
"""Of what a layer would add."""


@dataclass(frozen=True)
class WithHead:
    """A checkpoint, and Transformers' model of a layer more, whose last layer the head's is. `modules`: enorm, hnorm,
    eh_proj, norm."""

    path: Path
    longer: Any
    modules: list[Any]
    normed: bool
    """A next pass reads norm(h')."""

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What the head drafts after `tokens`, from the paper's equations. Every token is read again for each draft."""
        enorm, hnorm, eh_proj, norm = self.modules
        inner = copy.copy(self.longer.base_model)
        inner._modules = dict(inner._modules)
        layers = list(inner.layers)
        inner.layers, inner.config = torch.nn.ModuleList(layers[:-1]), copy.deepcopy(inner.config)
        inner.config.num_hidden_layers = len(layers) - 1
        states = inner(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(count):
            following = torch.tensor([[*tokens, *found][1:]])
            joined = torch.cat([enorm(inner.embed_tokens(following)), hnorm(states)], dim=-1)
            positions = torch.arange(joined.shape[1])[None]
            mask = torch.full((joined.shape[1],) * 2, float("-inf")).triu(1)[None, None]
            output = layers[-1](
                eh_proj(joined),
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=inner.rotary_emb(joined, positions),
            )
            found.append(int(self.longer.lm_head(norm(output))[0, -1].argmax()))
            last = norm(output) if self.normed else output
            states = torch.cat([states, last[:, -1:]], dim=1)
        return found


def publish(family: str, path: Path, right: bool = False, save: Callable[[Any, Path], Any] | None = None) -> WithHead:
    """A checkpoint with random weights. `right`: the model's layers add little to what they read, and the head sees the
    next token, so that many of its drafts are right."""
    config = families.configuration(family)
    count = config.num_hidden_layers
    config.num_hidden_layers = count + 1
    if family == "qwen3_next":
        config.layer_types = [*config.layer_types, "full_attention"]
    model = randomise(families.auto_class(family).from_config(config, attn_implementation="eager"))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    width, norm = config.hidden_size, type(model.base_model.norm)
    head = torch.nn.ModuleList([norm(width), norm(width), torch.nn.Linear(2 * width, width, bias=False), norm(width)])
    randomise(head, seed=1)
    if right:
        _make_right(model, head)
    (save or type(model).save_pretrained)(model, path)
    file = path / "model.safetensors"
    weights, last = load_file(file), f"model.layers.{count}."
    prefix, layer, *names = PUBLISHED[family]
    parts = list[Any](head)
    prefix = prefix.format(count)
    ours = [name for name in weights if name.startswith(last)]
    moved = {f"{prefix}{layer}{name.removeprefix(last)}": weights.pop(name) for name in ours}
    named = {f"{prefix}{name}.weight": one.weight.detach().contiguous() for name, one in zip(names, parts, strict=True)}
    save_file(weights | moved | named, file, metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields["num_hidden_layers"] = count
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:count]
    (path / "config.json").write_text(json.dumps(fields))
    return WithHead(path, model.eval(), parts, family == "qwen3_next")


@torch.no_grad()
def _make_right(model: Any, head: torch.nn.ModuleList) -> None:
    enorm, _, eh_proj, norm = list[Any](head)
    for name, value in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            value.mul_(LITTLE)
    width = eh_proj.out_features
    eh_proj.weight.copy_(torch.cat([torch.eye(width), LITTLE * eh_proj.weight[:, width:]], dim=1))
    enorm.weight.copy_(type(enorm)(width).weight)  # neutral
    norm.weight.copy_(model.base_model.norm.weight)
