"""`generation_config.json`, looked at before Transformers reads it: of a broken one it says nothing, or a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError

FILE = "generation_config.json"


def check_generation_file(folder: Path) -> None:
    """Raises ConfigError with the file and the value for what Transformers cannot read, and for ends that are no
    tokens. A model without the file is fine."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); correct that file, or remove it") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} is {given!r:.80}; allowed: a JSON object; correct that file, or remove it")
    ends = given.get("eos_token_id")
    if ends is not None and not (_is_token(ends) or (isinstance(ends, list) and ends and all(map(_is_token, ends)))):
        raise ConfigError(
            f"{path}: eos_token_id is {ends!r:.80}; allowed: a token id, or a list of at least one; correct that file"
        )
    reason = _refusal(given)
    if reason:
        wrong = next((name for name in given if not _refusal({k: v for k, v in given.items() if k != name})), None)
        which = f"{path}: {wrong} is {given[wrong]!r:.80}" if wrong is not None else str(path)
        raise ConfigError(f"{which}, which Transformers refuses ({reason:.200}); correct that file")


def _is_token(given: Any) -> bool:
    return type(given) is int and given >= 0


def _refusal(given: dict[str, Any]) -> str:
    """What Transformers says against these settings. Empty: nothing."""
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(given))
    except Exception as error:  # noqa: BLE001 - of values of any kind, so any kind of error
        return " ".join(str(error).split()) or type(error).__name__
    return ""
