"""Carries out what the scheduler decides: commands go to workers and shadow, what they answer becomes events."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from checkpoint.store import ExpertStore
from main_node.activity import Activity
from main_node.checks.verification import Verification
from main_node.engine.activity_watch import ActivityWatch
from main_node.engine.deadlines import Deadlines
from main_node.engine.layer import LayersInFlight, LayerWork, compute_message
from main_node.engine.output_checks import OutputChecks
from main_node.engine.pace import Pace, RealPace
from main_node.engine.part_copies import PartCopies
from main_node.engine.peer import held_of, prediction_of
from main_node.engine.peers import Peers
from main_node.engine.prediction_trial import PredictionTrial
from main_node.engine.sequence import shadow_messages
from main_node.engine.tracing import EventSpans, MainSpans, gather
from main_node.figures import ClusterFigures
from main_node.prediction_filter import PredictionFilter
from main_node.request import Request
from main_node.shadow_sender import ShadowSender
from main_node.totals import Totals
from scheduler import types as t
from scheduler.alignment import AT_ONCE
from scheduler.core.machine import Core
from scheduler.core.stats import RequestStats
from scheduler.departure import LOOKAHEAD
from scheduler.errors import AnswerWithdrawnError, ClusterError, ProtocolError, RequestFailedError
from scheduler.model_limits import ModelLimits, limits_of_shape
from scheduler.policies.precision import FORMS, FULL
from scheduler.trace import Span
from wire import messages as w
from wire import runtime
from wire.lent_threads import LentThreads


class Observer(Protocol):
    """Follows what happens. It may post events, which are handled after this one's commands."""

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """The scheduler has handled an event: its time, and the commands that follow. The engine's lock is held."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Longest waits, in seconds; see `Deadlines`, and `Peers` for `answer_s`."""

    answer_s: float = 30.0
    worker_s: float = 60.0
    shadow_s: float = 10.0


class Engine:
    """Thread-safe: events may be posted from any thread; one at a time reaches the scheduler.

    `departure`: when the shadow starts a pass, see `scheduler.departure`. `limits`: what messages may hold; the shape's
    alone if not given.
    """

    def __init__(
        self,
        core: Core,
        hello: w.Hello,
        waits: Waits = Waits(),
        departure: str = AT_ONCE,
        pace: Pace | None = None,
        verification: Verification = Verification(),
        limits: ModelLimits | None = None,
    ) -> None:
        self.core = core
        self.pace = pace or RealPace()
        self.spans = MainSpans(hello.trace, self.pace.now)
        self._requests: dict[int, Request] = {}
        """Those that are open, by number. Changed with the lock held."""
        self.prediction_trial = PredictionTrial(weighs=False)
        self.prediction_filter = PredictionFilter(self._requests, LOOKAHEAD, len(core.shape.layers))
        self.departure = departure
        self._lock = runtime.RLock()
        self._changed = runtime.Condition(self._lock)
        self.lent = LentThreads()
        """The threads that run the model, while they wait for a layer."""
        self.peers = Peers(self, self._changed, hello, waits.answer_s, limits or limits_of_shape(core.shape))
        self._verification = verification
        self.checks = OutputChecks(self._requests, self.peers, self._changed, self._withdraw, verification)
        self.deadlines = Deadlines(self, self._lock, waits.worker_s, waits.shadow_s, waits.answer_s)
        self.copies: PartCopies | None = None
        self._observers: list[Observer] = [self.deadlines, self.pace]
        self._activity = ActivityWatch(core, self._end_activity)
        if hello.trace:
            self._observers.append(EventSpans(self.spans, core))
        self._inbox: list[t.Event] = []
        self._draining = False
        self._now = 0.0
        self._layers = LayersInFlight()
        self._to_shadow = ShadowSender(self.peers, threaded=not self.pace.profile_name)
        self._ended = Totals()
        """Of all steps and drafts, and of the requests that are closed."""

    def add_observer(self, observer: Observer) -> None:
        """Before the first event."""
        self._observers.append(observer)

    def keep_replicas(self, store: ExpertStore, replicas: int, start_s: float) -> None:
        """Copy experts of the main node's store to workers with parts, whenever fewer than `replicas` hold them. Call
        it before the first event. Not in emulated time, which counts each message. `start_s`: see `PartCopies`."""
        if not self.pace.profile_name:
            self.copies = PartCopies(self.peers, self._lock, store, replicas, start_s)
            self.add_observer(self.copies)

    # --- what the peers say -------------------------------------------------------------------------------------

    def from_worker(self, number: int, message: w.Message) -> None:
        """See `PeerListener`."""
        owed = self.peers.owed
        if isinstance(message, w.Computed):
            self._on_computed(number, message)
        elif isinstance(message, w.Loaded):
            owed.settle(number, message.load_id, t.Load)
            self.peers.roster.on_loaded(number, message.nbytes, message.seconds)
            self.post(t.LoadEnded(message.load_id, message.nbytes))
        elif isinstance(message, w.Held):
            self.post(t.HoldingsChanged(number, held_of(message)))
        elif isinstance(message, w.Kept) and self.copies is not None:
            self.copies.on_kept(number, message)
        elif isinstance(message, w.HostShrunk):
            self.post(t.HostMemoryShrunk(number, message.host_slots))
        elif not isinstance(message, w.Failed):
            raise ProtocolError(f"worker {number} sent {type(message).__name__}, which a worker never sends")
        elif message.load_id:
            owed.settle(number, message.load_id, t.Load)
            self.post(t.LoadFailed(message.load_id, f"{message.error}: {message.message}"))
        elif message.call_id:
            owed.settle(number, message.call_id, t.Compute)
            self.post(t.ComputeFailed(message.call_id, f"{message.error}: {message.message}"))
        else:
            raise ClusterError(f"{message.error}: {message.message}")

    def _on_computed(self, number: int, message: w.Computed) -> None:
        """Raises ProtocolError or WrongOutputError."""
        call = self.peers.owed.settle(number, message.call_id, t.Compute)
        if call is None:
            return
        if self.spans.on:
            self.spans.on_received(message)
        self.peers.roster.on_computed(number, message.seconds)
        self.pace.on_answered(call.visit.request)
        audit: t.AuditRequested | None = None
        layer = self._layers.get(call.visit)
        if layer is not None:
            fault = self.checks.take(call, message, layer)
            audit = None if fault else self.checks.audit(call, layer)
        else:
            fault = self.checks.take_audit(call, message)
        if fault:
            self.post(t.ComputeFailed(message.call_id, f"worker {number} gave an output {fault}"))
            return
        self.post(t.ComputeEnded(message.call_id))
        if audit is not None:
            self.post(audit)

    def from_shadow(self, message: w.Message) -> None:
        """See `PeerListener`."""
        if isinstance(message, w.Draft):
            if self.prediction_filter.takes_draft(message.request, message.step):
                self._on_draft(message)
            return
        predicted = prediction_of(message, self.core.shape, self.spans.on_received)
        if self.prediction_filter.takes(predicted):
            self.post(predicted)

    def _on_draft(self, message: w.Draft) -> None:
        request = self._requests.get(message.request)
        drafts = request.drafts if request is not None else None
        if drafts is not None:
            drafts.offer(message)

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
        for observer in self._observers:
            observer.on_handled(event, self._now, commands)
        for command in commands:
            self._act(command)
            if self.pace.profile_name:  # which counts each message, in this order
                self.peers.flush()
        self.peers.flush()

    def _act(self, command: t.Command) -> None:
        if isinstance(command, t.Compute):
            self._send_compute(command)
        elif isinstance(command, t.Load):
            self.checks.loads(command)
            message = w.Load(command.load_id, command.slot, *command.expert, command.form, command.host_slot)
            self.peers.ask(command.load_id, command, message)
        elif isinstance(command, t.Evict):  # what was asked of the slot is not answered any more
            self.peers.owed.forgive_slot(command.worker, command.slot)
            self.peers.tell(command.worker, w.Evict(command.slot))
        elif isinstance(command, t.Route):
            self._layers.route(command)
        elif isinstance(command, t.Resume):
            self._layers.resume(command.visit)
        elif isinstance(command, t.Fail):
            self._fail(command.request, RequestFailedError, command.reason)
        elif isinstance(command, t.AuditDropped):
            self.checks.on_dropped(command)
        else:
            self._act_on_shadow(command)

    def _fail(self, number: int, kind: type[RequestFailedError], reason: str) -> None:
        request = self._requests.get(number)
        if request is not None:
            request.failure = kind, reason
        self._layers.release(number)

    def _withdraw(self, request: int, reason: str) -> None:
        """See `OutputChecks`."""
        if request in self.core.stats and self._failure(request) is None:
            self._fail(request, AnswerWithdrawnError, f"its tokens may be wrong, since {reason}; ask again")
            self.post(t.RequestClosed(request))

    def _act_on_shadow(self, command: t.Follow | t.Align | t.Unfollow) -> None:
        request, policy = self._requests.get(command.request), self.core.alignment
        data = request.sequence if request is not None and not request.is_answered else None
        if isinstance(command, t.Align):
            self.prediction_filter.on_announced(command.request, command.step, command.drafts)
        self._to_shadow.send(
            lambda carrier: self._with_spans(shadow_messages(command, data, policy, LOOKAHEAD, self.departure, carrier))
        )

    def _with_spans(self, messages: Iterable[w.Message]) -> Iterator[w.Message]:
        for message in messages:
            self.spans.sent_to_shadow(message)
            yield message

    def _send_compute(self, command: t.Compute) -> None:
        layer = self._layers.get(command.visit)
        rows = layer.rows_of(command) if layer is not None else self.checks.rows_of(command)
        if rows is None:  # interrupted: its request is about to be closed
            return
        passes = layer.passes_of(command) if layer is not None else self.checks.passes_of(command)
        message = compute_message(command, rows, self.peers.travels(command.worker), passes)
        if self.spans.on:
            self.spans.on_sent(message)
        self.peers.ask(command.call_id, command, message)

    def not_sent(self, message: w.Message, error: ProtocolError) -> None:
        """See `PeerListener`."""
        if not isinstance(message, w.Compute):
            raise error
        self.post(t.ComputeFailed(message.call_id, str(error)))

    def idle(self) -> bool:
        """Nothing is left of any request, here or in the scheduler."""
        left = self._requests or self._layers or len(self.peers.owed) or self.core.snapshot().loads
        return not left and self.core.idle()

    # --- the main model's side ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """Around all that is done for a request. It may be closed before the end, from any thread."""
        try:
            self.open_request(request)
            yield
        finally:
            self.close_request(request.number)

    def open_request(self, request: Request) -> None:
        with self._lock:
            for other in self._requests.values():
                other.is_shared = True
            self._requests[request.number] = request
            self.post(t.RequestOpened(request.number, len(request.sequence.prompt)))

    def on_answered(self, request: Request) -> None:
        """It has its last token, or ends without. It is open until its predictions are complete."""
        with self._lock:
            request.is_answered = True

    def close_request(self, number: int) -> None:
        with self._lock:
            request = self._requests.get(number)
            tokens = 0
            if request is not None:
                tokens, request.is_answered = len(request.sequence.tokens), True
            try:
                self.post(t.RequestClosed(number, tokens))
            finally:
                if self._requests.pop(number, None) is not None and request is not None:
                    request.forget_outputs()
                    self._ended.answer_tokens += tokens
                    self.prediction_filter.on_closed()
            stats = self.core.stats.pop(number, None)
            if stats is not None:
                self._ended.add(stats)
            self._layers.release(number)

    def begin_step(self, passes: tuple[t.Pass, ...], batched: bool = False) -> None:
        """The main model begins a step. `batched`: see `Pace.begin_step`."""
        self.pace.begin_step(passes, batched)
        self.spans.begin_step(passes)
        with self._lock:
            self._ended.begin_step(passes)
        self.post(t.StepStarted(passes))

    def on_verified(self, drafted: int, accepted: int) -> None:
        """A block has verified so many drafts; `accepted` of them were right."""
        with self._lock:
            self._ended.drafted += drafted
            self._ended.accepted += accepted

    def on_gate_fired(self, visit: t.Visit, layer: LayerWork) -> None:
        """Announce a gate. Raises RequestFailedError for a closed request."""
        traced = self.spans.on
        if traced:
            self.spans.gate(visit)
        with self._lock:
            request = self._requests.get(visit.request)
            if request is None or request.is_answered:
                raise RequestFailedError(f"request {visit.request} was closed")
            self._layers[visit] = layer
            self.post(t.GateFired(visit, layer.rows, layer.chosen, layer.scores))
        if traced:
            self.spans.on_announced(visit)

    def wait(self, visit: t.Visit, layer: LayerWork) -> None:
        """Until every expert of the layer has answered. Workers that are silent for too long are lost meanwhile, and
        the layer waits for others. Raises RequestFailedError."""
        wait_s = self.peers.owed.answer_s
        while self._failure(visit.request) is None and not layer.wait(wait_s):
            wait_s = self.peers.drop_silent()
            self._check_owed(visit, layer)
        self.check(visit.request)

    def check(self, request: int) -> None:
        """Raises RequestFailedError for a request that has failed or was closed, AnswerWithdrawnError for one whose
        tokens may be wrong."""
        failure = self._failure(request)
        if failure is not None:
            kind, reason = failure
            raise kind(f"request {request} failed: {reason}")
        if request not in self.core.stats:
            raise RequestFailedError(f"request {request} was closed")

    def _failure(self, number: int) -> tuple[type[RequestFailedError], str] | None:
        request = self._requests.get(number)
        return request.failure if request is not None else None

    def waiting(self) -> bool:
        """Requests wait for workers that are missing."""
        with self._lock:
            return self.deadlines.short and bool(self.core.stats)

    def _check_owed(self, visit: t.Visit, layer: LayerWork) -> None:
        """Raises RequestFailedError where no worker owes anything: then nothing would ever end the wait."""
        with self._lock:
            if not (self.peers.owed or layer.done or self.deadlines.short):
                raise RequestFailedError(
                    f"request {visit.request} failed: layer {visit.layer} at position {visit.position} has waited for "
                    f"{self.peers.owed.answer_s:g} s and no worker owes an answer; that is a defect, please report it"
                )

    def forget(self, visit: t.Visit) -> None:
        """The main model has left the layer."""
        with self._lock:
            del self._layers[visit]

    def wait_for_predictions(self, number: int, deadline_s: float) -> bool:
        """Until every layer that the main model has routed was predicted too. False when that took too long, the shadow
        was lost before or has been silent since, or the request was closed."""
        stats = self.core.stats
        with self._changed:
            self._changed.wait_for(
                lambda: self.deadlines.silent or number not in stats or not self._owed_predictions(number), deadline_s
            )
            return number in stats and not (self._owed_predictions(number) or stats[number].orphans)

    def close_stats(self, stats: RequestStats) -> None:
        """A request's figures are about to be reported. Predictions may come meanwhile."""
        with self._lock:
            stats.close()

    def _owed_predictions(self, number: int) -> int:
        """Layers of a request that the shadow owes."""
        return self.core.stats[number].unmatched_count if self.peers.shadow is not None else 0

    def trace(self, deadline_s: float = 30.0) -> list[Span]:
        """What every node has done since it was last asked, on this node's clock. Empty unless Hello said `trace`."""
        return gather(self.spans.take(), self.peers.all(), deadline_s) if self.spans.on else []

    def on_prefix_found(self, tokens: int) -> None:
        """The prefix cache had so many tokens of a prompt."""
        with self._lock:
            self._ended.cached_tokens += tokens

    def totals(self) -> Totals:
        """The figures of all requests so far, those under way included."""
        with self._lock:
            found = self._ended.copy()
            for stats in self.core.stats.values():
                found.add(stats)
            found.answer_tokens += sum(len(request.sequence.tokens) for request in self._requests.values())
            return found

    def activity(self, since: int | None) -> Activity:
        """What the nodes do now, and the accesses after `since`. They are followed from the first call on, and for some
        seconds after the last one."""
        with self._lock:
            watch, at_s = self._activity, max(self._now, self.pace.now())
            if watch not in self._observers:
                self._observers = [*self._observers, watch]
            accesses = watch.read(since)
            return Activity(watch.count, accesses, at_s, self.peers.roster.work(), watch.predictions, self.totals())

    def _end_activity(self) -> None:
        """While an event is handled: its observers are those of before."""
        self._observers = [one for one in self._observers if one is not self._activity]

    def cluster_figures(self, usage: Collection[w.WorkerUsage]) -> ClusterFigures:
        """What the cluster has done so far. `usage`: of those workers that have said it."""
        loads = sum(one.loads for one in usage)
        with self._lock:
            audits = self.checks.audits
            return ClusterFigures(
                lost=list(self.peers.lost),
                rejoined=list(self.peers.rejoined),
                suspects=[f"worker {number}: {fault}" for number, fault in self.peers.suspects.facts().items()],
                computations=self.checks.computations,
                audits=audits.done if audits else 0,
                audit_share=audits.share if audits else 0.0,
                audits_missed=dict(audits.missed) if audits else {},
                loads_checked=sum(one.loads_checked for one in usage) / loads if loads else None,
                forms=sorted(self.core.forms, key=FORMS.index),
                smaller_forms=[form for form in self.core.strategy.precision.forms if form != FULL],
                form_costs=self.core.form_costs,
                prediction_step_s=self.prediction_trial.step_s,
            )

    def token_traffic(self, number: int) -> dict[str, int] | None:
        """See `Roster.token_traffic`. None where other requests are open, or were opened meanwhile, too."""
        with self._lock:
            request = self._requests.get(number)
            alone = self.core.stats.keys() <= {number} and not (request is not None and request.is_shared)
            return self.peers.roster.token_traffic() if alone else None

    def close(self) -> None:
        """End every stream, and take no new one. A request that still waits for a worker fails."""
        if self.copies is not None:
            self.copies.close()
        self.peers.close()
        self._to_shadow.close()
        if self._verification.arbiter is not None:
            self._verification.arbiter.close()
        with self._lock:
            self.deadlines.close()
        self.deadlines.join()
