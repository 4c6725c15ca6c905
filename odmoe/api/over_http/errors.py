"""A server's refusals, and what goes wrong on the way to it, as errors of this project's tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from scheduler.errors import (
    ClusterError,
    ConfigError,
    DeadlineError,
    LinkError,
    MainNodeLostError,
    ODMoEError,
    PromptError,
    ProtocolError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    RequestFailedError,
    SecretError,
)

_ABOUT_PROMPTS = ("prompt", "messages")
"""Fields of a request whose refusal is about the prompt, where no code says more."""
_BY_CODE: dict[str, type[ODMoEError]] = {
    "invalid_prompt": PromptError,
    "context_length_exceeded": PromptError,
    **dict.fromkeys(
        (
            *("invalid_value", "unsupported_parameter", "unknown_parameter", "missing_required_parameter"),
            *("no_chat_template", "model_not_found", "no_route"),
        ),
        ConfigError,
    ),
    "invalid_api_key": SecretError,
    "queue_full": QueueFullError,
    "request_failed": RequestFailedError,
    "cancelled": RequestCancelledError,
    "main_node_lost": MainNodeLostError,
    "deadline": DeadlineError,
    "cluster_unavailable": ClusterError,
    **dict.fromkeys(("stopping", "stopped", "too_many_connections"), ClusterError),
    "slow_request": DeadlineError,
    **dict.fromkeys(("foreign_host", "foreign_origin"), ConfigError),
    "too_large": PromptError,
}
"""The codes of errors: those of `odmoe serve`, each with what a loaded model raises; and OpenAI's."""
_BY_STATUS: dict[int, type[ODMoEError]] = {
    401: SecretError,
    403: SecretError,
    404: ConfigError,
    408: DeadlineError,
    413: PromptError,
    422: ConfigError,
    429: QueueFullError,
    503: ClusterError,
    504: DeadlineError,
}


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Raises LinkError, DeadlineError or ProtocolError in place of what httpx2 raises."""
    try:
        yield
    except httpx2.ConnectTimeout as error:
        raise DeadlineError(f"{url} did not take the connection in time; check the address and the network") from error
    except httpx2.TimeoutException as error:
        raise DeadlineError(
            f"{url} sent nothing in time; look at the server's log, or give odmoe.connect a longer timeout"
        ) from error
    except httpx2.ConnectError as error:
        raise LinkError(
            f"no server answers at {url} ({error}); check the address, and start one there with odmoe serve"
        ) from error
    except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError) as error:
        raise LinkError(
            f"the connection to {url} broke ({error}); see whether the server runs, and ask again"
        ) from error
    except httpx2.HTTPError as error:
        raise ProtocolError(f"{url} answers what cannot be read ({error}); check that it has the OpenAI API") from error


def refused(url: str, answer: httpx2.Response) -> ODMoEError:
    """The error of an answer whose status is not 200. Its body has been read."""
    try:
        found: Any = answer.json()
        told = found["error"]
        known = isinstance(told, Mapping)
    except (ValueError, LookupError, TypeError):
        known = False
    if not known:
        return ProtocolError(
            f"{url} answers {answer.status_code} {answer.reason_phrase} without an error of the OpenAI API; check the "
            "URL"
        )
    error = told_error(told, answer.status_code)
    after = answer.headers.get("retry-after")
    return type(error)(f"{error} (try again after {after} s)") if after else error


def told_error(told: Mapping[str, Any], status: int) -> ODMoEError:
    """From the API's error object. `status`: 500 for an error within a stream."""
    message = str(told.get("message") or "the server says no more")
    code = told.get("code")
    if isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code](message)
    about = told.get("param")
    if about in _ABOUT_PROMPTS:
        return PromptError(message)
    if status in _BY_STATUS:
        return _BY_STATUS[status](message)
    if status >= 500:
        return RequestFailedError(message)
    return ConfigError(message) if about else RequestError(message)
