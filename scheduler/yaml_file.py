"""Reads YAML that a person wrote: cluster files, hardware profiles, configuration files. One reader for all of them,
bounded in size, depth and aliases, so that no file costs more memory or time than its length."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
"""Mappings and lists within each other. A cluster file needs five."""
MAX_DIGITS = 64
"""Characters of a number. One of base 60, as YAML 1.1 has them, takes time that grows with the square of its length."""
MAX_SHOWN = 40
"""Characters of a key in a message."""
MAX_NODES = 1 << 15
"""Values of a document, those of an alias counted at each use: a few lines of aliases can stand for billions."""


def read_yaml(path: Path, what: str) -> Any:
    """The value of the file's one document; None if it is empty. `what` names the file in messages, with its path.

    Raises ConfigError: not there, not to be read, too large, not YAML, nested too deeply, or a key given twice.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}; check the path") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} cannot be read: it has more than {MAX_BYTES:,} bytes; check the path")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} cannot be read: byte {error.start} is not UTF-8 text; convert the file") from error
    return parse_yaml(text, what)


def parse_yaml(text: str, what: str) -> Any:
    """As `read_yaml`, of a text. Messages never show the text itself, which may hold a secret."""
    import yaml  # most runs read no file

    try:
        _check_bounds(text, what)
        loader = _loader()(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except _RepeatedKeyError as error:
        key = key_text(error.key)
        raise ConfigError(f"{what} has {key} twice, in lines {error.first} and {error.line}; keep one") from None
    except _InvalidValueError as error:
        raise ConfigError(f"{what} cannot be read: {error} in line {error.line}; put it in quotes") from None
    except yaml.YAMLError as error:
        # `from None`: the parser's message shows the line.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "some character"
        raise ConfigError(
            f"{what} cannot be read: {where} is not YAML; text with special characters needs quotes"
        ) from None


def key_line(path: Path, *keys: str) -> int | None:
    """The line of a key of mappings within each other, for messages about a file that has been read. None if it is not
    there any more."""
    import yaml

    try:
        node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    line = None
    for wanted in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next(((key, value) for key, value in pairs if key.value == wanted), None)
        if found is None:
            return None
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def key_text(key: object) -> str:
    """A key of a file for a message, of which it is never the larger part."""
    text = str(key)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _check_bounds(text: str, what: str) -> None:
    """Goes through the events, which needs no recursion. Raises ConfigError, YAMLError."""
    import yaml

    sizes: dict[str, int] = {}
    """Values of each anchor that has ended, those of its aliases included."""
    opened: list[tuple[str | None, int]] = []
    """Anchor of each mapping and list that has not ended, and the values before it."""
    nodes = documents = 0
    event: Any
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{what} has a second document, from line {line} on; keep one")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in opened):
                raise ConfigError(f"{what}: in line {line}, a value contains itself by an alias; write it out")
            nodes += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, nodes))
            nodes += 1
            if len(opened) > MAX_DEPTH:
                raise ConfigError(
                    f"{what} is nested more than {MAX_DEPTH} deep in line {line}; check brackets and indentation"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if nodes > MAX_NODES:
            raise ConfigError(
                f"{what} has more than {MAX_NODES:,} values up to line {line}, with those of its aliases; shorten it"
            )


class _RepeatedKeyError(Exception):
    """A key that a mapping has twice, with both lines."""

    def __init__(self, key: str, first: int, line: int) -> None:
        super().__init__(key)
        self.key, self.first, self.line = key, first, line


class _InvalidValueError(Exception):
    """A value that is none of its kind, with its line. The value itself may be a secret."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@functools.cache
def _loader() -> Any:
    """yaml's safe loader, which would take the last of several values with the same key, and numbers of any length."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            line = node.start_mark.line + 1
            if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
                raise _InvalidValueError(f"a number of more than {MAX_DIGITS} characters", line)
            try:
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):  # the 31st of February
                raise _InvalidValueError("a date, number or tag that is not valid", line) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[Any, int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key is no text", key.start_mark)
                line = key.start_mark.line + 1
                value = self.construct_object(key) if key.tag != "tag:yaml.org,2002:merge" else key.value
                if value in lines:
                    raise _RepeatedKeyError(key.value, lines[value], line)
                lines[value] = line
            return super().construct_mapping(node, deep)

    return Loader
