"""One client's connection: how long it may take to send a request, and to read what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from odmoe.serve.api_error import ApiError
from odmoe.serve.sse import encode


@dataclass(frozen=True, slots=True)
class Patience:
    """With clients, in seconds."""

    headers_s: float = 20.0
    """To send a request's headers; or the rest of a body that nobody needs any more."""
    read_s: float = 30.0
    """Without reading a byte of what waits to be sent."""
    farewell_s: float = 2.0
    """To read why it was turned away."""
    connections: int = 512
    """At once."""


class Connection(H11Protocol):
    """uvicorn's own limits begin with the first response. It is in the scope of its requests, as
    `scope["state"]["connection"]`."""

    def __init__(
        self, patience: Patience, refused: Callable[[str], None], *, app_state: dict[str, Any], **more: Any
    ) -> None:
        """`refused`: told the code of the error where no request could be read."""
        super().__init__(app_state={**app_state, "connection": self}, **more)
        self._patience, self._refused = patience, refused
        self._sending: asyncio.TimerHandle | None = None
        """While the client owes a part of a request."""
        self._reading: asyncio.TimerHandle | None = None
        """While something waits to be sent."""
        self.turned_away = False
        """It has an error in place of a request. What the client still sends is not read."""
        self._unread = 0
        """Bytes that waited when it was last looked at."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` tells of any byte that waits
        if sum(not getattr(one, "turned_away", False) for one in self.connections) > self._patience.connections:
            text = f"{self._patience.connections} connections are open; try again later"
            self._refuse(ApiError(503, text, "server_error", code="too_many_connections"))
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.turned_away:
            return
        super().data_received(data)
        self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_owed_body():
            self._expect()

    def _expect(self) -> None:
        """Keep an eye on a client that owes something, from when it began to."""
        owed = not self.transport.is_closing() and (self.conn.their_state is h11.IDLE or self._is_owed_body())
        if not owed and self._sending is not None:
            self._sending.cancel()
            self._sending = None
        elif owed and self._sending is None:
            self._sending = self.loop.call_later(self._patience.headers_s, self._late)

    def _is_owed_body(self) -> bool:
        """Of a request that has its response."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _late(self) -> None:
        self._sending = None
        if self._is_owed_body():
            self.transport.close()
        elif self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            text = f"the request's headers were not complete within {self._patience.headers_s:g} s"
            self._refuse(ApiError(408, text, code="slow_request"))

    def _refuse(self, error: ApiError) -> None:
        """Answer a client without having a request of it, and close."""
        self._refused(error.code or error.kind)
        headers = {"Content-Type": "application/json", "Connection": "close", **error.headers}
        events = (
            h11.Response(status_code=error.status, headers=list(headers.items()), reason=STATUS_PHRASES[error.status]),
            h11.Data(data=encode(error.as_object())),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        # A client whose bytes are not taken gets a reset, which may overtake the error.
        self.turned_away = True
        self.transport.write_eof()
        self._sending = self.loop.call_later(self._patience.farewell_s, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._patience.read_s, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _look(self) -> None:
        """Whether the client has read anything since the last look."""
        waiting = self.transport.get_write_buffer_size()
        if waiting >= self._unread:
            self.abort()
            return
        self._unread = waiting
        self._reading = self.loop.call_later(self._patience.read_s, self._look)

    def abort(self) -> None:
        """Close it now, whatever waits to be sent."""
        self.transport.abort()
