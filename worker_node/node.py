"""The worker: loads an expert just in time, computes it, evicts it.

Two threads, so that a load does not wait for a computation, nor a computation for another slot's load. With one slot
nothing can overlap: a load needs the slot that the computation before it leaves. Then one thread does both, and saves a
hand-over per expert.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from checkpoint.expert import ExpertArithmetic
from checkpoint.sizes.message_limits import message_limits
from checkpoint.store import ExpertStore
from scheduler.errors import ConfigError, ODMoEError, ProtocolError
from scheduler.types import ExpertId
from wire import runtime
from wire.base import Channel
from wire.messages import (
    AskUsage,
    Compute,
    Evict,
    HostShrunk,
    Keep,
    Load,
    Loaded,
    Message,
    WorkerReady,
    WorkerUsage,
)
from wire.serial import SerialThread
from wire.sessions import Sessions
from worker_node.form_choice import FormChoice
from worker_node.loaders.base import Loader
from worker_node.loaders.load_checks import LoadChecks
from worker_node.measure import device_costs, host_load_s, load_bandwidth
from worker_node.memory_watch import MemoryWatch
from worker_node.occupancy import SlotOccupancy
from worker_node.part_keeper import PartKeeper
from worker_node.part_watch import PartWatch
from worker_node.ready import Group, ReadyComputations, row_count
from worker_node.restorer import Restorer
from worker_node.session import ComputeSession
from worker_node.slot_computer import SlotComputer
from worker_node.slots import Slots
from worker_node.worker_threads import WorkerThreads

SLOT_DEADLINE_S = 60.0
"""Most time for which a load waits until a computation has left its slot."""

QUICK_LOAD_S = 200e-6
"""A shorter load is not handed to another thread: the hand-over would take as long."""


class Worker(SlotComputer):
    """One worker node. It serves one main node at a time.

    `choice`: slots, and all forms that may be loaded. A slot has room for the largest. With one other than the full
    form, which is the empty string, and for a store with an encoding, device memory for one restored expert is
    allocated too. `checks`: which loads are compared with the store's checksums, see `LoadChecks`.

    Raises ConfigError; StoreError for a form that the store lacks; LaunchError where memory does not suffice or the
    store cannot be read.
    """

    def __init__(
        self,
        name: str,
        store: ExpertStore,
        arithmetic: ExpertArithmetic,
        loader: Loader,
        choice: FormChoice,
        threads: WorkerThreads = WorkerThreads(),
        checks: str = "auto",
    ) -> None:
        forms, slots = choice.forms, choice.slots
        if not forms:
            raise ConfigError(f"{name} has no form in which to load experts; the full form is ''")
        memory = Slots(slots, max(map(store.manifest.form_bytes, forms)), loader.device)
        restorer = Restorer(store, arithmetic, forms, loader.device, threads.restoring)
        super().__init__(store, arithmetic, loader, memory, restorer)
        self.name = name
        self.limits = message_limits(store)
        self.lent = threads.lent
        self.forms = forms
        self.form_costs = choice.costs
        loader.prepare(self.slots.buffers)
        self.load_bytes_per_s = load_bandwidth(store, loader, self.slots.buffers, forms[0])
        """The loader's bandwidth, measured here; these loads are not counted."""
        self.host_load_s = host_load_s(store, loader, self.slots.buffers, forms[0])
        """Seconds of a load from host memory, where that is a tier of its own."""
        self.checks = LoadChecks(name, store, loader, checks)
        self.checks.measure(self.slots.buffers[0])
        slot_s = self.slots.buffers[0].nbytes / self.load_bytes_per_s if self.load_bytes_per_s else 0.0
        self.loads_are_quick = self.lent is not None and self.is_on_cpu and 0 < slot_s < QUICK_LOAD_S
        """A thread that waits for a layer may load, too."""
        self.freed = [0.0] * slots
        """When each slot was freed last."""
        self.loading = runtime.Lock()
        """Held by the load under way: a lent thread may begin one while the worker's own is loading."""
        self.loads = self.loads_from_memory = 0
        self.bytes_loaded = 0
        self.sessions: Sessions[_Session] = Sessions()
        self._memory_watch = MemoryWatch(name, loader.tier, self.loading, self._on_shrunk) if loader.tier else None
        self._part_watch = PartWatch(store, self.sessions, self.is_on_cpu or loader.tier is not None)
        self.keeper = PartKeeper(name, store, self._part_watch)
        first = 0, store.manifest.moe_layers[0], forms[0]
        call_s, row_s = self.pace.costs or device_costs(store, partial(self.run, *first))
        self.costs = (call_s + self.pace.restore_s if forms[0] else call_s), row_s
        """Seconds that a computation takes, a call and a row, from a profile or measured; 0 where unknown."""

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def _on_shrunk(self, host_slots: int) -> None:
        if (served := self.sessions.served) is not None:
            served.send(HostShrunk(host_slots))

    def close(self) -> None:
        self.keeper.close()
        self._part_watch.close()
        self.sessions.close()
        if self._memory_watch is not None:
            self._memory_watch.close()
        self.loader.close()
        self.checks.close()


class _Session(ComputeSession):
    """One main node's stream to this worker."""

    def __init__(self, worker: Worker, reply: Channel) -> None:
        super().__init__(worker, reply)
        self._worker = worker
        self._occupancies: dict[int, SlotOccupancy] = {}  # slot -> the expert that is in it, or on its way there
        self._slots = runtime.Lock()
        self._ready = ReadyComputations()
        """They have not begun."""
        self._loading = SerialThread(f"{worker.name}-load", self.report, worker.lent)
        one_slot = len(worker.slots.buffers) == 1
        self._computing = (
            self._loading if one_slot else SerialThread(f"{worker.name}-compute", self.report, worker.lent)
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def ready(self) -> WorkerReady:
        worker, slots = self._worker, self._worker.slots.buffers
        ready = self.describe(
            worker.loader.device, worker.loader.name, len(slots), slots[0].nbytes, worker.load_bytes_per_s
        )
        forms, load_s, restore_s, fits = zip(*worker.form_costs, strict=True) if worker.form_costs else ((),) * 4
        tier = worker.loader.tier
        ready = replace(ready, host_slots=tier.slots if tier else 0, host_load_s=worker.host_load_s)
        return replace(ready, forms=forms, form_load_s=load_s, form_restore_s=restore_s, form_fits=fits)

    def usage(self) -> WorkerUsage:
        worker = self._worker
        checked = worker.checks.checked  # first: a load is counted before its check is
        tier, slots = worker.loader.tier, worker.slots
        figures = worker.allocated_bytes, worker.loads, worker.bytes_loaded, checked
        return WorkerUsage(slots.resident_max, *figures, tier.bytes_max if tier else 0, worker.loads_from_memory)

    def dispatch(self, message: Message) -> None:
        if isinstance(message, Load):
            self._load(message)
        elif isinstance(message, Evict):
            self.on_evicted(message.slot)
            self._evict(message.slot)
        elif isinstance(message, Compute):
            self.on_rows(message)
            if self.admit(message):
                self._compute(message)
        elif isinstance(message, Keep):
            self._worker.keeper.take(message, self.send)
        elif isinstance(message, AskUsage):
            self._loading.submit(self.send_usage)
        else:
            raise ProtocolError(f"a worker does not take {type(message).__name__}")

    def end(self) -> None:
        with self._slots:
            slots = list(self._occupancies)
        for slot in slots:
            self._evict(slot)
        self._loading.close()
        self._computing.close()

    def _load(self, message: Load) -> None:
        worker, slots = self._worker, len(self._worker.slots.buffers)
        if not 0 <= message.slot < slots:
            raise ProtocolError(f"slot {message.slot} does not exist; {worker.name} has slots 0 to {slots - 1}")
        if message.form not in worker.forms:
            raise ProtocolError(
                f"{worker.name} does not load experts in form {message.form!r:.40}; it was started for "
                f"{', '.join(map(repr, worker.forms))}"
            )
        worker.store.locate(message.layer, message.expert, message.form)
        expert = ExpertId(message.layer, message.expert)
        received = worker.pace.now()
        occupancy = SlotOccupancy(message.load_id, message.slot, expert, received, message.form, message.host_slot)
        with self._slots:
            if self.over:  # `end` has already evicted what was there
                return
            if message.slot in self._occupancies:
                raise ProtocolError(f"slot {message.slot} is taken by {self._occupancies[message.slot].expert}")
            self._occupancies[message.slot] = occupancy
        start = self._loading.lend if worker.loads_are_quick else self._loading.submit
        start(self._run_load, occupancy)

    def _compute(self, message: Compute) -> None:
        received = self._worker.pace.now()
        with self._slots:
            occupancy = self._occupancies.get(message.slot)
            if occupancy is None or occupancy.expert != (message.layer, message.expert):
                content = occupancy.expert if occupancy else "nothing"
                raise ProtocolError(
                    f"slot {message.slot} holds {content}, not expert {message.expert} of layer {message.layer}"
                )
            if occupancy.loaded:
                self._submit(occupancy, message, received)
            else:
                occupancy.waiting.append((message, received))

    def _submit(self, occupancy: SlotOccupancy, message: Compute, received: float) -> None:
        """Called with the lock held: computations keep their order."""
        # Both functions wait for this lock before they look for something ready.
        self._computing.lend(self._run_compute, occupancy, is_due=partial(self._has_ready, occupancy))
        self._ready.add(occupancy, message, received)

    def _has_ready(self, occupancy: SlotOccupancy) -> bool:
        """Nothing is where it was computed with others of its layer."""
        with self._slots:
            return bool(occupancy.ready)

    def _evict(self, slot: int) -> None:
        with self._slots:
            occupancy = self._occupancies.pop(slot, None)
            if occupancy is None:
                return
            occupancy.cancelled.cancel(self._worker.pace.now())
            free = occupancy.occupied and occupancy.loaded and not occupancy.computing
            occupancy.occupied = occupancy.occupied and not free
            dropped = self._ready.drop(occupancy)
            occupancy.waiting.clear()
        if dropped:  # outputs may wait to travel with theirs
            self.send_outputs()
        if free:
            self._free(occupancy)

    # --- the threads --------------------------------------------------------------------------------------------

    def _run_load(self, occupancy: SlotOccupancy) -> None:
        """On the loading thread, or a lent one."""
        worker = self._worker
        if occupancy.cancelled.is_set():  # before this thread came to it; by a profile's times it may have begun
            worker.pace.begin_load(max(occupancy.received, worker.freed[occupancy.slot]))
            worker.pace.end_load(occupancy.cancelled, worker.share(occupancy.expert, occupancy.form))
            return
        try:
            loaded = self._load_now(occupancy)
        except BaseException as error:  # a lent thread may be interrupted here
            self._release(occupancy)
            self.report_load(error, occupancy.load_id, occupancy.expert, occupancy.form)
            if not isinstance(error, Exception):
                raise
            return
        try:
            if loaded is not None:
                self.send(loaded)  # before any output of this expert can be sent
        finally:
            self._begin_waiting(occupancy)

    def _load_now(self, occupancy: SlotOccupancy) -> Loaded | None:
        """None where it was cancelled."""
        worker = self._worker
        buffer = worker.slots.occupy(occupancy.slot, occupancy.expert, SLOT_DEADLINE_S)
        occupancy.occupied = True
        start = worker.pace.begin_load(max(occupancy.received, worker.freed[occupancy.slot]))
        tier = worker.loader.tier
        with worker.loading:
            in_memory = tier is None or tier.assign(occupancy.host_slot, occupancy.expert, occupancy.form)
            try:
                load = worker.checks.load(*occupancy.expert, buffer, occupancy.cancelled.is_set, occupancy.form)
            except BaseException:
                if tier is not None:
                    tier.drop(occupancy.expert)
                raise
            if not occupancy.cancelled.is_set():
                worker.loads += 1
                worker.loads_from_memory += in_memory and tier is not None
                worker.bytes_loaded += load.nbytes
        share = worker.share(occupancy.expert, occupancy.form)
        occupancy.ended = worker.pace.end_load(occupancy.cancelled, share, in_memory)
        cancelled, seconds = occupancy.cancelled.is_set(), occupancy.ended - start
        if self.spans.on:
            self.spans.add("given up" if cancelled else "load", occupancy.label, start, occupancy.ended)
        if cancelled:
            return None
        worker.checks.on_loaded(seconds, load)
        return Loaded(occupancy.load_id, load.nbytes, seconds, load.checked)

    def _begin_waiting(self, occupancy: SlotOccupancy) -> None:
        """The load is over: queue the computations that waited for it, or free the slot if it was cancelled."""
        failed: list[tuple[ODMoEError, Compute]] = []
        with self._slots:
            occupancy.loaded = True
            cancelled = occupancy.cancelled.is_set()
            for message, received in occupancy.waiting:  # under the lock: later ones must stay behind
                try:
                    self._submit(occupancy, message, received)
                except ODMoEError as error:
                    failed.append((error, message))
            occupancy.waiting = []
        if cancelled:
            self._release(occupancy)
        for fault, message in failed:
            self.report(fault, message)

    def _run_compute(self, occupancy: SlotOccupancy) -> None:
        """On the computing thread, or a lent one. Computes what is ready first, and with it what can be."""
        groups: list[Group] = []
        try:
            with self._slots:
                groups += self._ready.take(occupancy, self._worker.computes_together)
            for group in groups:
                self._join(group)
            if len(groups) > 1:
                self._compute_layer(groups)
            elif groups and occupancy.computing:
                self._compute_and_answer(occupancy, groups[0].messages, groups[0].received)
            if not self._more():
                self.send_outputs()
        except BaseException as error:  # a lent thread may be interrupted here
            for group in groups:
                self._finish(group.occupancy, evict=False)
                for message in group.messages:
                    self.report(error, message)
            if not isinstance(error, Exception):
                raise

    def _compute_layer(self, groups: list[Group]) -> None:
        """Experts of a layer in one go, with one hand-over to the threads that multiply."""
        start = self._worker.pace.now()
        try:
            outputs = self._worker.compute_layer(groups)
        except Exception:  # noqa: BLE001 - one of them is wrong
            for group in groups:
                self._compute_each(group.occupancy, group.messages, group.received)
            return
        each = (self._worker.pace.now() - start) / len(groups)
        for group, output in zip(groups, outputs, strict=True):
            if self.spans.on:
                self.spans.add("compute", group.occupancy.label, start, start + each)
                start += each
            evict = any(message.evict for message in group.messages)
            self._finish(group.occupancy, evict)
            for rows in output.split(list(map(row_count, group.messages))):
                more = self._worker.lent is None and not (evict and len(group.messages) == 1)
                self.send_output(group.messages[0], rows, each, more)
                del group.messages[0]

    def _join(self, group: Group) -> None:
        """The computations of other requests that are made together with the first. Not in emulated time, in which
        each lasts as long as by the profile."""
        worker, occupancy = self._worker, group.occupancy
        if not occupancy.ready or worker.pace.is_emulated:
            return
        try:
            if not worker.is_rowwise(occupancy.slot, occupancy.expert.layer, occupancy.form):
                return
        except (RuntimeError, ValueError, LookupError, MemoryError):  # no memory to find out: each by itself
            return
        with self._slots:
            self._ready.join(group)

    def _more(self) -> bool:
        """Another computation is ready, and the outputs so far may travel with its own. Not in emulated time, which
        counts each message, nor in one process, where none travels."""
        with self._slots:
            return self._ready.count > 0 and not self._worker.pace.is_emulated and self._worker.lent is None

    def _compute_and_answer(self, occupancy: SlotOccupancy, messages: list[Compute], received: float) -> None:
        """Takes each message from the list once it is answered. `received`: when the last of them came."""
        pace = self._worker.pace
        start = pace.begin_compute(max(received, occupancy.ended))
        try:
            outputs = self._worker.compute_together(messages, occupancy.form)
        except Exception:
            if len(messages) == 1:
                raise
            self._compute_each(occupancy, messages, received)  # one of them is wrong
            return
        end = pace.end_compute(sum(map(len, outputs)), self._worker.restorer.counts(occupancy, occupancy.form))
        if self.spans.on:
            self.spans.add("compute", occupancy.label, start, end)
        evict = any(message.evict for message in messages)
        self._finish(occupancy, evict)
        for output in outputs:
            # A slot that came free is reported at once: its next load waits for that.
            more = (self._more() and not evict) if len(messages) == 1 else self._worker.lent is None
            self.send_output(messages[0], output, end - start, more)
            del messages[0]

    def _compute_each(self, occupancy: SlotOccupancy, messages: list[Compute], received: float) -> None:
        while messages:
            with self._slots:
                occupancy.computing = not occupancy.cancelled.is_set()
            if not occupancy.computing:
                self._finish(occupancy, evict=False)
                return
            try:
                self._compute_and_answer(occupancy, messages[:1], received)
            except Exception as error:  # noqa: BLE001 - the others may be right
                self._finish(occupancy, evict=False)
                self.report(error, messages[0])
            del messages[0]

    def _finish(self, occupancy: SlotOccupancy, evict: bool) -> None:
        """The computation has left the slot. Free it if it is to be evicted, or was evicted meanwhile."""
        with self._slots:
            occupancy.computing = False
            if evict and self._occupancies.get(occupancy.slot) is occupancy:
                del self._occupancies[occupancy.slot]
                occupancy.cancelled.cancel(self._worker.pace.now())
        if occupancy.cancelled.is_set():
            self._release(occupancy)

    def _release(self, occupancy: SlotOccupancy) -> None:
        with self._slots:
            occupied, occupancy.occupied = occupancy.occupied, False
        if occupied:
            self._free(occupancy)

    def _free(self, occupancy: SlotOccupancy) -> None:
        now = self._worker.freed[occupancy.slot] = self._worker.pace.now()
        if self.spans.on:
            self.spans.add("evict", occupancy.label, now, now)
        self._worker.slots.release(occupancy.slot)
