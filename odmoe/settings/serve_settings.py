"""The settings of `odmoe serve` beside those of its cluster: where it listens, who may ask, how long."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from odmoe.settings.sources import API_KEY
from odmoe.settings.table import Count, Number, Table, count, flag, one_of, setting
from odmoe.settings.units import SIZE, parse_address, parse_bytes
from scheduler.errors import ConfigError

ADDRESS = "HOST:PORT, such as 127.0.0.1:8000; port 0: any that is free"
MOST_CONNECTIONS = 60_000
LEAST_KEY = 16
"""Characters of an API key: a shorter one can be guessed."""


def _address(text: Any) -> str:
    parse_address(str(text), least=0)
    return str(text)


def _size(text: Any) -> str:
    parse_bytes(text)
    return str(text)


class ServeSettings(Table):
    """Raises ConfigError naming the setting, its value and what is allowed."""

    bind: Annotated[str, BeforeValidator(_address)] = setting(
        "127.0.0.1:8000",
        ADDRESS,
        "Address to listen on; port 0: any (default: 127.0.0.1:8000)",
        heading="Service",
        common=True,
        metavar="HOST:PORT",
    )
    api_key: str | None = setting(
        None,
        f"at least {LEAST_KEY} visible characters",
        "Key that clients send; others on the machine see it, unlike --api-key-file and ODMOE_API_KEY",
        heading="Service",
        metavar="KEY",
        repr=False,
    )
    api_key_file: str | None = setting(
        None, "a file", "File of keys, one a line; needed beyond loopback", heading="Service"
    )
    cors_origin: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (),
        "an origin such as https://chat.example.org, or *",
        "Web pages that may ask from a browser; repeatable",
        heading="Service",
    )
    model_name: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (),
        "text of at least one character",
        "Name of the model for clients (default: the last part of --model); repeatable: more names for it",
        heading="Service",
    )
    strict: bool = setting(
        False,
        "true or false",
        "Refuse requests with fields that are not known, which are ignored otherwise",
        heading="Service",
    )
    max_tokens: Count | None = count(
        None, "Tokens of a chat's answer that does not say (default: to the end of the context)", heading="Service"
    )
    request_timeout: Number | None = setting(
        None,
        "a number above 0",
        "Seconds after which an answer that is not complete fails (default: none)",
        heading="Service",
        gt=0,
    )
    drain_timeout: Number = setting(
        600.0,
        "a number of at least 0",
        "Seconds that answers under way have left after SIGTERM or Ctrl-C",
        heading="Service",
        ge=0,
    )
    connections: Count | None = count(
        None,
        "Connections at once (default: 512, and one an answer that may wait)",
        heading="Service",
        most=MOST_CONNECTIONS,
    )
    address_connections: Count | None = count(
        None,
        "Connections at once from one address (default: 256, and one an answer that may wait)",
        heading="Service",
        most=MOST_CONNECTIONS,
    )
    body_size: Annotated[str, BeforeValidator(_size)] = setting(
        "16MiB", SIZE, "Most bytes of a request's body (default: 16MiB)", heading="Service", metavar="SIZE"
    )
    request_memory: Annotated[str, BeforeValidator(_size)] = setting(
        "256MiB",
        SIZE,
        "Memory of all requests' bodies, prompts and waiting results; who has most gives way (default: 256MiB)",
        heading="Service",
        metavar="SIZE",
    )
    log_format: str = one_of("text", ("text", "json"), "Lines about requests", heading="Service")

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        super().__init__(named, **values)
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError(f"{flag('api_key')} and {flag('api_key_file')} are both given; give one of them")

    @property
    def address(self) -> tuple[str, int]:
        return parse_address(self.bind, least=0)

    def keys(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """The API keys. Raises ConfigError for one that is not valid, and for none where others can connect."""
        if self.api_key is not None:
            keys, source = [self.api_key], flag("api_key")
        elif self.api_key_file is not None:
            keys, source = _keys_in(self.api_key_file), f"{flag('api_key_file')} {self.api_key_file}"
        else:
            keys, source = [environ[API_KEY]] if API_KEY in environ else [], API_KEY
        for key in keys:
            if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"{source} has a key of {len(key)} characters that is not valid (it is not shown); allowed: at "
                    f"least {LEAST_KEY} ASCII characters without spaces"
                )
        if not keys and not is_loopback(self.address[0]):
            raise ConfigError(
                f"{flag('bind')} is {self.bind}, where others can connect, and there is no API key; give "
                f"{flag('api_key_file')} FILE, or set {API_KEY}"
            )
        return tuple(keys)


def _keys_in(file: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag('api_key_file')} {file} cannot be read: {why}; check the path") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{flag('api_key_file')} {file} has no key; write one into each line")
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name other than localhost counts as reached by others."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
