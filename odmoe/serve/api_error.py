"""Errors as a client gets them: an HTTP status, and the error object of the OpenAI API."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from odmoe.serve.sse import encode
from scheduler import errors as e

AGAIN_S = 1
"""What `Retry-After` says if a request was refused for now."""
MOST_CHARACTERS = 2000
"""Of a message: some repeat what the client has sent."""
OVERFLOW = "context_length_exceeded"
"""The code by which clients know that they are to shorten a conversation."""
INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"


class ApiError(Exception):
    """What a client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        again_s: int = AGAIN_S,
    ) -> None:
        """`param`: the field of the request that is wrong. `code`: for programs, e.g. `model_not_found`. `again_s`: for
        `Retry-After`."""
        message = message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]}..."
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.again_s = again_s

    def as_object(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Those of the response that are not every response's."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.again_s)}
        if self.status in (500, 504):
            return {"X-Should-Retry": "false"}  # the official client would have the whole answer computed again
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self, more: Mapping[str, str] | None = None, body: dict[str, Any] | None = None) -> Response:
        """`more`: headers. `body`: None: OpenAI's error object."""
        headers = {**self.headers, **(more or {})}
        return Response(encode(body or self.as_object()), self.status, headers, "application/json")


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping; it takes no more requests", SERVER, code="stopping")


class _ErrorResponse(NamedTuple):
    status: int
    kind: str
    code: str | None
    says: str | None = None
    """What a client is told. None: the error's own text, which is made for clients."""
    param: str | None = None


TABLE: dict[type[Exception], _ErrorResponse] = {
    e.PromptError: _ErrorResponse(400, INVALID, "invalid_prompt", param="prompt"),
    e.PromptTooLongError: _ErrorResponse(400, INVALID, OVERFLOW, param="prompt"),
    e.ConfigError: _ErrorResponse(400, INVALID, "invalid_value"),
    e.QueueFullError: _ErrorResponse(429, BUSY, "queue_full"),
    e.RequestCancelledError: _ErrorResponse(503, SERVER, "cancelled", "the answer was given up"),
    e.NonFiniteError: _ErrorResponse(500, SERVER, "request_failed", "the model's numbers are not finite any more"),
    e.AnswerWithdrawnError: _ErrorResponse(
        500, SERVER, "request_failed", "a part of the answer was computed wrongly, and may be wrong; ask again"
    ),
    e.AnswerChangedError: _ErrorResponse(
        500, SERVER, "request_failed", "the answer was begun again and is another one now; ask again"
    ),
    e.RequestError: _ErrorResponse(500, SERVER, "request_failed", "the answer could not be finished"),
    e.StoreError: _ErrorResponse(500, SERVER, "request_failed", "the model's files cannot be read"),
    e.MainNodeLostError: _ErrorResponse(503, SERVER, "main_node_lost", "the main node is gone"),
    e.DeadlineError: _ErrorResponse(504, SERVER, "deadline", "a part of the cluster did not answer in time"),
    e.ClusterError: _ErrorResponse(503, SERVER, "cluster_unavailable", "the cluster cannot answer just now"),
    e.ODMoEError: _ErrorResponse(500, SERVER, "request_failed", "the answer could not be finished"),
}
"""Looked up along the error's classes: the most specific entry wins. Errors name paths, hosts and addresses, which
clients do not get: the log has them under the request's id."""
DEFECT = _ErrorResponse(500, SERVER, None, "an error within the server")


def to_api_error(error: Exception, request_id: str = "") -> ApiError:
    """The error that a client gets for any error. `request_id`: under which the log has the rest."""
    if isinstance(error, ApiError):
        return error
    found = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), DEFECT)
    if isinstance(error, e.PromptTooLongError) and error.tokens is not None:
        text = _overflow(error)
    elif found.says is None:
        text = " ".join(str(error).split())
    else:
        text = f"{found.says}; the server's log has the cause under {request_id or 'the request'}"
    return ApiError(found.status, text, found.kind, found.param, found.code)


def _overflow(error: e.PromptTooLongError) -> str:
    """In OpenAI's words, from which clients read the numbers."""
    least = "at least " if error.is_least else ""
    return (
        f"This model's maximum context length is {error.context} tokens. However, your prompt has {least}"
        f"{error.tokens} tokens, and the answer needs at least one. Please reduce the length of the prompt."
    )


def cause_of(error: Exception) -> str | None:
    """What the log has of an error beyond what the client is told: a line, or a defect's traceback. None: nothing."""
    if isinstance(error, ApiError):
        return None
    if not isinstance(error, e.ODMoEError):
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {' '.join(str(error).split())}"  # an error of ours is escaped by itself
