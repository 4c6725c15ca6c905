"""How long a worker's work takes: its real time, or at least a profile's."""

from __future__ import annotations

from typing import Protocol

from scheduler.emulation.clock import Cancellation, Emulation, SerialResource
from wire import runtime


class Pace(Protocol):
    """Times are seconds on one clock. Loads begin and end on one thread, computations on another, or the same."""

    @property
    def is_emulated(self) -> bool:
        """Whether times are a profile's."""

    @property
    def costs(self) -> tuple[float, float] | None:
        """Seconds that a computation takes by a profile, a call and a row. None: measure them."""

    @property
    def restore_s(self) -> float:
        """Seconds that restoring an expert takes by a profile, beside a computation's."""

    def now(self) -> float:
        """This thread's time."""

    def begin_load(self, at: float) -> float:
        """Begin a load that was ready at `at`. Returns its start."""

    def end_load(self, cancelled: Cancellation, share: float = 1.0, in_memory: bool = True) -> float:
        """The bytes have moved, or the load was cancelled. Returns its end.

        `share`: the bytes of its form over those of the full form. `in_memory`: its bytes were there,
        in host memory, not on disk.
        """

    def begin_compute(self, at: float) -> float:
        """Begin a computation that was ready at `at`. Returns its start."""

    def end_compute(self, rows: int, restored: bool = False) -> float:
        """The output of `rows` rows is there. Returns its end.

        `restored`: the expert was restored from a smaller form before.
        """


class RealPace:
    """Real time."""

    is_emulated = False
    costs: tuple[float, float] | None = None
    restore_s = 0.0

    def now(self) -> float:
        return runtime.monotonic()

    def begin_load(self, at: float) -> float:
        return runtime.monotonic()

    def end_load(self, cancelled: Cancellation, share: float = 1.0, in_memory: bool = True) -> float:
        return runtime.monotonic()

    def begin_compute(self, at: float) -> float:
        return runtime.monotonic()

    def end_compute(self, rows: int, restored: bool = False) -> float:
        return runtime.monotonic()


class WorkerPace:
    """A profile's times. A load lasts at least `load_s`, in a smaller form as much less as its bytes are fewer; a
    computation lasts at least `compute_s`, and `restore_s` more where its expert is restored first. A cancelled load
    ends with its piece under way (`Profile.ended_load_s`).

    `host`: the node is the host's processor beside the device, and a computation lasts `host_compute_s`. Raises
    ConfigError where the profile has no such times.
    """

    is_emulated = True

    def __init__(self, emulation: Emulation, host: bool = False) -> None:
        profile = emulation.profile
        self.costs: tuple[float, float] | None = profile.host_costs if host else profile.device_costs
        self.restore_s = profile.restore_s
        self._emulation = emulation
        self._host = host
        self._link, self._processor = SerialResource(emulation), SerialResource(emulation)

    def now(self) -> float:
        return self._emulation.now()

    def begin_load(self, at: float) -> float:
        return self._link.begin(at)

    def end_load(self, cancelled: Cancellation, share: float = 1.0, in_memory: bool = True) -> float:
        profile = self._emulation.profile
        lasts_s = profile.lasting_load_s(in_memory, share)
        return self._link.wait(lasts_s, cancelled, lambda after_s: profile.ended_load_s(after_s, share, in_memory))

    def begin_compute(self, at: float) -> float:
        return self._processor.begin(at)

    def end_compute(self, rows: int, restored: bool = False) -> float:
        profile = self._emulation.profile
        lasts_s = profile.host_compute_s(rows) if self._host else profile.compute_s(rows)
        return self._processor.end(lasts_s + profile.restore_s * restored)
