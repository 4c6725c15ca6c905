"""The shadow's model where its later layers are in other processes: it is in the shadow node, and asks them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from checkpoint import family
from checkpoint.coroutine import in_coroutine, suspend
from checkpoint.devices.transfer import to_device, token_ids
from checkpoint.store import ExpertStore
from scheduler.errors import ModelMismatchError, ODMoEError
from shadow_node.model import Gate, ShadowModel
from shadow_node.stages.cache import DividedCache
from shadow_node.stages.division import RUNNING, Part, Running
from shadow_node.stages.remote import Connect, Entry, RemoteStage
from wire import runtime
from wire.messages import PROTOCOL_VERSION, Hello, StageReady


class FirstStage(ShadowModel):
    """`part.number` is 0. `connects`: to the other parts, in order; they may be replaced. `reach` connects."""

    def __init__(
        self, store: ExpertStore, scheme: str, device: str, part: Part, connects: Sequence[Connect] = ()
    ) -> None:
        super().__init__(store, scheme, device, part=part)
        self.connects = list(connects)
        self.on_part_lost: Any = lambda error: None
        """Called with the error when a connected part is lost."""
        manifest = store.manifest
        self._hello = Hello(
            PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "the shadow", session=secrets.token_hex(16)
        )
        self.stages = [
            RemoteStage(number, self.limits, lambda error: self.on_part_lost(error))
            for number in range(1, len(part.rooms))
        ]
        self._requests = count(1)
        self._reaching = runtime.Lock()

    def reach(self) -> None:
        """Raises ODMoEError: a part is out of reach, or not of this model."""
        with self._reaching:  # two streams of a main node may say Hello at the same time
            for number, (stage, connect) in enumerate(zip(self.stages, self.connects, strict=True), 1):
                ready = stage.reach(connect, self._hello)
                try:
                    self._check(number, ready)
                except ODMoEError:
                    stage.close()
                    raise

    def _check(self, number: int, ready: StageReady) -> None:
        """Raises ModelMismatchError."""
        ends = [*self.division.starts, self.division.depth]
        theirs = ready.scheme, f"layers {ready.first} to {ready.stop - 1}", _kind(ready.device)
        wanted = self.scheme, f"layers {ends[number]} to {ends[number + 1] - 1}", _kind(self.device)
        if theirs != wanted:
            raise ModelMismatchError(
                f"part {number} of the shadow at {ready.host} has {', '.join(theirs)}; the shadow wants "
                f"{', '.join(wanted)}: give all its hosts the same settings and one kind of --shadow-device, such as "
                "cpu, and start them again"
            )

    def new_cache(self) -> DividedCache:
        here = family.new_cache(self.dense.config)
        return DividedCache(here, self.division.stop, next(self._requests), self.stages)

    @property
    def device_bytes(self) -> int:
        """Of all parts."""
        return super().device_bytes + sum(stage.ready.device_bytes for stage in self.stages if stage.ready)

    @property
    def remote_cache_bytes(self) -> int:  # type: ignore[override]
        return sum(stage.cache_bytes for stage in self.stages)

    def _forward(self, tokens: list[int], cache: DividedCache) -> int:
        chosen: list[int] = []
        began = runtime.monotonic()

        def elsewhere(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            """Each later part runs at the first of its layers, on what the one before has returned."""
            if layer not in self.division.starts:
                return hidden
            stage = self.stages[self.division.starts.index(layer) - 1]
            own_s = runtime.monotonic() - began
            found = stage.run(Entry(cache.request, tokens, hidden, cache.marks, own_s), self._on_gate)
            if isinstance(found, int):
                chosen.append(found)
                return hidden
            return to_device(hidden.device, found)[0]

        running = RUNNING.set(Running(cache.here, elsewhere))
        try:
            ids = token_ids(tokens, self._placed.devices[0])
            self.dense(input_ids=ids, past_key_values=cache.here, use_cache=True, logits_to_keep=1)
        finally:
            RUNNING.reset(running)
        return chosen[0]

    def _on_gate(self, layer: int, experts: tuple[int, ...], scores: tuple[float, ...]) -> None:
        """A gate has fired in another part, which computes its experts, too."""
        if in_coroutine():
            none = torch.empty(0)
            suspend(Gate(layer, none, torch.tensor([experts]), none, list(scores)))
        elif self.on_routed is not None:
            self.on_routed(layer, list(experts), list(scores))

    def experts_of(self, gates: Sequence[Gate]) -> list[torch.Tensor]:
        if gates[0].layer not in self.experts:
            return [gate.hidden for gate in gates]
        return super().experts_of(gates)


def _kind(device: str) -> str:
    """The dtype of hidden states, and the last bits of products, depend on it."""
    return device.partition(",")[0].partition(":")[0]
