"""Workers and the host place on a virtual clock: slots, one load at a time on each link, one computation at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from scheduler import types as t
from scheduler.simulation.events import EventHeap
from scheduler.simulation.time_breakdown import CallTimes, LoadTimes
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile
from scheduler.trace import Span


class _Worker:
    """A worker or a host place."""

    __slots__ = ("compute_s", "free", "freed", "has_disk", "loading", "profile", "queue", "restored", "slots")

    def __init__(
        self,
        slots: list[LoadTimes | None],
        profile: Profile,
        compute_s: Callable[[int], float],
        has_disk: bool = False,
    ) -> None:
        self.slots = slots
        """The load of each slot, in flight or over."""
        self.freed = [0.0] * len(slots)
        """The time at which the last computed expert left each slot."""
        self.profile = profile
        """Of its speed."""
        self.compute_s = compute_s
        """Seconds of a computation, by its number of rows."""
        self.has_disk = has_disk
        """Its experts are on disk, except those in its host slots; else all of them are in host memory."""
        self.queue: deque[LoadTimes] = deque()
        self.loading: LoadTimes | None = None
        self.free = 0.0
        """End of its last computation."""
        self.restored: LoadTimes | None = None
        """The load whose expert was restored last, from a smaller form."""


def _host_load() -> LoadTimes:
    """Stands for all experts of a host place: a load that ended before the simulation began."""
    return LoadTimes(t.Load(-1, 0, t.ExpertId(-1, -1), -1), 0.0, 0.0, [], 0.0, begun=0.0, ended=0.0)


class SimulatedWorkers:
    """Carries out loads, evictions and computations. `post`: passes an event to the core and carries out its
    commands.

    A worker's link carries one load at a time, in the order of the commands; a worker computes one expert at a time, in
    the order in which both rows and load were there. An evicted load frees its slot at once, and the link with the end
    of the piece under way (`Profile.ended_load_s`). A host place computes in the order in which rows arrive.

    A smaller form loads as much faster as its bytes are fewer. Its expert is restored before it is computed, by the
    processor that computes it, and not again until another one was restored."""

    def __init__(
        self,
        events: EventHeap,
        profile: Profile,
        links: MainLinks,
        post: Callable[[t.Event], object],
        answered: Callable[[CallTimes | None], None],
        stalled: Callable[[], float | None],
        spans: list[Span] | None,
    ) -> None:
        """`answered`: called with a computation whose answer has arrived, before the core hears of it, and with None
        after that. `stalled`: since when the main node has waited, None if it computes."""
        self._events = events
        self._profile = profile
        self._links = links
        self._post = post
        self._answered = answered
        self._stalled = stalled
        self._spans = spans
        self._workers: list[_Worker] = []
        self._cause: CallTimes | None = None  # the computation whose answer is being handled

    def join(
        self,
        slots: int,
        forms: tuple[t.FormCost, ...],
        largest: str = "",
        own: Profile | None = None,
        held: tuple[t.HeldRange, ...] | None = None,
        host_slots: int | None = None,
    ) -> None:
        """The next worker, numbered from 0. `largest`: the form for which its slots have room. `own`: its times, if
        not those of all. `held`: its part of the store. `host_slots`: None if host memory has all experts. Raises
        ConfigError if the profile has no times for a disk that is needed."""
        profile, number = own or self._profile, len(self._workers)
        self._workers.append(_Worker([None] * slots, profile, profile.compute_s, host_slots is not None))
        call_s, row_s = profile.device_costs
        call_s += profile.restore_s if largest else 0.0
        share = profile.form_share(largest)
        load_s = profile.lasting_load_s(host_slots is None, share)
        host_load_s = profile.lasting_load_s(share=share) if host_slots else 0.0
        own_costs = call_s, row_s, forms, host_slots or 0, host_load_s
        self._post(t.WorkerJoined(number, slots, load_s, *own_costs, held))

    def join_host(self) -> None:
        """A host place. Raises ConfigError if the profile has no times for it."""
        profile, number = self._profile, len(self._workers)
        self._workers.append(_Worker([_host_load()], profile, profile.host_compute_s))
        self._post(t.WorkerJoined(number, 0, 0.0, *profile.host_costs))

    def _span(self, row: str, what: str, label: str, start: float, end: float) -> None:
        if self._spans is not None:
            self._spans.append(Span(row, what, label, start, end))

    # --- loads --------------------------------------------------------------------------------------------------

    def load(self, command: t.Load) -> None:
        worker, slot = self._workers[command.worker], command.slot
        full_s = worker.profile.lasting_load_s(command.in_memory or not worker.has_disk)
        worker.slots[slot] = load = LoadTimes(command, self._events.now, worker.freed[slot], [], full_s)
        if command.form:
            load.share = self._profile.form_share(command.form)
        if worker.loading is None:
            self._begin_load(worker, load)
        else:
            worker.queue.append(load)

    def _begin_load(self, worker: _Worker, load: LoadTimes) -> None:
        worker.loading = load
        load.begun = now = self._events.now
        self._events.at(now + load.full_s * load.share, self._on_loaded, load)

    def _next_load(self, worker: _Worker) -> None:
        worker.loading = None
        while worker.queue:
            load = worker.queue.popleft()
            if not load.cancelled:
                self._begin_load(worker, load)
                return

    def _on_loaded(self, load: LoadTimes) -> None:
        if load.cancelled:
            return
        load.ended = now = self._events.now
        worker = self._workers[load.command.worker]
        self._next_load(worker)
        if self._spans is not None:
            self._add_load_spans(load)
        self._post(t.LoadEnded(load.command.load_id))
        if load.waiting:
            for call in load.waiting:
                self._begin_compute(worker, call, now)
            load.waiting.clear()  # the calls refer to the load: a cycle that only the collector would find

    def _add_load_spans(self, load: LoadTimes) -> None:
        now, since = self._events.now, self._stalled()
        self._span(f"worker {load.command.worker}", "load", _label(load.command), load.begun, now)
        last_arrival = max([call.arrives for call in load.waiting], default=now)
        if last_arrival < now and since is not None:
            self._span("main", "stall", "", since, now)

    def evict(self, command: t.Evict) -> None:
        worker, now = self._workers[command.worker], self._events.now
        load, worker.slots[command.slot] = worker.slots[command.slot], None
        if load is None:
            return
        load.cancelled = True
        if self._cause is not None and self._cause.load is load:
            worker.freed[command.slot] = now  # by the last of several passes that it has computed
        in_flight = worker.loading is load
        if in_flight:
            now = load.begun + worker.profile.ended_load_s(
                now - load.begun, load.share, load.command.in_memory or not worker.has_disk
            )
        if self._spans is not None:
            row = f"worker {command.worker}"
            if in_flight:
                self._span(row, "given up", _label(command), load.begun, now)
            self._span(row, "evict", _label(command), now, now)
        if in_flight and now > self._events.now:
            self._events.at(now, self._next_load, worker)
        elif in_flight:
            self._next_load(worker)

    # --- computations -------------------------------------------------------------------------------------------

    def compute(self, command: t.Compute) -> None:
        worker, now = self._workers[command.worker], self._events.now
        load = worker.slots[command.slot]
        if load is None:
            return
        rows = command.stop - command.start
        arrives = self._links.send_rows(now, rows)
        call = CallTimes(command, load, rows, now, arrives, self._cause)
        if load is worker.loading and load.begun + load.full_s * load.share >= arrives:
            load.waiting.append(call)
        elif load.ended >= 0 and len(worker.slots) == 1:  # no other computation can come in between
            self._begin_compute(worker, call, arrives)
        else:
            self._events.at(arrives, self._on_arrived, call)

    def _on_arrived(self, call: CallTimes) -> None:
        if call.load.ended < 0:
            call.load.waiting.append(call)
        else:
            self._begin_compute(self._workers[call.command.worker], call, self._events.now)

    def _begin_compute(self, worker: _Worker, call: CallTimes, at: float) -> None:
        call.start = start = at if at > worker.free else worker.free
        lasts_s = worker.compute_s(call.rows)
        if call.load.command.form and worker.restored is not call.load:
            worker.restored = call.load
            lasts_s += worker.profile.restore_s
        call.end = worker.free = end = start + lasts_s
        self._events.at(end, self._on_computed, call)

    def _on_computed(self, call: CallTimes) -> None:
        command, now = call.command, self._events.now
        if call.load.cancelled:
            return
        if command.evict:
            self._workers[command.worker].slots[command.slot] = None
        comes = self._links.send_outputs(now, call.rows)
        if self._spans is not None:
            self._add_call_spans(call, comes)
        self._events.at(comes, self._answer, call)

    def _add_call_spans(self, call: CallTimes, comes: float) -> None:
        command, now = call.command, self._events.now
        row, label = f"worker {command.worker}", _label(command)
        self._span(row, "transfer", f"{label} to #{command.call_id}", call.sent, call.arrives)
        self._span(row, "compute", label, call.start, call.end)
        if command.evict:
            self._span(row, "evict", label, now, now)
        self._span(row, "transfer", f"from #{command.call_id}", now, comes)

    def _answer(self, call: CallTimes) -> None:
        command = call.command
        if command.evict:
            self._workers[command.worker].freed[command.slot] = self._events.now
        self._cause = call
        self._answered(call)
        self._post(t.ComputeEnded(command.call_id))
        self._cause = None
        self._answered(None)


def _label(command: t.Load | t.Evict | t.Compute) -> str:
    return f"{command.expert.layer}.{command.expert.expert}"
