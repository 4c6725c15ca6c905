"""One client's connection: how long it may take to send a request, and to read what it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from odmoe.serve.api_error import ApiError
from odmoe.serve.bounds.places import Places
from odmoe.serve.sse import encode

READ_BYTES = 64 << 10
"""Most bytes of a client that are taken in at a time: others wait meanwhile."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How long a client may take, in seconds, and how many connections there may be."""

    headers_s: float = 20.0
    """To send a request's headers; or the rest of a body that nobody needs any more."""
    read_s: float = 30.0
    """Without reading a byte of what waits to be sent."""
    farewell_s: float = 2.0
    """To read why it was turned away."""
    parsing_s: float = 1.0
    """Of the processor, to take a request apart: one in chunks of a byte each takes a hundred times as long."""
    connections: int = 512
    """At once."""
    address_connections: int = 256
    """At once, from one address."""


class Connection(H11Protocol):
    """uvicorn's own limits begin with the first response. It is in the scope of its requests, as
    `scope["state"]["connection"]`."""

    def __init__(
        self,
        client_limits: ClientLimits,
        places: Places,
        on_refused: Callable[[str], None],
        *,
        app_state: dict[str, Any],
        **more: Any,
    ) -> None:
        """`on_refused`: called with the error's code if no request could be read."""
        super().__init__(app_state={**app_state, "connection": self}, **more)
        self._client_limits, self._places, self._on_refused = client_limits, places, on_refused
        self._sending: asyncio.TimerHandle | None = None
        """While the client owes a part of a request."""
        self._reading: asyncio.TimerHandle | None = None
        """While something waits to be sent."""
        self.turned_away = False
        """It has an error in place of a request. What the client still sends is not read."""
        self._unread = 0
        """Bytes that waited when it was last looked at."""
        self._parsing_s = 0.0
        """Of the processor, since the last response."""
        self.spare = False
        """There was no place: it may only ask how the service is."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.set_write_buffer_limits(high=0)  # `pause_writing` tells of any byte that waits
        if self._places.enter(self, self.client[0] if self.client else ""):
            self._expect()
        else:
            self.turned_away = True
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.turned_away:
            return
        began = time.thread_time()
        super().data_received(data)
        self._parsing_s += time.thread_time() - began
        if self._parsing_s > self._client_limits.parsing_s:
            self._on_refused("slow_request")
            self.abort()
        else:
            self._expect()

    def on_response_complete(self) -> None:
        self._parsing_s = 0.0
        super().on_response_complete()
        if self._is_owed_body():
            self._expect()
        self._mark()

    def _expect(self) -> None:
        """Keep an eye on a client that owes something, from when it began to."""
        owed = not self.transport.is_closing() and (self.conn.their_state is h11.IDLE or self._is_owed_body())
        if not owed and self._sending is not None:
            self._sending.cancel()
            self._sending = None
        elif owed and self._sending is None:
            self._sending = self.loop.call_later(self._client_limits.headers_s, self._late)
        self._mark()

    def _mark(self) -> None:
        """Whether the client owes something: a request, the rest of one, or a look at what it was sent."""
        idle = self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE
        owes = idle or self.conn.their_state is h11.SEND_BODY or self._reading is not None
        self._places.mark(self, owes or self.turned_away)

    def _is_owed_body(self) -> bool:
        """Of a request that has its response."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _late(self) -> None:
        self._sending = None
        if self._is_owed_body():
            self.transport.close()
        elif self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            text = f"the request's headers were not complete within {self._client_limits.headers_s:g} s"
            self._refuse(ApiError(408, text, code="slow_request"))

    def _refuse(self, error: ApiError) -> None:
        """Answer a client without having a request of it, and close."""
        self._on_refused(error.code or error.kind)
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
        with contextlib.suppress(OSError):  # it has gone meanwhile
            self.transport.write_eof()
        self._sending = self.loop.call_later(self._client_limits.farewell_s, self.transport.close)
        self._mark()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        if self.cycle is None or (self.cycle.response_complete and self.conn.our_state is h11.IDLE):
            self._refuse(ApiError(400, "this is no request of HTTP/1.1; send one", code="invalid_http"))
        else:  # a response is under way
            self.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._client_limits.read_s, self._check_reading)
        self._mark()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
            self._mark()

    def _check_reading(self) -> None:
        """Whether the client has read anything since the last look."""
        waiting = self.transport.get_write_buffer_size()
        if waiting >= self._unread:
            self.abort()
            return
        self._unread = waiting
        self._reading = self.loop.call_later(self._client_limits.read_s, self._check_reading)

    def abort(self) -> None:
        """Close it now, whatever waits to be sent."""
        self.transport.abort()
        if self.cycle is not None:  # what it still sends would not fit the connection's state
            self.cycle.disconnected = True
            self.cycle.message_event.set()
