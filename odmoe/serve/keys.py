"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from odmoe.serve.api_error import ApiError

OPEN = ("/health", "/ready")
"""Paths that need no key: what watches the process has none."""


class Keys:
    """Refuses requests without one of the keys, as `Authorization: Bearer KEY`. Without keys it lets all through.
    `refused`: told why."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[str], None]) -> None:
        self._app = app
        self._refused = refused
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
        )
        scope["state"]["record"].finish = error.code
        self._refused("invalid_api_key")
        await error.response()(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        """In a time that does not tell how much of a key is right."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("utf-8", "surrogateescape")
        same = [hmac.compare_digest(key, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(same)
