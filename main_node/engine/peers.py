"""The nodes that are connected to the main node: their streams, what they owe, and how they are lost and come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from main_node.checks.suspects import Suspects
from main_node.engine.owed_answers import OwedAnswers
from main_node.engine.peer import PeerHandler, ask_usage, worker_of
from main_node.engine.roster import Membership, NodeFacts, Roster
from scheduler import types as t
from scheduler.errors import ClusterError, DeadlineError, LinkError, ODMoEError, ProtocolError
from scheduler.model_limits import ModelLimits
from wire import messages as w
from wire import runtime
from wire.base import Channel, Handler, Role

Connect = Callable[[Handler], Channel]
CLOSED = "it closed its stream"
NAMED = 1000
"""Losses and returns that are named; of more, the oldest are forgotten. Reports list them."""
_log = logging.getLogger(__name__)


class PeerListener(Protocol):
    """What hears from the peers: the engine. Called with the lock of `Peers` held, except for `from_shadow`."""

    def post(self, event: t.Event) -> None: ...

    def from_worker(self, number: int, message: w.Message) -> None:
        """Raises ClusterError where the worker is of no use any more."""

    def from_shadow(self, message: w.Message) -> None:
        """Raises ClusterError where the shadow is of no use any more."""

    def not_sent(self, message: w.Message, error: ProtocolError) -> None:
        """A message for a worker cannot be encoded: it is too large."""


class Peers:
    """Thread-safe. `changed`: the engine's lock, notified when nodes come or go.

    `answer_s`: a worker that owes answers and has given none for so long counts as lost. `limits`: of the model.
    """

    def __init__(
        self,
        listener: PeerListener,
        changed: runtime.Condition,
        hello: w.Hello,
        answer_s: float,
        limits: ModelLimits | None = None,
    ) -> None:
        self.workers: dict[int, PeerHandler] = {}
        self.shadow: PeerHandler | None = None
        self.lost: list[str] = []
        """Names of nodes that were lost, in order."""
        self.rejoined: list[str] = []
        """Names of nodes that came back, in order."""
        self.membership = Membership()
        self.roster = Roster()
        self.suspects = Suspects()
        self.connects: dict[tuple[Role, int], Connect] = {}
        """How each node was connected the last time."""
        self.owed = OwedAnswers(answer_s)
        self.on_lost: Callable[[Role, int], None] = lambda role, number: None
        """Called with each lost node, from any thread. Must return at once."""
        self._listener = listener
        self._changed = changed
        self._hello = hello
        self._limits = limits
        self._closed = False
        self._near: dict[int, torch.device] = {}
        """Worker of this process -> its device."""
        self._silent_s: dict[int, float] = {}
        self._outgoing: dict[int, list[w.Message]] = {}
        self._flushing = False

    # --- joining ------------------------------------------------------------------------------------------------

    def add_worker(self, number: int, connect: Connect, deadline_s: float) -> w.WorkerReady:
        """Open a stream to a worker and wait until it is ready. Raises ClusterError: WrongOutputError for a process
        that was dropped for its outputs."""
        peer = PeerHandler(
            f"worker {number}",
            lambda message: self._from_worker(number, peer, message),
            lambda error: self._on_worker_lost(number, peer, error),
            self._limits,
        )
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.WorkerReady):
            peer.close()
            raise ClusterError(f"worker {number} answered {ready}; is that the address of a worker?")
        try:
            self.suspects.check(number, ready)
            joined = worker_of(number, ready)
        except ClusterError:
            peer.close()
            raise
        round_trip_s = peer.round_trip()
        before = self.workers.get(number)
        if before is not None:
            self._drop_worker(number, before, ClusterError(f"another worker {number} came"))
        with self._changed:
            self._check_in(peer)
            self.connects["worker", number] = connect
            self.workers[number] = peer
            self._near.pop(number, None)
            if peer.traffic is None:
                self._near[number] = torch.device(ready.device)
            self.roster.on_joined("worker", number, ready, round_trip_s, peer.traffic)
            self.suspects.on_joined(number, ready)
            self._silent_s.pop(number, None)
            self._listener.post(joined)
            for message in peer.early.values():
                self._listener.from_worker(number, message)
        return ready

    def add_shadow(self, connect: Connect, deadline_s: float) -> w.ShadowReady:
        """Open a stream to the shadow and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler(
            "shadow",
            lambda message: self._from_shadow(peer, message),
            lambda error: self._on_shadow_lost(peer, error),
            self._limits,
        )
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.ShadowReady):
            peer.close()
            raise ClusterError(f"the shadow answered {type(ready).__name__}; is that the address of a shadow?")
        round_trip_s = peer.round_trip()
        before = self.shadow
        if before is not None:
            self._drop_shadow(before, ClusterError("another shadow came"))
        with self._changed:
            self._check_in(peer)
            self.connects["shadow", 0] = connect
            self.shadow = peer
            self.roster.on_joined("shadow", 0, ready, round_trip_s, peer.traffic)
            self._listener.post(t.ShadowJoined())
        return ready

    def _check_in(self, peer: PeerHandler) -> None:
        """A peer that is ready is about to be used. Raises LinkError."""
        if self._closed or peer.has_ended:
            peer.close()
            gone = "the main node was closed" if self._closed else "its stream has ended"
            raise LinkError(f"{peer.name} was ready, but {gone}")
        if peer.name in self.lost:
            _note(self.rejoined, peer.name)
            self.membership.on_returned(peer.name)
        self._changed.notify_all()

    # --- messages -----------------------------------------------------------------------------------------------

    def _from_worker(self, number: int, peer: PeerHandler, message: w.Message) -> None:
        """What a peer says of itself before it has joined is heard then; of a former one nothing is."""
        try:
            with self._changed:
                if self.workers.get(number) is not peer:
                    if isinstance(message, w.Held | w.HostShrunk):
                        peer.early[type(message)] = message
                    return
                if peer.credit is not None and isinstance(message, w.Computed | w.Failed):
                    peer.credit.settle(message.call_id)
                self._listener.from_worker(number, message)
                if peer.credit is not None and peer.credit.holds:
                    self._outgoing.setdefault(number, [])
                    self.flush()
        except ClusterError as error:
            self._on_worker_lost(number, peer, error)

    def _from_shadow(self, peer: PeerHandler, message: w.Message) -> None:
        if isinstance(message, w.ShadowProgress):  # for emulated time only
            return
        try:
            self._listener.from_shadow(message)
        except ClusterError as error:
            self._on_shadow_lost(peer, error)

    def ask(self, number: int, command: t.Load | t.Compute, message: w.Message) -> None:
        """Tell a worker what it must answer: load or call `number`. As `tell`."""
        if command.worker in self.workers:
            self.owed.ask(number, command)
            self.tell(command.worker, message)

    def tell(self, number: int, message: w.Message) -> None:
        """A message for a worker, sent by the next `flush`."""
        if number in self.workers:
            self._outgoing.setdefault(number, []).append(message)

    def travels(self, number: int) -> bool:
        """Whether messages for this worker leave the process."""
        peer = self.workers.get(number)
        return peer is not None and peer.traffic is not None

    @property
    def shadow_travels(self) -> bool:
        """Whether messages for the shadow leave the process."""
        return self.shadow is None or self.shadow.traffic is not None

    def stays(self, number: int, device: torch.device) -> bool:
        """Whether a worker is in this process and on this device, so that its rows and outputs stay there."""
        return self._near.get(number) == device and number in self.workers

    def flush(self) -> None:
        """Send what was told, a worker's messages together, as far as its credit goes. A worker is lost where that
        cannot be."""
        if self._flushing:  # a worker of this process has answered at once: what follows keeps its place
            return
        self._flushing = True
        try:
            while self._outgoing:
                outgoing, self._outgoing = self._outgoing, {}
                for number, messages in outgoing.items():
                    self._flush_one(number, messages)
        finally:
            self._flushing = False

    def _flush_one(self, number: int, messages: list[w.Message]) -> None:
        peer = self.workers.get(number)
        if peer is None:
            return
        try:
            self._send(peer, messages if peer.credit is None else peer.credit.admit(messages))
        except ClusterError as error:
            self._on_worker_lost(number, peer, error)

    def _send(self, peer: PeerHandler, messages: list[w.Message]) -> None:
        """Raises LinkError, or ProtocolError for a message that cannot be sent and is not a computation."""
        if not messages:
            return
        try:
            peer.send(*messages)
        except ProtocolError as error:
            if len(messages) == 1:
                if peer.credit is not None and isinstance(messages[0], w.Compute):
                    peer.credit.settle(messages[0].call_id)
                self._listener.not_sent(messages[0], error)
                return
            for message in messages:
                self._send(peer, [message])

    def send_to_shadow(self, messages: Iterable[w.Message], shadow: PeerHandler) -> None:
        """The shadow is lost where its stream has ended, or a message cannot be made. Nothing is sent where another has
        taken its place."""
        if self.shadow is not shadow:
            return
        try:
            for message in messages:
                shadow.send(message)
        except ClusterError as error:
            self._on_shadow_lost(shadow, error)

    # --- loss ---------------------------------------------------------------------------------------------------

    def drop_silent(self) -> float:
        """Lose the workers that have owed answers for too long. Seconds until the next might be."""
        answer_s = self.owed.answer_s
        with self._changed:
            silent = [(number, self.workers[number]) for number in self.owed.silent()]
        for number, peer in silent:
            self._silent_s[number] = answer_s
            error = DeadlineError(f"worker {number} has not answered for {answer_s:g} s")
            self._on_worker_lost(number, peer, error)
        with self._changed:
            return max(0.01, self.owed.left_s)

    def drop(self, number: int, error: ODMoEError) -> None:
        """A worker is of no use any more. Its stream is closed in a thread of its own, since the worker's threads may
        wait for the caller's lock."""
        peer = self.workers.get(number)
        if peer is not None and self._forget_worker(number, peer, error):
            runtime.Thread(target=peer.close, name=f"drop-worker-{number}", daemon=True).start()
            self.on_lost("worker", number)

    def _on_worker_lost(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> None:
        if self._drop_worker(number, peer, error):
            self.on_lost("worker", number)

    def _drop_worker(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> bool:
        """As `_forget_worker`, and close its stream."""
        forgotten = self._forget_worker(number, peer, error)
        if forgotten:
            peer.close()
        return forgotten

    def _forget_worker(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> bool:
        """False where it was dropped before, or never used."""
        with self._changed:
            if self.workers.get(number) is not peer:
                return False
            del self.workers[number]
            why = str(error or CLOSED)
            _log.warning("worker %d is lost: %s", number, why)
            _note(self.lost, peer.name)
            self.membership.on_lost(peer.name, why, len(self.workers))
            self.roster.on_lost("worker", number)
            self.owed.forgive(number)
            self._listener.post(t.WorkerLost(number, why))
        return True

    def lose_shadow(self, peer: PeerHandler, error: ODMoEError) -> None:
        """The shadow is of no use any more, unless another has taken its place."""
        self._on_shadow_lost(peer, error)

    def _on_shadow_lost(self, peer: PeerHandler, error: ODMoEError | None) -> None:
        if self._drop_shadow(peer, error):
            self.on_lost("shadow", 0)

    def _drop_shadow(self, peer: PeerHandler, error: ODMoEError | None) -> bool:
        with self._changed:
            if self.shadow is not peer:
                return False
            self.shadow = None
            _note(self.lost, peer.name)
            self.roster.on_lost("shadow", 0)
            _log.warning("the shadow is lost, going on without predictions: %s", error or CLOSED)
            self.membership.on_lost(peer.name, str(error or CLOSED), len(self.workers))
            self._listener.post(t.ShadowLost())
        peer.close()
        return True

    def close(self) -> None:
        """End every stream, and take no new one."""
        with self._changed:
            self._closed = True
            workers, self.workers, shadow, self.shadow = self.workers, {}, self.shadow, None
            self.owed.clear()
            for number in workers:
                self._listener.post(t.WorkerLost(number, "the main node was closed"))
            self._changed.notify_all()
        for peer in [*workers.values(), *([shadow] if shadow else [])]:
            peer.close()

    # --- what they hold -----------------------------------------------------------------------------------------

    def all(self) -> list[PeerHandler]:
        """The workers, ascending, then the shadow."""
        with self._changed:
            return [self.workers[number] for number in sorted(self.workers)] + ([self.shadow] if self.shadow else [])

    def usage(self, deadline_s: float = 10.0) -> tuple[dict[int, w.WorkerUsage], w.ShadowUsage | None]:
        """What every node holds; without those that do not answer in time."""
        with self._changed:
            workers, shadow = dict(sorted(self.workers.items())), self.shadow
        return ask_usage(workers, shadow, deadline_s)

    def last_usage(self, first_s: float) -> dict[str, w.WorkerUsage | w.ShadowUsage]:
        """What each node holds, by its name, as it said last. Every node is asked again, and waited for only if it has
        not said so yet: all of these together for at most `first_s`."""
        peers, end = self.all(), runtime.monotonic() + first_s
        for peer in peers:
            peer.ask_usage()
        told = {peer.name: peer.last_usage(end - runtime.monotonic()) for peer in peers}
        return {name: usage for name, usage in told.items() if usage is not None}

    def suspected_workers(self) -> set[int]:
        """Workers of which a wrong output is known."""
        with self._changed:
            return set(self.suspects.facts())

    def banned_workers(self) -> set[int]:
        """See `Suspects.banned_workers`. With the lock held."""
        return self.suspects.banned_workers()

    def wasted_s(self, role: Role, number: int) -> float:
        """How long its last silence lasted before it was lost: requests may have waited for it. 0: it was not
        silent."""
        return self._silent_s.get(number, 0.0) if role == "worker" else 0.0

    def nodes(self) -> list[NodeFacts]:
        """See `Roster.facts`."""
        return self.roster.facts()


def _note(names: list[str], name: str) -> None:
    names.append(name)
    del names[:-NAMED]
