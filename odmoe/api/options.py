"""The options of an answer, as arguments of `Cluster.generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from main_node.sampling import How
    from odmoe.api.asking import Options

_MORE = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Options that `Sampling` has and `Settings` has not."""
_ASKED = ("logprobs", "prompt_logprobs")


def how_of(settings: Settings) -> How:
    """How the settings ask to answer."""
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


def how_asked(settings: Settings, options: Options) -> tuple[int, How]:
    """Most new tokens, and how to answer. What is not given is as in `settings`. Raises ConfigError."""
    from dataclasses import replace

    given = dict(options)
    chosen = changed(settings, {name: given[name] for name in given if name in Settings.model_fields})
    how = how_of(chosen)
    more = {name: given[name] for name in _MORE if given.get(name) is not None}
    if more:
        how["sampling"] = replace(how["sampling"], **{name: _as_sampling(name, value) for name, value in more.items()})
    how.update({name: given[name] for name in _ASKED if given.get(name) is not None})  # type: ignore[typeddict-item]
    schema = schema_text(given.get("schema"))
    if schema is not None:
        how["schema"] = schema
    return chosen.max_new_tokens, how


def changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with changes by the names of Python. Raises ConfigError."""
    if isinstance(changes.get("stop"), str):
        changes["stop"] = [changes["stop"]]
    return Settings(str, **(settings.model_dump(exclude_unset=True) | changes)) if changes else settings


def _as_sampling(name: str, value: Any) -> Any:
    """A value as `Sampling` takes it. Raises ConfigError."""
    try:
        if name == "logit_bias":
            return tuple((int(token), float(bias)) for token, bias in value.items())
        return float(value)
    except (TypeError, ValueError, AttributeError):
        allowed = "a dict of token ids and numbers" if name == "logit_bias" else "a number"
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}") from None


def schema_text(schema: object) -> str | None:
    """A JSON schema as text. Raises ConfigError."""
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"schema cannot be written as JSON ({error}); give a dict of JSON values") from error
    raise ConfigError(f"schema is {schema!r}; allowed: a JSON schema as a dict or as text")
