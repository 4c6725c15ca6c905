"""The options of an answer: checked, and as arguments of `Cluster.generate`."""

from __future__ import annotations

import json
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from main_node.sampling import GenerateOptions


class Options(TypedDict, total=False):
    """How to answer. What is left out is as was given to `odmoe.load`, else its default."""

    max_new_tokens: int
    """128 by default."""
    temperature: float | None
    """0 takes the most probable token; so does a model without any of temperature, top_p, top_k and sample."""
    top_p: float | None
    top_k: int | None
    sample: bool
    """Draw with the model's own generation settings."""
    seed: int | None
    stop: str | Sequence[str]
    """The answer ends before any of these texts."""
    stop_token_ids: Sequence[int]
    """The answer ends with any of these tokens, which is no part of its text."""
    ignore_eos: bool
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    """Token id -> what is added to its logit."""
    logprobs: int | None
    """Of each token of the answer: its log-probability, and those of the N most probable tokens."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens."""
    schema: str | Mapping[str, Any] | None
    """A JSON schema that the answer follows."""


_MORE = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Options that `Sampling` has and `Settings` has not."""
_COUNTS = ("logprobs", "prompt_logprobs")


def options_from_settings(settings: Settings) -> GenerateOptions:
    """The options that the settings give, as arguments of `Cluster.generate`."""
    from main_node.sampling import Sampling

    sampling = Sampling(
        settings.sample,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.repetition_penalty,
        settings.seed,
    )
    return {
        "sampling": sampling,
        "stop": settings.stop,
        "ignore_eos": settings.ignore_eos,
    }


def merge_options(settings: Settings, options: Options) -> tuple[int, GenerateOptions]:
    """Most new tokens, and the arguments of `Cluster.generate`. `options`: checked; they override `settings`. Raises
    ConfigError."""
    from dataclasses import replace

    given: dict[str, Any] = {**options}
    changes = {name: given[name] for name in given if name in Settings.model_fields}
    chosen = Settings(str, **(settings.model_dump(exclude_unset=True) | changes)) if changes else settings
    how = options_from_settings(chosen)
    more = {name: given[name] for name in _MORE if name in given}
    if "logit_bias" in more:
        more["logit_bias"] = tuple(more["logit_bias"].items())
    if more:
        how["sampling"] = replace(how["sampling"], **more)
    for name in (*_COUNTS, "schema", "stop_token_ids"):
        if name in given:
            how[name] = given[name]  # type: ignore[literal-required]
    return chosen.max_new_tokens, how


def check_options(options: Options) -> Options:
    """The options, each as its type; without those that are None and stand for none. Raises ConfigError."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name in Settings.model_fields}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    settings = Settings(str, **given)
    found = {name: getattr(settings, name) for name in given}
    for name, parse in _PARSED.items():
        value = options.get(name)
        if value is not None:
            found[name] = parse(name, value)
    return cast("Options", found)


def _number(name: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ConfigError(f"{name} is {value!r}; allowed: a number")


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigError(f"{name} is {value!r}; allowed: 0, 1, 2, ...")
    return count


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(_count(name, token) for token in value)
    except (TypeError, ConfigError):
        raise ConfigError(f"{name} is {value!r}; allowed: a list of token ids") from None


def _biases(name: str, value: Any) -> dict[int, float]:
    try:
        return {operator.index(token): _number(name, bias) for token, bias in value.items()}
    except (TypeError, AttributeError, ConfigError):
        raise ConfigError(f"{name} is {value!r}; allowed: a dict of token ids and numbers") from None


def schema_text(name: str, schema: Any) -> str:
    """A JSON schema as text. Raises ConfigError."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} cannot be written as JSON ({error}); give a dict of JSON values") from error
    raise ConfigError(f"{name} is {schema!r}; allowed: a JSON schema as a dict or as text")


_PARSED: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(_COUNTS, _count),
    "logit_bias": _biases,
    "stop_token_ids": _token_ids,
    "schema": schema_text,
}
"""Options that are no settings: what gives each its type, and raises ConfigError."""
