"""Facts about every node: what it reports of itself, what was measured, whether it is connected."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from main_node.activity import WorkerActivity
from main_node.figures import NodeFigures
from wire import runtime
from wire.base import Role
from wire.messages import Align, Compute, Computed, Prediction, ShadowReady, WorkerReady
from wire.traffic import Traffic

SENT, RECEIVED = "sent", "received"
"""All messages of a stream, beside those that tokens cost."""
LINES = 100
"""Lines that are kept. A client asks for them each second."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. None: this role has no such figure, or it could not be measured."""

    role: Role
    number: int
    state: Literal["ready", "lost"]
    host: str
    pid: int
    device: str
    """Its processor or GPU."""
    device_bytes: int | None
    """All memory of the device."""
    scheme: str | None
    loader: str | None
    slots: int | None
    slot_bytes: int | None
    """Of one slot."""
    load_bytes_per_s: float | None
    """Of its loader, measured when it started."""
    round_trip_s: float | None
    """The best of a few, when it joined."""
    loads: int | None
    """Loads that have ended since the main node started."""
    sent_bytes: int | None
    """Encoded messages from the main node on the node's latest stream; None in one process."""
    received_bytes: int | None


@dataclass(slots=True)
class _Entry:
    ready: WorkerReady | ShadowReady
    round_trip_s: float | None
    traffic: Traffic | None
    lost: bool = False
    loads: int = 0
    bytes_loaded: int = 0
    load_s: float = 0.0
    computations: int = 0
    compute_s: float = 0.0
    losses: int = 0
    returns: int = 0
    before: Counter[str] = field(default_factory=Counter)
    """Bytes that its earlier streams have carried, as `_stream_bytes`."""

    def stream_bytes(self) -> Counter[str]:
        """Bytes that its streams have carried so far, as `_stream_bytes`."""
        carried = self.before.copy()
        carried.update(_stream_bytes(self.ready, self.traffic))
        return carried


class Roster:
    """Every node that ever joined, by role and number. Thread-safe; nothing here waits."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._entries: dict[tuple[Role, int], _Entry] = {}

    def on_joined(
        self,
        role: Role,
        number: int,
        ready: WorkerReady | ShadowReady,
        round_trip_s: float | None,
        traffic: Traffic | None,
    ) -> None:
        """A node has joined, or joined again. `traffic`: of its stream, as the main node counts it."""
        with self._lock:
            entry, before = _Entry(ready, round_trip_s, traffic), self._entries.get((role, number))
            if before is not None:
                entry.loads, entry.bytes_loaded, entry.load_s = before.loads, before.bytes_loaded, before.load_s
                entry.computations, entry.compute_s = before.computations, before.compute_s
                entry.losses, entry.returns = before.losses, before.returns + 1
                entry.before = before.stream_bytes()
            self._entries[role, number] = entry

    def on_lost(self, role: Role, number: int) -> None:
        with self._lock:
            entry = self._entries[role, number]
            entry.lost = True
            entry.losses += 1

    def on_loaded(self, number: int, nbytes: int, seconds: float) -> None:
        """A worker's load has ended."""
        with self._lock:
            entry = self._entries.get(("worker", number))
            if entry is not None:  # else its load has ended before it joined
                entry.loads += 1
                entry.bytes_loaded += nbytes
                entry.load_s += seconds

    def on_computed(self, number: int, seconds: float) -> None:
        """A worker's computation has ended."""
        with self._lock:
            entry = self._entries.get(("worker", number))
            if entry is not None:
                entry.computations += 1
                entry.compute_s += seconds

    def work(self) -> tuple[WorkerActivity, ...]:
        """What the workers have done so far, by number."""
        with self._lock:
            return tuple(
                WorkerActivity(number, not entry.lost, entry.loads, entry.load_s, entry.computations, entry.compute_s)
                for role, number, entry in self._entries_in_order()
                if role == "worker"
            )

    def slot_bytes(self, numbers: Iterable[int]) -> int:
        """Of all slots of these workers."""
        with self._lock:
            ready = [entry.ready for n in numbers if (entry := self._entries.get(("worker", n))) is not None]
        return sum(one.slots * one.slot_bytes for one in ready if isinstance(one, WorkerReady))

    def facts(self) -> list[NodeFacts]:
        """Workers by number, then the shadow."""
        with self._lock:
            return [_facts(role, number, entry) for role, number, entry in self._entries_in_order()]

    def figures(self) -> list[NodeFigures]:
        """Workers by number, then the shadow; without what they hold and whether they are suspect."""
        with self._lock:
            return [_figures(role, number, entry) for role, number, entry in self._entries_in_order()]

    def _entries_in_order(self) -> list[tuple[Role, int, _Entry]]:
        entries = [(role, number, entry) for (role, number), entry in self._entries.items()]
        return sorted(entries, key=lambda one: (one[0] == "shadow", one[1]))

    def devices(self) -> dict[str, str | list[str]]:
        """What `workers` and `shadow` compute on: the device as torch names it, and its model."""
        with self._lock:
            ready = [entry.ready for _, entry in sorted(self._entries.items())]
        workers = [_device(one) for one in ready if isinstance(one, WorkerReady)]
        shadow = [_device(one) for one in ready if isinstance(one, ShadowReady)]
        return {"workers": workers, **({"shadow": shadow[0]} if shadow else {})}

    def kinds(self) -> set[str]:
        """The kinds of devices that workers compute on, see `kind_of`."""
        with self._lock:
            ready = [entry.ready for entry in self._entries.values()]
        return {kind_of(_device(one)) for one in ready if isinstance(one, WorkerReady)}

    def token_traffic(self) -> dict[str, int] | None:
        """Bytes so far of the messages that a token costs: embeddings to workers and back, with their headers,
        alignments to the shadow, predictions from it. None in one process."""
        with self._lock:
            if all(entry.traffic is None for entry in self._entries.values()):
                return None
            total: Counter[str] = Counter()
            for entry in self._entries.values():
                total.update(entry.stream_bytes())
        return {name: total[name] for name in ("to_workers", "from_workers", "to_shadow", "from_shadow")}


class Membership:
    """Losses and returns of nodes, and copies of experts after them: lines of text, numbered from 1, for clients that
    watch their answers. Thread-safe; nothing here waits."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0

    def on_lost(self, name: str, why: str, workers: int) -> None:
        """`name`: of the node, as `worker 1` or `shadow`. `workers`: those that are left."""
        if name == "shadow":
            self.add(f"the shadow is lost, tokens take longer without its predictions: {why}")
        elif workers:
            self.add(f"{name} is lost, {workers} left: {why}")
        else:
            self.add(f"{name} is lost, none left; answers wait for one (--worker-wait): {why}")

    def on_returned(self, name: str) -> None:
        self.add(f"{'the ' * (name == 'shadow')}{name} is back")

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)
            self._count += 1

    def since(self, number: int | None) -> tuple[int, list[str]]:
        """The number of the last line, and the lines after `number`; none of them for None, or where this main node is
        another than the one that gave the number."""
        with self._lock:
            fresh = 0 if number is None else max(0, self._count - number)
            return self._count, list(self._lines)[len(self._lines) - min(fresh, len(self._lines)) :]


def kind_of(device: str) -> str:
    """`cpu` of any processor, `cuda (NVIDIA H200)` of `cuda:1 (NVIDIA H200)`.

    Devices of one kind are taken to round alike. For GPUs of two models a library chooses other kernels, which add in
    another order.
    """
    name, _, model = device.partition(" ")
    kind = name.partition(":")[0]
    return kind if kind == "cpu" else f"{kind} {model}"


def _device(ready: WorkerReady | ShadowReady) -> str:
    return f"{ready.device} ({ready.device_name})"


def _stream_bytes(ready: WorkerReady | ShadowReady, traffic: Traffic | None) -> dict[str, int]:
    """Bytes by stream, and of all messages as `SENT` and `RECEIVED`. Empty in one process."""
    if traffic is None:
        return {}
    every = {SENT: traffic.sent.count_of().nbytes, RECEIVED: traffic.received.count_of().nbytes}
    if isinstance(ready, WorkerReady):
        there, back = traffic.sent.count_of(Compute), traffic.received.count_of(Computed)
        return {"to_workers": there.nbytes, "from_workers": back.nbytes, **every}
    there, back = traffic.sent.count_of(Align), traffic.received.count_of(Prediction)
    return {"to_shadow": there.nbytes, "from_shadow": back.nbytes, **every}


def _figures(role: Role, number: int, entry: _Entry) -> NodeFigures:
    ready = entry.ready
    carried = entry.stream_bytes() if entry.traffic is not None else Counter()
    worker = ready if isinstance(ready, WorkerReady) else None
    return NodeFigures(
        role=role,
        number=number,
        up=not entry.lost,
        host=ready.host,
        device=_device(ready),
        loader=worker.loader if worker else "",
        slots=worker.slots if worker else 0,
        measured_load_bytes_per_s=(worker.load_bytes_per_s or None) if worker else None,
        round_trip_s=entry.round_trip_s,
        loads=entry.loads,
        bytes_loaded=entry.bytes_loaded,
        load_s=entry.load_s,
        stream_bytes=tuple((name, nbytes) for name, nbytes in carried.items() if name not in (SENT, RECEIVED)),
        sent_bytes=carried[SENT] if carried else None,
        received_bytes=carried[RECEIVED] if carried else None,
        lost=entry.losses,
        rejoined=entry.returns,
    )


def _facts(role: Role, number: int, entry: _Entry) -> NodeFacts:
    ready, traffic = entry.ready, entry.traffic
    worker = ready if isinstance(ready, WorkerReady) else None
    return NodeFacts(
        role=role,
        number=number,
        state="lost" if entry.lost else "ready",
        host=ready.host,
        pid=ready.pid,
        device=ready.device_name,
        device_bytes=(worker.device_bytes or None) if worker else None,
        scheme=ready.scheme if isinstance(ready, ShadowReady) else None,
        loader=worker.loader if worker else None,
        slots=worker.slots if worker else None,
        slot_bytes=worker.slot_bytes if worker else None,
        load_bytes_per_s=(worker.load_bytes_per_s or None) if worker else None,
        round_trip_s=entry.round_trip_s,
        loads=entry.loads if worker else None,
        sent_bytes=traffic.sent.count_of().nbytes if traffic else None,
        received_bytes=traffic.received.count_of().nbytes if traffic else None,
    )
