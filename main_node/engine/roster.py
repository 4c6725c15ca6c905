"""Facts about every node: what it reports of itself, what was measured, whether it is connected."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from wire.base import Role
from wire.messages import Align, Compute, Computed, Prediction, ShadowReady, WorkerReady
from wire.traffic import Traffic

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


class Roster:
    """Every node that ever joined, by role and number. Thread-safe; nothing here waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[Role, int], _Entry] = {}
        self._before: Counter[str] = Counter()  # carried by earlier streams

    def joined(
        self,
        role: Role,
        number: int,
        ready: WorkerReady | ShadowReady,
        round_trip_s: float | None,
        traffic: Traffic | None,
    ) -> None:
        """A node has joined, or joined again. `traffic`: of its stream, as the main node counts it."""
        with self._lock:
            before = self._entries.get((role, number))
            if before is not None:
                self._before.update(_carried(role, before.traffic))
            loads = before.loads if before else 0
            self._entries[role, number] = _Entry(ready, round_trip_s, traffic, loads=loads)

    def lost(self, role: Role, number: int) -> None:
        with self._lock:
            self._entries[role, number].lost = True

    def loaded(self, number: int) -> None:
        """A worker's load has ended."""
        with self._lock:
            entry = self._entries.get(("worker", number))
            if entry is not None:  # else its load has ended before it joined
                entry.loads += 1

    def facts(self) -> list[NodeFacts]:
        """Workers by number, then the shadow."""
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: (item[0][0] == "shadow", item[0][1]))
            return [_facts(role, number, entry) for (role, number), entry in entries]

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

    def carried(self) -> dict[str, int] | None:
        """Bytes so far of the messages that a token costs: embeddings to workers and back, with their headers,
        alignments to the shadow, predictions from it. None in one process."""
        with self._lock:
            if all(entry.traffic is None for entry in self._entries.values()):
                return None
            total = self._before.copy()
            for (role, _), entry in self._entries.items():
                total.update(_carried(role, entry.traffic))
        return {name: total[name] for name in ("to_workers", "from_workers", "to_shadow", "from_shadow")}


class Membership:
    """Losses and returns of nodes as lines of text, numbered from 1, for clients that watch their answers. Thread-safe;
    nothing here waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0

    def lost(self, name: str, why: str, workers: int) -> None:
        """`name`: of the node, as `worker 1` or `shadow`. `workers`: those that are left."""
        if name == "shadow":
            self._add(f"the shadow is lost, tokens take longer without its predictions: {why}")
        elif workers:
            self._add(f"{name} is lost, {workers} left: {why}")
        else:
            self._add(f"{name} is lost, none left; answers wait for one (--worker-wait): {why}")

    def returned(self, name: str) -> None:
        self._add(f"{'the ' * (name == 'shadow')}{name} is back")

    def _add(self, line: str) -> None:
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


def _carried(role: Role, traffic: Traffic | None) -> dict[str, int]:
    if traffic is None:
        return {}
    if role == "worker":
        return {
            "to_workers": traffic.sent.of(Compute).nbytes,
            "from_workers": traffic.received.of(Computed).nbytes,
        }
    return {"to_shadow": traffic.sent.of(Align).nbytes, "from_shadow": traffic.received.of(Prediction).nbytes}


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
        sent_bytes=traffic.sent.of().nbytes if traffic else None,
        received_bytes=traffic.received.of().nbytes if traffic else None,
    )
