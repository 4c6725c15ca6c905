"""The main nodes connected to a node. It serves one of them, as long as that one is alive."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from scheduler.errors import LinkError, ODMoEError, OtherMainNodeError, ProtocolError
from scheduler.model_limits import ModelLimits
from wire import runtime
from wire.base import Channel, is_in_process
from wire.bounds.check import Bounds
from wire.handshake import check_hello
from wire.messages import AskTrace, Echo, Failed, Hello, Message, Stamped
from wire.refusals import Refusals
from wire.tracing import NodeSpans

HELLO_S = 5.0
"""A stream without an accepted Hello is ended after so long."""

GONE_S = 3.0
"""A main node that is gone has lost its stream by then, twice over (`wire.rpc.pulse`): so long another one waits."""

MAX_STREAMS = 64
"""Open streams of a node."""


class Session(ABC):
    """One main node's stream to a worker or a shadow. It begins with Hello, and ends when that main node has another.

    `spans` records what the node does for this main node, timed by `clock`, if its Hello requested a trace.
    """

    def __init__(
        self,
        name: str,
        belongs: tuple[str, str],
        sessions: Sessions[Any],
        reply: Channel,
        clock: Callable[[], float] = lambda: runtime.monotonic(),
        limits: ModelLimits | None = None,
    ) -> None:
        """`belongs` is the fingerprint and dtype of the store, which both sides must have. `limits`: of its model."""
        self.name = name
        self.reply = reply
        self.spans = NodeSpans(False, clock)
        self._clock = clock
        self._belongs = belongs
        self._sessions = sessions
        self._lock = runtime.Lock()
        self.peer: str = getattr(reply, "peer", "")
        """The other end's address. Empty within a process."""
        self.in_process = is_in_process(reply)
        self._bounds = None if self.in_process else Bounds(limits or ModelLimits())
        self.main_node = ""
        """`Hello.session`."""
        self._welcome = False
        self._over = False
        late = f"no Hello came within {HELLO_S:g} s; a stream begins with Hello"
        self._deadline = runtime.Timer(HELLO_S, self.expire, (late,))
        self._deadline.daemon = True

    @abstractmethod
    def ready(self) -> Message:
        """The answer to Hello."""

    @abstractmethod
    def dispatch(self, message: Message) -> None:
        """A message after Hello. Raises ODMoEError."""

    @abstractmethod
    def report(self, error: BaseException, about: Message | None = None) -> None:
        """Report an error to the main node. `about` is the message that caused it."""

    @abstractmethod
    def end(self) -> None:
        """The stream has ended: drop its requests. Called once."""

    @property
    def over(self) -> bool:
        return self._over

    def on_message(self, message: Message) -> None:
        try:
            if isinstance(message, Stamped):
                raise ProtocolError(f"the main node keeps a profile's times, {self.name} does not; both must")
            if self._bounds is not None:
                self._bounds.check(message)
            if isinstance(message, Hello):
                self._hello(message)
            elif not self._welcome:
                raise ProtocolError(f"{type(message).__name__} came before Hello; a stream begins with Hello")
            elif isinstance(message, Echo):
                self.reply.send(message)
            elif isinstance(message, AskTrace):
                self.reply.send(self.spans.answer())
            else:
                self.dispatch(message)
        except ODMoEError as error:
            self.report(error, message)

    def _hello(self, hello: Hello) -> None:
        check_hello(hello, self.name, *self._belongs, self.peer, self._sessions.refusals)
        self.spans = NodeSpans(hello.trace, self._clock)
        self.main_node = hello.session
        self._sessions.serve(self)
        self._welcome = True
        self._deadline.cancel()
        self.reply.send(self.ready())

    def on_close(self, error: ODMoEError | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._deadline.cancel()
        self._sessions.forget(self)
        self.end()

    @property
    def welcome(self) -> bool:
        """Its Hello was accepted."""
        return self._welcome

    def await_hello(self) -> None:
        """It was opened, and ends if no Hello is accepted by the deadline. Not so within a process, where no stranger
        opens a stream."""
        if self.peer:
            self._deadline.start()

    def expire(self, reason: str) -> None:
        """End a stream without an accepted Hello."""
        if self._welcome or self._over:
            return
        error = ProtocolError(reason)
        self._sessions.refusals.say(self.peer or "a stream of this process", error)
        self.cut(error)

    def cut(self, error: ODMoEError) -> None:
        """The main node breaks the protocol: tell it why, and end its stream."""
        if not self._over:
            with contextlib.suppress(LinkError):
                self.reply.send(Failed(type(error).__name__, f"{self.name}: {error}"))
        self.on_close(None)
        self.reply.close()

    def on_replaced(self) -> None:
        """Its main node has connected again: tell it, should it still read this stream, and end it."""
        if not self._over:
            with contextlib.suppress(LinkError):
                self.reply.send(Failed("LinkError", f"{self.name} serves a newer stream of the same main node"))
        self.on_close(None)
        self.reply.close()


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The open streams of a node, at most `MAX_STREAMS`. Thread-safe.

    A stream without an accepted Hello disturbs no other. It is ended after `HELLO_S`, and sooner where it is the oldest
    such stream and another needs its place: so there is always one for the main node that knows the secret. A main node
    that is served is displaced by no other while it is alive; its own next stream takes the place of the one before.
    """

    def __init__(self) -> None:
        self.refusals = Refusals()
        self._open: dict[S, None] = {}
        """Oldest first."""
        self._served: S | None = None
        self._lock = runtime.Lock()
        self._left = runtime.Condition(self._lock)

    def add(self, session: S) -> S:
        """A stream was opened."""
        with self._lock:
            self._open[session] = None
            silent = [one for one in self._open if not one.welcome and one is not session]
            full = len(self._open) > MAX_STREAMS
        if full and silent:
            silent[0].expire(f"{MAX_STREAMS} streams are open, and this one is the oldest without a Hello")
        session.await_hello()
        return session

    def serve(self, session: S) -> None:
        """Its Hello was accepted: serve this stream, and end its main node's one before. Where another main node is
        served, wait whether that one is gone, for `GONE_S`. Raises OtherMainNodeError if not."""
        with self._lock:
            self._left.wait_for(lambda: session.over or not self._rival(session), GONE_S if session.peer else 0.0)
            rival = self._rival(session)
            if rival is None and not session.over:
                before, self._served = self._served, session
        if session.over:
            raise LinkError(f"the stream to {session.peer} has ended")
        if rival is not None:
            error = OtherMainNodeError(
                f"{session.name} serves another main node, {rival.peer or 'in its own process'}, which is alive; end "
                "that one first (odmoe down), or give this one other nodes"
            )
            self.refusals.say(session.peer or "a main node of this process", error)
            raise error
        if before is not None and before is not session:
            before.on_replaced()

    @property
    def served(self) -> S | None:
        """The stream of the main node that is served."""
        with self._lock:
            return self._served

    def _rival(self, session: S) -> S | None:
        """The stream of another main node that is served. The lock is held."""
        served = self._served
        if served is None or served is session:
            return None
        return None if session.main_node and session.main_node == served.main_node else served

    def forget(self, session: S) -> None:
        """Its stream is over."""
        with self._lock:
            self._open.pop(session, None)
            if self._served is session:
                self._served = None
            self._left.notify_all()

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            sessions = list(self._open)
        for session in sessions:
            session.on_close(None)
