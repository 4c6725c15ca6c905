"""The settings of `odmoe serve` beside those of its cluster: where it listens, who may ask, how long."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from odmoe.settings.api_keys import LEAST_KEY, ApiKey, check_key, read_key_file
from odmoe.settings.sources import API_KEY
from odmoe.settings.table import Count, Number, Table, count, flag, one_of, setting
from odmoe.settings.units import SIZE, parse_address, parse_bytes
from scheduler.errors import ConfigError

ADDRESS = "HOST:PORT, such as 127.0.0.1:8000; port 0: any that is free"
MOST_CONNECTIONS = 60_000


def _address(text: Any) -> str:
    parse_address(str(text), least=0)
    return str(text)


def _size(text: Any) -> str:
    parse_bytes(text)
    return str(text)


def _network(text: Any) -> str:
    ipaddress.ip_network(str(text))
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
        None, "a file", "File of keys, one a line, or NAME:KEY; needed beyond loopback", heading="Service"
    )
    cors_origin: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (),
        "an origin such as https://chat.example.org, or *",
        "Web pages that may ask from a browser; repeatable",
        heading="Service",
    )
    forwarded_allow_ips: tuple[Annotated[str, BeforeValidator(_network)], ...] = setting(
        (),
        "an address or a network, such as 127.0.0.1 or 10.0.0.0/8",
        "Reverse proxy whose X-Forwarded-For names the client in the log; repeatable",
        heading="Service",
        metavar="ADDRESS",
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
    log_format: str = one_of("text", ("text", "json"), "Lines of the log; json: all of them", heading="Service")

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        super().__init__(named, **values)
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError(f"{flag('api_key')} and {flag('api_key_file')} are both given; give one of them")

    @property
    def address(self) -> tuple[str, int]:
        return parse_address(self.bind, least=0)

    def keys(self, environ: Mapping[str, str] = os.environ) -> tuple[ApiKey, ...]:
        """The API keys. Raises ConfigError for one that is not valid, and for none where others can connect."""
        keys: tuple[ApiKey, ...] = ()
        if self.api_key is not None:
            keys = (ApiKey(check_key(self.api_key, flag("api_key"))),)
        elif self.api_key_file is not None:
            keys = read_key_file(self.api_key_file, f"{flag('api_key_file')} {self.api_key_file}")
        elif API_KEY in environ:
            keys = (ApiKey(check_key(environ[API_KEY], API_KEY)),)
        if not keys and not is_loopback(self.address[0]):
            raise ConfigError(
                f"{flag('bind')} is {self.bind}, where others can connect, and there is no API key; give "
                f"{flag('api_key_file')} FILE, or set {API_KEY}"
            )
        return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name other than localhost counts as reached by others."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
