"""Carries out what the scheduler decides: commands go to workers and shadow, what they answer becomes events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from main_node.engine.layer import LayersInFlight, LayerWork
from main_node.engine.owed_answers import OwedAnswers
from main_node.engine.pace import Pace, RealPace
from main_node.engine.peers import PeerHandler, ask_usage, prediction_of, worker_of
from main_node.engine.roster import NodeFacts, Roster
from main_node.engine.sequence import RequestData, shadow_messages
from main_node.engine.tracing import MainSpans, gather
from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.errors import ClusterError, DeadlineError, LinkError, ODMoEError, ProtocolError, RequestFailedError
from scheduler.trace import Span
from wire import messages as w
from wire.base import Channel, Handler, Role

Connect = Callable[[Handler], Channel]
_log = logging.getLogger(__name__)


class Engine:
    """Thread-safe: events may be posted from any thread; one at a time reaches the scheduler.

    `answer_s`: a worker that owes answers and has given none for so long counts as lost. `on_lost` is told which node
    is gone, from any thread, and must return at once. `lost`, `rejoined`: nodes that went and came back, in order.
    """

    def __init__(
        self, core: Core, hello: w.Hello, answer_s: float = 30.0, lookahead: int = 2, pace: Pace | None = None
    ) -> None:
        self.core = core
        self.pace = pace or RealPace()
        self.spans = MainSpans(hello.trace, self.pace.now)
        self.on_lost: Callable[[Role, int], None] = lambda kind, number: None
        self.on_decided: Callable[[t.Event, float, list[t.Command]], None] = lambda event, now, commands: None
        self.lookahead = lookahead
        self.workers: dict[int, PeerHandler] = {}
        self.shadow: PeerHandler | None = None
        self._hello = hello
        self._roster = Roster()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inbox: list[t.Event] = []
        self._draining = False
        self._now = 0.0
        self._requests: dict[int, RequestData] = {}
        self._layers = LayersInFlight()
        self._owed = OwedAnswers(answer_s)
        self._failed: dict[int, str] = {}
        self._shared: set[int] = set()  # requests beside which another was opened
        self._closed = False
        self.lost: list[str] = []
        self.rejoined: list[str] = []

    # --- peers --------------------------------------------------------------------------------------------------

    def add_worker(self, number: int, connect: Connect, deadline_s: float) -> w.WorkerReady:
        """Open a stream to a worker and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler(
            f"worker {number}",
            lambda m: self._from_worker(number, peer, m),
            lambda error: self._lost(number, peer, error),
        )
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.WorkerReady):
            peer.close()
            raise ClusterError(f"worker {number} answered {ready}; is that the address of a worker?")
        round_trip_s = peer.round_trip()
        before = self.workers.get(number)
        if before is not None:
            self._drop_worker(number, before, ClusterError(f"another worker {number} came"))
        with self._lock:
            self._check_in(peer)
            self.workers[number] = peer
            self._roster.joined("worker", number, ready, round_trip_s, peer.traffic)
            self.post(worker_of(number, ready))
        return ready

    def add_shadow(self, connect: Connect, deadline_s: float) -> w.ShadowReady:
        """Open a stream to the shadow and wait until it is ready. Raises ClusterError."""
        peer = PeerHandler("shadow", lambda m: self._from_shadow(peer, m), lambda error: self._shadow_lost(peer, error))
        ready = peer.open(connect, self._hello, deadline_s)
        if not isinstance(ready, w.ShadowReady):
            peer.close()
            raise ClusterError(f"the shadow answered {type(ready).__name__}; is that the address of a shadow?")
        round_trip_s = peer.round_trip()
        before = self.shadow
        if before is not None:
            self._drop_shadow(before, ClusterError("another shadow came"))
        with self._lock:
            self._check_in(peer)
            self.shadow = peer
            self._roster.joined("shadow", 0, ready, round_trip_s, peer.traffic)
            self.post(t.ShadowJoined())
        return ready

    def _check_in(self, peer: PeerHandler) -> None:
        """A peer that is ready is about to be used. Raises LinkError."""
        if self._closed or peer.ended:
            peer.close()
            gone = "the main node was closed" if self._closed else "its stream has ended"
            raise LinkError(f"{peer.name} was ready, but {gone}")
        if peer.name in self.lost:
            self.rejoined.append(peer.name)
        self._changed.notify_all()

    def _from_worker(self, number: int, peer: PeerHandler, message: w.Message) -> None:
        try:
            with self._lock:
                self._take(number, message)
        except ClusterError as error:
            self._lost(number, peer, error)

    def _take(self, number: int, message: w.Message) -> None:
        """Raises ClusterError where the worker is of no use any more."""
        if isinstance(message, w.Computed):
            call = self._owed.settle(number, message.call_id, t.Compute)
            if call is None:
                return
            self.spans.came(message)
            self.pace.answered()
            layer = self._layers.get(call.visit)
            if layer is not None:
                layer.keep(call, message.output)
            self.post(t.ComputeEnded(message.call_id))
        elif isinstance(message, w.Loaded):
            self._owed.settle(number, message.load_id, t.Load)
            self._roster.loaded(number)
            before = self.core.stalled_s
            self.post(t.LoadEnded(message.load_id, message.nbytes))
            self.spans.stalled(self.core.stalled_s - before)
        elif not isinstance(message, w.Failed):
            raise ProtocolError(f"worker {number} sent {type(message).__name__}, which no worker says")
        elif message.load_id:
            self._owed.settle(number, message.load_id, t.Load)
            self.post(t.LoadFailed(message.load_id, f"{message.error}: {message.message}"))
        elif message.call_id:
            self._owed.settle(number, message.call_id, t.Compute)
            self.post(t.ComputeFailed(message.call_id, f"{message.error}: {message.message}"))
        else:
            raise ClusterError(f"{message.error}: {message.message}")

    def _from_shadow(self, peer: PeerHandler, message: w.Message) -> None:
        try:
            self.post(prediction_of(message, self.core.shape, self.spans.came))
        except ClusterError as error:
            self._shadow_lost(peer, error)

    def _lost(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> None:
        if self._drop_worker(number, peer, error):
            self.on_lost("worker", number)

    def _drop_worker(self, number: int, peer: PeerHandler, error: ODMoEError | None) -> bool:
        """False where it was dropped before, or never used."""
        with self._lock:
            if self.workers.get(number) is not peer:
                return False
            del self.workers[number]
            _log.warning("worker %d is lost: %s", number, error or "it closed its stream")
            self.lost.append(peer.name)
            self._roster.lost("worker", number)
            self._owed.forgive(number)
            self.post(t.WorkerLost(number, str(error or "it closed its stream")))
        peer.close()
        return True

    def _shadow_lost(self, peer: PeerHandler, error: ODMoEError | None) -> None:
        if self._drop_shadow(peer, error):
            self.on_lost("shadow", 0)

    def _drop_shadow(self, peer: PeerHandler, error: ODMoEError | None) -> bool:
        with self._lock:
            if self.shadow is not peer:
                return False
            self.shadow = None
            self.lost.append(peer.name)
            self._roster.lost("shadow", 0)
            _log.warning("the shadow is lost, going on without predictions: %s", error or "it closed its stream")
            self.post(t.ShadowLost())
        peer.close()
        return True

    # --- events in, commands out --------------------------------------------------------------------------------

    def post(self, event: t.Event) -> None:
        """Hand a fact to the scheduler and carry out what follows. An event posted on the way is taken afterwards."""
        with self._lock:
            self._inbox.append(event)
            if self._draining:
                return
            self._draining = True
            try:
                while self._inbox:
                    self._decide(self._inbox.pop(0))
            finally:
                self._draining = False
                self._changed.notify_all()

    def _decide(self, event: t.Event) -> None:
        """Time never goes backwards, though emulated time is each thread's own."""
        self._now = max(self._now, self.pace.now())
        commands = self.core.handle(event, self._now)
        self.on_decided(event, self._now, commands)
        for command in commands:
            self._act(command)

    def _act(self, command: t.Command) -> None:
        if isinstance(command, t.Compute):
            self._send_compute(command)
        elif isinstance(command, t.Load):
            self._ask(command.load_id, command, w.Load(command.load_id, command.slot, *command.expert, command.form))
        elif isinstance(command, t.Evict):  # what was asked of the slot is not answered any more
            self._owed.forgive_slot(command.worker, command.slot)
            self._tell(command.worker, w.Evict(command.slot))
        elif isinstance(command, t.Route):
            self._layers.route(command)
        elif isinstance(command, t.Resume):
            self._layers.resume(command.visit)
        elif isinstance(command, t.Fail):
            self._failed[command.request] = command.reason
            self._layers.release(command.request)
        else:
            self._act_on_shadow(command)

    def _act_on_shadow(self, command: t.Follow | t.Align | t.Unfollow) -> None:
        shadow = self.shadow
        if shadow is None:
            return
        try:
            data = self._requests.get(command.request)
            for message in shadow_messages(command, data, self.core.alignment, self.lookahead):
                self.spans.told(message)
                shadow.send(message)
        except ClusterError as error:
            self._shadow_lost(shadow, error)

    def _send_compute(self, command: t.Compute) -> None:
        layer = self._layers.get(command.visit)
        if layer is None:  # interrupted: its request is about to be closed
            return
        message = layer.message(command)
        self.spans.sent(message)
        try:
            self._ask(command.call_id, command, message)
        except ProtocolError as error:  # too large for a message
            self.post(t.ComputeFailed(command.call_id, str(error)))

    def _ask(self, number: int, command: t.Load | t.Compute, message: w.Message) -> None:
        if command.worker in self.workers:
            self._owed.ask(number, command)
            self._tell(command.worker, message)

    def _tell(self, number: int, message: w.Message) -> None:
        peer = self.workers.get(number)
        if peer is None:
            return
        try:
            peer.send(message)
        except LinkError as error:
            self._lost(number, peer, error)

    def idle(self) -> bool:
        """Nothing is left of any request, here or in the scheduler."""
        left = self._requests or self._layers or self._failed or len(self._owed) or self.core.snapshot().loads
        return not left and self.core.idle()

    # --- the main model's side ----------------------------------------------------------------------------------

    def open_request(self, number: int, data: RequestData, prompt_tokens: int) -> None:
        with self._lock:
            self._shared.update(self._requests)
            self._requests[number] = data
            self.post(t.RequestOpened(number, prompt_tokens))

    def close_request(self, number: int) -> None:
        with self._lock:
            self.post(t.RequestClosed(number))
            self._requests.pop(number, None)
            self._failed.pop(number, None)
            self._shared.discard(number)
            self.core.stats.pop(number, None)
            self._layers.release(number)

    def gate_fired(self, visit: t.Visit, layer: LayerWork) -> None:
        """Announce a gate. Raises RequestFailedError for a closed request."""
        self.spans.gate(visit.layer)
        with self._lock:
            if visit.request not in self._requests:
                raise RequestFailedError(f"request {visit.request} was closed")
            self._layers[visit] = layer
            self.post(t.GateFired(visit, layer.rows, layer.chosen, layer.scores))
        self.spans.asked(visit.layer)

    def wait(self, visit: t.Visit, layer: LayerWork) -> None:
        """Until every expert of the layer has answered. Workers that are silent for too long are lost meanwhile.
        Raises RequestFailedError."""
        wait_s = self._owed.answer_s
        while visit.request not in self._failed and not layer.done.wait(wait_s):
            wait_s = self._drop_silent(visit, layer)
        reason = self._failed.get(visit.request)
        if reason is not None:
            raise RequestFailedError(f"request {visit.request} failed: {reason}")
        if visit.request not in self._requests:
            raise RequestFailedError(f"request {visit.request} was closed")

    def forget(self, visit: t.Visit) -> None:
        """The main model has left the layer."""
        with self._lock:
            del self._layers[visit]

    def _drop_silent(self, visit: t.Visit, layer: LayerWork) -> float:
        """Workers that owe answers and have given none for `answer_s` count as lost. Seconds until the next might.

        Raises RequestFailedError where nobody owes anything: then nothing would ever end the wait.
        """
        answer_s = self._owed.answer_s
        with self._lock:
            silent = [(number, self.workers[number]) for number in self._owed.silent()]
        for number, peer in silent:
            self._lost(number, peer, DeadlineError(f"worker {number} has not answered for {answer_s:g} s"))
        with self._lock:
            if not self._owed and not layer.done.is_set():
                raise RequestFailedError(
                    f"request {visit.request} failed: layer {visit.layer} at position {visit.position} has waited for "
                    f"{answer_s:g} s and no worker was asked for anything; that is a defect, please report it"
                )
            return max(0.01, self._owed.left_s)

    def wait_for_worker(self, deadline_s: float) -> bool:
        """Until a worker is connected. False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or bool(self.workers), deadline_s)

    def wait_for_predictions(self, number: int, deadline_s: float) -> bool:
        """Until every layer that the main model has routed was predicted too. False when that took too long, or the
        request was closed."""
        stats = self.core.stats
        with self._changed:
            self._changed.wait_for(
                lambda: self.shadow is None or number not in stats or not stats[number].unmatched, deadline_s
            )
            return number in stats and (self.shadow is None or not stats[number].unmatched)

    def trace(self, deadline_s: float = 30.0) -> list[Span]:
        """What every node has done since it was last asked, on this node's clock. Empty unless Hello said `trace`."""
        with self._lock:
            peers = [self.workers[number] for number in sorted(self.workers)] + ([self.shadow] if self.shadow else [])
        return gather(self.spans.take(), peers, deadline_s) if self.spans.on else []

    def usage(self, deadline_s: float = 10.0) -> tuple[dict[int, w.WorkerUsage], w.ShadowUsage | None]:
        """What every node holds; without those that do not answer in time."""
        with self._lock:
            workers, shadow = dict(sorted(self.workers.items())), self.shadow
        return ask_usage(workers, shadow, deadline_s)

    def nodes(self) -> list[NodeFacts]:
        """See `Roster.facts`."""
        return self._roster.facts()

    def carried(self, number: int) -> dict[str, int] | None:
        """See `Roster.carried`. None where other requests are open, or were opened meanwhile, too."""
        with self._lock:
            alone = number not in self._shared and self._requests.keys() <= {number}
            return self._roster.carried() if alone else None

    def close(self) -> None:
        """End every stream, and take no new one. A request that still waits for a worker fails."""
        with self._lock:
            self._closed = True
            workers, self.workers, shadow, self.shadow = self.workers, {}, self.shadow, None
            self._owed.clear()
            for number in workers:
                self.post(t.WorkerLost(number, "the main node was closed"))
            self._changed.notify_all()
        for peer in [*workers.values(), *([shadow] if shadow else [])]:
            peer.close()
