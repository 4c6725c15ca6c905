"""The multi-token-prediction (MTP) head of a model: a decoder layer more, which drafts the token after the next.

    h' = layer(eh_proj([enorm(embedding(t+1)); hnorm(h)]))     (DeepSeek-V3 report, section 2.2)
    logits of t+2 = output head(norm(h'))

h: the model's last hidden state at token t. Embedding and output head are the model's own. Transformers leaves the
head's tensors out when it loads a model; a store's dense part has them under their published names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoint import family
from checkpoint.dense import move_model
from checkpoint.devices.transfer import token_ids
from checkpoint.formats.published import published_format
from checkpoint.formats.unreadable import first_line, is_out_of_memory
from checkpoint.linear_batch import at_once
from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError, CorruptStoreError, DoesNotFitError

_INDEX = "model.safetensors.index.json"
_ROWS = 512
"""Of a prompt that the head reads at once: its attention is of so many rows by all before."""
_BLOCK = "model.layers.0."
_READABLE = "fp8"
"""The published format of which nothing but the tensors themselves says which are quantised."""


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


def find_head(fields: dict[str, Any], names: Iterable[str], label: str) -> dict[str, str]:
    """Our name of each tensor of the head -> its name. `fields`: config.json; `names`: of all tensors; `label`: where
    they are, in words. Raises ConfigError where there is no head that can be read."""
    asked, instead = "drafts are to come from the model's own MTP head", "give --draft-from prompt or shadow"
    family, known = str(fields.get("model_type")), _FAMILIES.get(str(fields.get("model_type")))
    if known is None:
        raise ConfigError(
            f"{asked}, and {label} is of model_type {family!r}, of which none can be read; those of "
            f"{', '.join(_FAMILIES)} can: {instead}"
        )
    published = published_format(fields, Path(label))
    if published is not None and published.name != _READABLE:
        raise ConfigError(f"{asked}, and that of {label} is quantised ({published.name}), which is not read; {instead}")
    prefix = re.compile(known.prefix.format(layers=fields.get("num_hidden_layers")))
    behind = [(name, name[begun.end() :]) for name in names if (begun := prefix.match(name))]
    found = {_renamed(known, rest): name for name, rest in behind if not rest.startswith(_SHARED)}
    if "eh_proj.weight" not in found:
        raise ConfigError(
            f"{asked}, and {label} has none: there are no tensors of it beside the {fields.get('num_hidden_layers')} "
            f"layers. Shard a checkpoint that has them (odmoe shard MODEL OTHER-STORE), or {instead}"
        )
    return found


def find_in_store(store: ExpertStore) -> dict[str, tuple[str, Path]]:
    """Our name of each tensor of the head -> its name, its file. Reads the dense part's index alone. Raises ConfigError
    where there is no head that can be read."""
    files = _weight_map(store.dense)
    found = find_head(store.manifest.config, files, f"the store at {store.path}")
    return {ours: (name, store.dense / files[name]) for ours, name in found.items()}


def head_bytes(store: ExpertStore) -> int:
    """Of the head's weights when it is loaded. Reads headers alone. Raises ConfigError where there is no head."""
    found = 0
    for file, names in _by_file(find_in_store(store)).items():
        with safe_open(file, framework="pt") as opened:
            found += sum(math.prod(opened.get_slice(name).get_shape()) for name in names if "scale" not in name)
    return found * family.parse_dtype(store.manifest.dtype).itemsize


def _by_file(places: dict[str, tuple[str, Path]]) -> dict[Path, dict[str, str]]:
    """File -> name of each tensor in it -> our name."""
    found: dict[Path, dict[str, str]] = {}
    for ours, (name, file) in places.items():
        found.setdefault(file, {})[name] = ours
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
        """Raises ConfigError, CorruptStoreError, DoesNotFitError, LaunchError."""
        places = find_in_store(store)
        self._passes_normed = _FAMILIES[store.manifest.config["model_type"]].passes_normed
        self._block = move_model(_load(store, places, dtype), model.device)
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

    def read(
        self,
        states: torch.Tensor,
        tokens: list[int],
        position: int,
        cache: Any,
        before_each: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The head's state [1, 1, H] for the last of `states` [1, T, H] from `position` on, of the model or of the
        head's pass before, and of the `tokens` [T] that follow them. The cache gains T rows. `before_each`: called
        before every piece."""
        for at in range(0, len(tokens), _ROWS):
            before_each()
            some = tokens[at : at + _ROWS]
            output = self._read(states[:, at : at + len(some)], some, position + at, cache)
        return output[:, -1:]

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
    modules beside it. Raises CorruptStoreError, DoesNotFitError."""
    fields = store.manifest.config
    config = family.config_from_dict(fields | _ONE_LAYER)
    if (published := published_format(fields, store.path)) is not None:
        published.quantizer(None)  # registers it with Transformers
        config.quantization_config = published.loading_settings()
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
    except (SafetensorError, RuntimeError, ValueError, KeyError, OSError) as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"there is too little memory for the multi-token-prediction head in {store.dense} "
                f"({first_line(error)}); give --draft 0, or use a larger machine"
            ) from error
        raise CorruptStoreError(
            f"the multi-token-prediction head in {store.dense} cannot be read: {first_line(error)}"
        ) from error
    lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise CorruptStoreError(
            f"the multi-token-prediction head in {store.dense} is not whole, the first that it lacks is {lost[0]}; "
            "give a whole checkpoint, and make the store again"
        )
    for parameter in block.parameters():  # of a quantised model, others are left in the dtype of the file
        parameter.data = parameter.data.to(dtype)
    block.set_experts_implementation("eager")
    return block.eval()


def _read_tensors(places: dict[str, tuple[str, Path]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file, names in _by_file(places).items():
        with safe_open(file, framework="pt") as opened:
            found |= {ours: opened.get_tensor(name) for name, ours in names.items()}
    return found
