"""Errors as a client gets them: an HTTP status, and the error object of the OpenAI API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from odmoe.serve.sse import encode
from scheduler import errors as e

_log = logging.getLogger(__name__)

AGAIN_S = 1
"""What `Retry-After` says where a request was refused for now."""
INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"


class ApiError(Exception):
    """What a client is told."""

    def __init__(
        self, status: int, message: str, kind: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        """`param`: the field of the request that is wrong. `code`: for programs, e.g. `model_not_found`."""
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def as_object(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Those of the response that are not every response's."""
        if self.status in (429, 503):
            return {"Retry-After": str(AGAIN_S)}
        if self.status in (500, 504):
            return {"X-Should-Retry": "false"}  # the official client would have the whole answer computed again
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self, more: Mapping[str, str] | None = None) -> Response:
        """`more`: headers."""
        headers = {**self.headers, **(more or {})}
        return Response(encode(self.as_object()), self.status, headers, "application/json")


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping; it takes no more requests", SERVER, code="stopping")


class _Told(NamedTuple):
    status: int
    kind: str
    code: str | None
    param: str | None = None


TABLE: dict[type[Exception], _Told] = {
    e.PromptError: _Told(400, INVALID, "invalid_prompt", "prompt"),
    e.ConfigError: _Told(400, INVALID, "invalid_value"),
    e.QueueFullError: _Told(429, BUSY, "queue_full"),
    e.RequestCancelledError: _Told(503, SERVER, "cancelled"),
    e.RequestFailedError: _Told(500, SERVER, "request_failed"),
    e.RequestError: _Told(400, INVALID, None),
    e.MainNodeLostError: _Told(503, SERVER, "main_node_lost"),
    e.DeadlineError: _Told(504, SERVER, "deadline"),
    e.ClusterError: _Told(503, SERVER, "cluster_unavailable"),
    e.ODMoEError: _Told(500, SERVER, None),
}
"""The first class of an error's own ones, from it to the root of the tree, that is here."""


def told(error: Exception) -> ApiError:
    """What a client is told of an error. Of a defect of this program it gets no details."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind in TABLE:
            status, name, code, param = TABLE[kind]
            return ApiError(status, " ".join(str(error).split()), name, param, code)
    return ApiError(500, "an error within the server; its log has the details", SERVER)


def log_defect(error: Exception) -> None:
    """Errors of this program that no table names are logged with their traceback."""
    if not isinstance(error, (ApiError, e.ODMoEError)):
        _log.error("a request failed", exc_info=error)
