"""The body of a request."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from odmoe.serve.errors import ApiError, ClientGoneError


async def read_body(request: Request, most: int) -> bytes:
    """Raises ApiError for more than `most` bytes, without reading them all, and ClientGoneError."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise ApiError(413, f"the body has more than {most} bytes; send shorter prompts, or fewer at once")
    except ClientDisconnect as error:
        raise ClientGoneError("the client has gone") from error
    return bytes(body)
