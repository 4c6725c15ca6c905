"""The multi-token-prediction (MTP) head of a model: a decoder layer more, which drafts the token after the next.

    h' = layer(eh_proj([enorm(embedding(t+1)); hnorm(h)]))     (DeepSeek-V3 report, section 2.2)
    logits of t+2 = output head(norm(h'))

h: the model's last hidden state at token t. Embedding and output head are the model's own. Transformers leaves the
head's tensors out when it loads a model; a store's dense part has them under their published names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from checkpoint import family
from checkpoint.devices.transfer import token_ids
from checkpoint.formats.published import published_format
from checkpoint.formats.unreadable import first_line
from checkpoint.linear_batch import at_once
from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError, CorruptStoreError

_INDEX = "model.safetensors.index.json"
_ROWS = 512
"""Of a prompt that the head reads at once: its attention is of so many rows by all before."""
_BLOCK = "model.layers.0."
_READABLE = "fp8"
"""The published format whose tensors Transformers dequantises wherever they are in a model."""


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family publishes its head: the beginning of its tensors' names, and what the rest becomes."""

    prefix: str
    renamed: tuple[tuple[str, str], ...]
    """Patterns behind the prefix, and our names. The first that fits counts."""
    passes_normed: bool
    """The head's next pass reads norm(h'), not h', as the family's models are run (vLLM)."""


_BEHIND = _Names(
    r"model\.layers\.{layers}\.",
    ((r"(enorm|hnorm|eh_proj)\.", r"\1."), (r"shared_head\.norm\.", "norm."), ("", _BLOCK)),
    False,
)
_BESIDE = _Names(
    r"mtp\.",
    (
        (r"pre_fc_norm_embedding\.", "enorm."),
        (r"pre_fc_norm_hidden\.", "hnorm."),
        (r"fc\.", "eh_proj."),
        (r"norm\.", "norm."),
        (r"layers\.0\.", _BLOCK),
    ),
    True,
)
_FAMILIES = {"deepseek_v3": _BEHIND, "glm4_moe": _BEHIND, "qwen3_next": _BESIDE}
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own, in some checkpoints."""
_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def check_head(store: ExpertStore) -> None:
    """Raises ConfigError where a store has no head that can be read. Reads the dense part's index alone."""
    _tensors_of(store)


def _tensors_of(store: ExpertStore) -> dict[str, tuple[str, Path]]:
    """Our name of each tensor of the head -> its name, its file. Raises ConfigError."""
    fields, label = store.manifest.config, f"the store at {store.path}"
    names = _FAMILIES.get(str(fields.get("model_type")))
    if names is None:
        raise ConfigError(
            f"drafts are to come from the multi-token-prediction head, and {label} is of a {fields.get('model_type')}, "
            f"of which none is known (known: {', '.join(_FAMILIES)}); give --draft-from prompt or shadow"
        )
    published = published_format(fields, store.path)
    if published is not None and published.name != _READABLE:
        raise ConfigError(
            f"drafts are to come from the multi-token-prediction head, and that of {label} was published in "
            f"{published.name}, which is not read; give --draft-from prompt or shadow"
        )
    prefix = re.compile(names.prefix.format(layers=fields.get("num_hidden_layers")))
    found: dict[str, tuple[str, Path]] = {}
    for name, file in _weight_map(store.dense).items():
        if begun := prefix.match(name):
            rest = name[begun.end() :]
            if not rest.startswith(_SHARED):
                found[_renamed(names, rest)] = name, store.dense / file
    if "eh_proj.weight" not in found:
        raise ConfigError(
            f"drafts are to come from the multi-token-prediction head, and {label} has none: the checkpoint that it "
            "was made of has no such tensors, or was converted without them. Shard one that has them (odmoe shard "
            "MODEL OTHER-STORE), or give --draft-from prompt or shadow"
        )
    return found


def _weight_map(dense: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((dense / _INDEX).read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptStoreError(f"{dense / _INDEX} cannot be read ({error}); make the store again") from error
    return found


def _renamed(names: _Names, rest: str) -> str:
    for pattern, ours in names.renamed:
        if found := re.match(pattern, rest):
            return found.expand(ours) + rest[found.end() :]
    return rest


class MtpHead:
    """Of a `model` that is loaded, on its device."""

    def __init__(self, store: ExpertStore, model: Any, dtype: torch.dtype) -> None:
        """Raises ConfigError, CorruptStoreError."""
        places = _tensors_of(store)
        self._passes_normed = _FAMILIES[store.manifest.config["model_type"]].passes_normed
        self._block = _load(store, places, dtype).to(model.device)
        self._embedding, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        self._device = model.device

    @property
    def modules(self) -> torch.nn.Module:
        """Its own weights."""
        block: torch.nn.Module = self._block
        return block

    def new_cache(self) -> Any:
        """An empty KV cache of the head's one layer."""
        return family.new_cache(self._block.config)

    def read(self, states: torch.Tensor, tokens: list[int], position: int, cache: Any) -> torch.Tensor:
        """The head's states [1, T, H] for `states` [1, T, H] from `position` on, of the model or of the head's pass
        before, and the `tokens` [T] that follow them. The cache gains T rows."""
        outputs = []
        for at in range(0, len(tokens), _ROWS):
            some = tokens[at : at + _ROWS]
            outputs.append(self._read(states[:, at : at + len(some)], some, position + at, cache))
        return torch.cat(outputs, dim=1)

    def _read(self, states: torch.Tensor, tokens: list[int], position: int, cache: Any) -> torch.Tensor:
        block = self._block
        with at_once():
            embedded = block.enorm(self._embedding(token_ids(tokens, self._device)))
            joined = block.eh_proj(torch.cat([embedded, block.hnorm(states)], dim=-1))
            positions = torch.arange(position, position + len(tokens), device=self._device).unsqueeze(0)
            found = block.base_model(
                inputs_embeds=joined, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return block.norm(found) if self._passes_normed else found  # type: ignore[no-any-return]

    def choose(self, state: torch.Tensor) -> int:
        """The most probable token after one of the head's states [1, 1, H]."""
        with at_once():
            normed = state if self._passes_normed else self._block.norm(state)
            return int(self._output(normed)[0, -1].argmax())


def _load(store: ExpertStore, places: dict[str, tuple[str, Path]], dtype: torch.dtype) -> Any:
    """The family's model with one layer, the head's, without embedding, last norm and output head; the head's other
    modules beside it. Raises CorruptStoreError."""
    fields = store.manifest.config
    config = family.config_from_dict(fields | _ONE_LAYER)
    if published_format(fields, store.path) is not None:
        config.quantization_config = fields["quantization_config"] | {"dequantize": True}
    cls: Any = family.model_class(config)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        norm, width = type(self.base_model.norm), config.hidden_size
        for name in ("enorm", "hnorm", "norm"):
            self.add_module(name, norm(width, eps=config.rms_norm_eps))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.base_model.norm = torch.nn.Identity()
        self.base_model.embed_tokens, self.lm_head = torch.nn.Identity(), torch.nn.Identity()

    # Same name and module: Transformers looks its weight conversions up by them.
    stripped: Any = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})
    try:
        with family.BUILDING:
            block, info = stripped.from_pretrained(
                None, config=config, state_dict=_read_tensors(places), dtype=dtype, output_loading_info=True
            )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise CorruptStoreError(
            f"the multi-token-prediction head in {store.dense} cannot be read: {first_line(error)}"
        ) from error
    lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise CorruptStoreError(
            f"the multi-token-prediction head in {store.dense} is not whole, the first that it lacks is {lost[0]}; "
            "give a whole checkpoint, and make the store again"
        )
    block.set_experts_implementation("eager")
    return block.eval()


def _read_tensors(places: dict[str, tuple[str, Path]]) -> dict[str, torch.Tensor]:
    found = {}
    for file in {file for _, file in places.values()}:
        with safe_open(file, framework="pt") as opened:
            found |= {ours: opened.get_tensor(name) for ours, (name, where) in places.items() if where == file}
    return found
