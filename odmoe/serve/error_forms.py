"""An error's body, in the form of the API whose path was asked."""

from __future__ import annotations

from typing import Any

from odmoe.serve.api_error import OVERFLOW, ApiError

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""How their paths begin."""
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status. Another one: `api_error`."""


def error_object(error: ApiError, path: str, request_id: str = "") -> dict[str, Any]:
    """`path`: that was asked."""
    if path.startswith(OLLAMA):
        return {"error": error.message}
    if path.startswith(ANTHROPIC):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        text = f"prompt is too long: {error.message}" if error.code == OVERFLOW else error.message
        return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}
    return error.as_object()
