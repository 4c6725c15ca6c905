"""What differs between model families, taken from Transformers.

The model is built on the meta device (shapes, no bytes). Its experts modules are those that Transformers dispatches
through `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import json
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from checkpoint.formats.settings import without_quantisation
from checkpoint.formats.unreadable import first_line
from scheduler.errors import CheckpointError, ConfigError, NotMoEError, UnsupportedFamilyError
from scheduler.types import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_COUNTING = "odmoe_counting"
_AUTOREGRESSIVE = ("ForCausalLM", "ForConditionalGeneration")
"""How the classes are named whose models answer a token at a time."""
_LAYER = re.compile(r"\.(\d+)\.")


def parse_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def config_from_dict(fields: dict[str, Any]) -> PreTrainedConfig:
    """The family's configuration object, of the dequantised model. For a model with images or audio it is that of the
    language model, as AutoModelForCausalLM uses it. Raises CheckpointError for a family that Transformers does not
    know, or a value that it refuses."""
    return _language_part(whole_config(fields))


def whole_config(fields: dict[str, Any]) -> PreTrainedConfig:
    """The same, for a model with images or audio that of the whole. A `model_type` that Transformers does not know
    counts as that of the class in `architectures`, if it knows the class."""
    from transformers import AutoConfig, PreTrainedConfig

    fields = PreTrainedConfig._decode_special_floats(without_quantisation(fields))  # JSON has no infinity
    fields.pop("num_labels", None)  # of a classifier: Transformers names every one
    if isinstance(text := fields.get("text_config"), dict):
        text = {name: value for name, value in text.items() if name != "num_labels"}
        alias = _known_type(text)
        fields["text_config"] = text | ({"model_type": alias} if alias else {})
    model_type = _known_type(fields)
    if model_type is None:
        raise _unknown_type(fields)
    try:
        return AutoConfig.for_model(model_type, **{k: v for k, v in fields.items() if k != "model_type"})
    except Exception as error:
        raise CheckpointError(
            f"config.json describes no {model_type} model that Transformers {transformers_version()} can build: "
            f"{' '.join(str(error).split()) or type(error).__name__:.300}"
        ) from error


def is_alias(fields: dict[str, Any]) -> bool:
    """Whether Transformers knows the model by its `architectures` alone."""
    text = fields.get("text_config")
    parts = [fields, text] if isinstance(text, dict) and "model_type" in text else [fields]
    return any(_known_type(part) not in (None, part.get("model_type")) for part in parts)


def transformers_version() -> str:
    """That of the installed Transformers."""
    from transformers import __version__

    return str(__version__)


def _known_type(fields: dict[str, Any]) -> str | None:
    """The `model_type`, or that of the architecture; None if Transformers knows neither."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return model_type
    known = _types_by_architecture() if isinstance(model_type, str) and model_type else {}
    return next((known[name] for name in _architectures(fields) if name in known), None)


def _architectures(fields: dict[str, Any]) -> list[str]:
    found = fields.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _unknown_type(fields: dict[str, Any]) -> CheckpointError:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, classes = fields.get("model_type"), ", ".join(_architectures(fields))
    beside = f" and architectures {classes:.80}" if classes else ""
    found = difflib.get_close_matches(str(model_type), sorted(CONFIG_MAPPING), 2)
    near = f"; did you mean {' or '.join(found)}?" if found else "; check config.json, or give another model"
    return CheckpointError(
        f"config.json has model_type {str(model_type)[:80]!r}{beside}, which Transformers {transformers_version()} "
        f"does not know{near}"
    )


@functools.cache
def _types_by_architecture() -> dict[str, str]:
    """The model_type of each class of language models, and of models of images and text."""
    from transformers.models.auto import modeling_auto

    mappings = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


def _language_part(config: PreTrainedConfig) -> PreTrainedConfig:
    from transformers import AutoModelForCausalLM

    mapping, part = AutoModelForCausalLM._model_mapping, config.sub_configs.get("text_config")
    if part is None or type(config) not in mapping or mapping[type(config)].config_class is not part:
        return config
    text = config.get_text_config()
    text.dtype = text.dtype or config.dtype
    return text


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The causal language model class of a family, or its class of images and text without the encoders of images.

    Raises UnsupportedFamilyError when it has none.
    """
    cls: Any = auto_class(config)._model_mapping[type(config)]
    return cls if config.get_text_config() is config else _without_towers(cls)


def auto_class(config: PreTrainedConfig) -> Any:
    """Transformers' class that loads a checkpoint of this family: AutoModelForCausalLM, or AutoModelForImageTextToText
    for a family that the former does not know. Raises UnsupportedFamilyError when no class of it answers a token at a
    time."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedFamilyError(
            f"model_type {config.model_type!r} is an encoder with a decoder; give a decoder-only language model"
        )
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        cls = auto._model_mapping.get(type(config), None)
        if cls is not None and cls.__name__.endswith(_AUTOREGRESSIVE):
            return auto
    raise UnsupportedFamilyError(
        f"model_type {config.model_type!r} has no causal language model in Transformers, and no model of images and "
        "text that answers a token at a time; give a checkpoint of a language model"
    )


@functools.cache
def _without_towers(cls: Any) -> type[PreTrainedModel]:
    """A class whose models have no encoders of images and sound. A prompt of text alone does not use them.

    Same name and module: Transformers looks its weight conversions up by them.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        decoder = self.get_decoder()
        for parent in (self, self.base_model):
            for name, child in parent.named_children():
                if isinstance(child, PreTrainedModel) and child not in (self.base_model, decoder):
                    setattr(parent, name, None)

    from transformers import PreTrainedModel

    text_only: type[PreTrainedModel] = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})
    return text_only


def stored_dtype(config: PreTrainedConfig, weights: str = "float32") -> torch.dtype:
    """The checkpoint's dtype, by its configuration or, in one of images and text, its language model's; `weights` if
    neither has one. Raises CheckpointError."""
    named = (config.dtype, config.get_text_config().dtype)
    dtype = next((one for one in named if isinstance(one, torch.dtype)), DTYPES[weights])
    if dtype not in DTYPES.values():
        raise CheckpointError(f"config.json says dtype {dtype_name(dtype)}; allowed: {', '.join(DTYPES)}")
    return dtype


BUILDING = threading.RLock()
"""Held while Transformers builds or loads a model. It changes settings of the whole process meanwhile (torch's default
dtype, how weights are tied), and two threads would restore each other's values."""


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model on the meta device, as `from_pretrained` would build it in `dtype`."""
    cls = model_class(config)
    config = copy.deepcopy(config)
    config.dtype = dtype
    for part in (getattr(config, name, None) for name in config.sub_configs):  # a part is built in its own dtype
        if part is not None:
            part.dtype = dtype
    try:
        with BUILDING, contextlib.ExitStack() as stack:
            for context in cls.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            return cls(config)
    except Exception as error:
        raise CheckpointError(
            f"config.json describes no {config.model_type} model that can be built: {first_line(error)}"
        ) from error


def expert_count(module: torch.nn.Module) -> int:
    """E of an experts module."""
    count: Any = module.num_experts
    return int(count)


def is_experts_module(module: torch.nn.Module) -> bool:
    """Whether Transformers dispatches this module through its ExpertsInterface."""
    return (
        hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    )


def experts_modules(model: torch.nn.Module) -> dict[int, tuple[str, torch.nn.Module]]:
    """Model layer index -> (name, experts module), ascending. Raises NotMoEError when there is none."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        if is_experts_module(module):
            match = _LAYER.search(name)
            layer = int(match.group(1)) if match else len(found)
            if layer in found:
                raise NotMoEError(f"layer {layer} has two experts modules ({found[layer][0]}, {name}); not supported")
            found[layer] = (name, module)
    if not found:
        raise NotMoEError(
            f"{type(model).__name__} has no experts that Transformers dispatches through its ExpertsInterface; "
            "give a Mixture-of-Experts checkpoint (Mixtral, Qwen3-MoE, OLMoE, gpt-oss, DeepSeek, ...)"
        )
    return dict(sorted(found.items()))


def expert_parameters(name: str, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """An experts module's parameters, each [E, ...]. Raises NotMoEError when one is not split by expert."""
    count = expert_count(module)
    parameters = dict(module.named_parameters())
    for key, value in parameters.items():
        if "." in key or value.dim() == 0 or value.shape[0] != count:
            raise NotMoEError(f"{name}.{key} has shape {tuple(value.shape)}, not [{count}, ...]: not split by expert")
    return parameters


def strip_experts(model: torch.nn.Module) -> None:
    """Remove the experts' parameters from a model, so that nothing loads, initialises or counts them."""
    for name, module in experts_modules(model).values():
        for key in expert_parameters(name, module):
            delattr(module, key)
        vars(module)["_is_hf_initialized"] = True


def new_cache(config: PreTrainedConfig) -> Any:
    """An empty cache, as `generate` would make it for this model. Raises UnsupportedFamilyError."""
    from transformers import DynamicCache

    cls = model_class(config)
    if cls._supports_default_dynamic_cache():
        try:
            return DynamicCache(config=config)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UnsupportedFamilyError(
                f"Transformers cannot make a cache for this {config.model_type} configuration: {error!r}"
            ) from error
    module = sys.modules[cls.__module__]
    own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == cls.__module__]
    own = [c for c in own if issubclass(c, DynamicCache)]
    if len(own) != 1:
        raise UnsupportedFamilyError(
            f"model_type {config.model_type!r} takes none of Transformers' dynamic caches; it cannot be run a token "
            "at a time here"
        )
    return own[0]()


def shape_of(
    config: PreTrainedConfig, moe_layers: tuple[int, ...], experts: int, by_layer: tuple[int, ...] = ()
) -> ModelShape:
    """Counts from the text configuration. `experts` is the largest E of any layer, `by_layer` that of each.

    Raises CheckpointError.
    """
    new_cache(config)
    text = config.get_text_config()
    top_k = _top_k(config)
    context = context_of(config) or 1 << 30
    if not 1 <= top_k <= experts or context < 1:
        raise CheckpointError(
            f"config.json says {top_k} of {experts} experts a token and a context of {context}; that cannot be"
        )
    return ModelShape(moe_layers, experts, top_k, text.hidden_size, context, by_layer if len(set(by_layer)) > 1 else ())


def context_of(config: PreTrainedConfig) -> int:
    """The most tokens of prompt and answer; 0 where the configuration names none. With `dynamic` RoPE scaling,
    `max_position_embeddings` is the length before scaling."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    return int(longest * rope["factor"]) if rope.get("rope_type") == "dynamic" else longest


def _top_k(config: PreTrainedConfig) -> int:
    """Experts a token, the most of any layer: as the family's routers choose, else as its configuration says.

    The routers come first, since a family may ignore its configuration's number (PhiMoE always takes two experts).
    Raises UnsupportedFamilyError if neither gives a number.
    """
    measured = _routed_width(config.to_json_string(use_diff=False))
    text = config.get_text_config()
    named = [value for name in _TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)]
    if measured is None and not named:
        raise UnsupportedFamilyError(
            f"how many experts a token of this {config.model_type} takes cannot be told: its routers do not run "
            f"without weights, and config.json has none of {', '.join(_TOP_K_NAMES)}"
        )
    return named[0] if measured is None else measured


@functools.lru_cache(maxsize=8)
def _routed_width(config_json: str) -> int | None:
    """The most experts that any router chooses, from a pass over shapes alone; None if the model cannot do that."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = config_from_dict(json.loads(config_json))
    model = meta_model(config, torch.float32)
    widths: list[int] = []

    def counting(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        widths.append(index.shape[-1])
        return torch.empty_like(hidden)

    ALL_EXPERTS_FUNCTIONS.register(_COUNTING, counting)
    model.set_experts_implementation(_COUNTING)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    with contextlib.suppress(Exception), torch.inference_mode():
        model(input_ids=tokens, past_key_values=new_cache(config), use_cache=True)
    return max(widths) if len(widths) == len(experts_modules(model)) else None
