"""What the main node sends to the shadow: at once, or from another thread where KV rows come from an accelerator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from main_node.engine.peer import PeerHandler
from main_node.engine.peers import Peers
from main_node.engine.sequence import Carrier
from scheduler.errors import LinkError
from wire import messages as w
from wire import runtime
from wire.serial import SerialThread

_log = logging.getLogger(__name__)


class ShadowSender:
    """Messages keep their order. The shadow is lost, with the cause, where one cannot be made or sent, or where too
    many bytes wait. It comes again, and goes on from where the requests are then.

    `send` has one caller at a time. `threaded`: whether messages may be sent by another thread.
    """

    def __init__(self, peers: Peers, threaded: bool = True) -> None:
        self.carrier = Carrier()
        self._peers = peers
        self._threaded = threaded
        self._thread: SerialThread | None = None
        self._closed = False
        self._closing = runtime.Lock()
        """Held while the thread is started, and while `_closed` is set."""

    def send(self, make: Callable[[Carrier], Iterable[w.Message]]) -> None:
        """`make`: begins the copies of KV rows and returns the messages, each of which waits for its own when it is
        taken. From the first copy from an accelerator on, another thread takes them."""
        carrier, shadow = self.carrier, self._peers.shadow
        carrier.travels = self._peers.shadow_travels
        before = carrier.begun_bytes
        try:
            messages = make(carrier)
        except LinkError as error:
            carrier.end(carrier.begun_bytes - before)
            if shadow is not None:
                self._peers.lose_shadow(shadow, error)
            return
        except BaseException:
            carrier.end(carrier.begun_bytes - before)
            raise
        nbytes = carrier.begun_bytes - before
        with self._closing:
            if nbytes and self._threaded and self._thread is None and not self._closed:
                self._thread = SerialThread("to-shadow", _log_failure)
        if self._thread is None or shadow is None:
            self._send(shadow, messages, nbytes)
            return
        try:
            self._thread.submit(self._send_later, shadow, messages, nbytes)
        except LinkError as error:
            carrier.end(nbytes)
            if not self._closed:
                self._peers.lose_shadow(shadow, error)

    def _send(self, shadow: PeerHandler | None, messages: Iterable[w.Message], nbytes: int) -> None:
        """Messages for a shadow that was lost meanwhile are dropped."""
        try:
            if shadow is not None:
                self._peers.send_to_shadow(messages, shadow)
        finally:
            self.carrier.end(nbytes)

    def _send_later(self, shadow: PeerHandler, messages: Iterable[w.Message], nbytes: int) -> None:
        """As `_send`, on the other thread. The shadow that they are for is lost where a message is not made."""
        try:
            self._send(shadow, messages, nbytes)
        except Exception as error:  # noqa: BLE001 - an error that is none of a stream or a copy is a defect
            if not self._closed:
                cause = LinkError(f"a message for the shadow was not made: {type(error).__name__}: {error}")
                self._peers.lose_shadow(shadow, cause)

    def close(self) -> None:
        with self._closing:
            self._closed = True
        if self._thread is not None:
            self._thread.close()


def _log_failure(error: Exception) -> None:
    _log.warning("to-shadow: %s: %s", type(error).__name__, error)
