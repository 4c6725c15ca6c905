"""The shadow's quantised model, dense part and all experts, which reports its routing layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint import family
from checkpoint.coroutine import Coroutine, in_coroutine, suspend
from checkpoint.dense import dispatch_experts, load_dense
from checkpoint.devices.inference import inference
from checkpoint.devices.streams import new_stream
from checkpoint.devices.transfer import to_host, token_ids
from checkpoint.generation.rotary import Rotary
from checkpoint.native.parameters import ExpertParameters
from checkpoint.prefix_cache import PrefixCache
from checkpoint.sizes.message_limits import message_limits
from checkpoint.store import ExpertStore
from checkpoint.tensors import return_freed_memory
from scheduler.errors import LaunchError, NotHeldError
from shadow_node.layer_devices import LayerDevices
from shadow_node.prompt_reading import kept_prompts
from shadow_node.quantise import ShadowExperts, check_scheme, compute_dtype, module_bytes, quantise_model
from shadow_node.stages.division import WHOLE, Division, Part

FREED_BYTES = 64 << 20
"""Of experts in full precision, after which freed memory is returned to the kernel."""
Routed = Callable[[int, list[int], list[float]], None]
"""(layer, experts best first, their weights): called the moment a gate has fired, before its experts are computed."""


class Gate(NamedTuple):
    """A pass in lock-step stops here: the gate of a layer has fired, and its experts are not computed yet."""

    layer: int
    hidden: torch.Tensor
    """[T, H]"""
    chosen: torch.Tensor
    """[T, k], each row's experts, best first. On the host."""
    weights: torch.Tensor
    """[T, k]"""
    scores: list[float]
    """The weights of the last row's experts."""

    @property
    def experts(self) -> list[int]:
        """Of the last row."""
        return self.chosen[-1].tolist()  # type: ignore[no-any-return]


class ShadowModel:
    """`scheme`: see `shadow_node.quantise`. While quantising, one expert at a time is in memory at full precision.

    `device`: one, or several of a kind (`cuda:0,cuda:1`) over which its layers are cut. `part`: which of its layers are
    in this process, see `shadow_node.stages`. Raises LaunchError where they have no room for it, NotHeldError for a
    part of a store.
    """

    remote_cache_bytes = 0
    """Of caches in other processes."""

    def __init__(
        self,
        store: ExpertStore,
        scheme: str,
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
        part: Part | None = None,
    ) -> None:
        check_scheme(scheme)
        if store.held is not None:
            raise NotHeldError(
                f"the shadow needs all experts, and {store.path} holds {len(store.held)} of them; give its host the "
                "whole store"
            )
        self.scheme = scheme
        self.limits = message_limits(store)
        self.device = device
        self.on_routed: Routed | None = None
        devices = [torch.device(name) for name in device.split(",")]
        self.layers = len(store.manifest.layers)
        """Its MoE layers, in whatever process."""
        elements, config, dtype = _expert_elements(store), store.manifest.config, compute_dtype(scheme, devices[0])
        self.division = Division(part or WHOLE, scheme, elements)
        self.dense = load_dense(store.dense, config, dtype, alter=self.division.divide)
        self.division.close_ends(self.dense)
        own = family.experts_modules(self.dense)
        self._placed = LayerDevices(self.dense, devices, scheme, {layer: elements[layer] for layer in own})
        self.experts: dict[int, ShadowExperts] = {}
        try:
            self._quantise(store, progress)
        except torch.OutOfMemoryError as error:
            done = f"{len(self.experts)} of {len(own)} layers"
            raise LaunchError(
                f"{device} has no room for the shadow in {scheme}, {done} were made ({error}); give another "
                "--shadow-device, such as cpu, or a smaller --shadow"
            ) from error
        self._rotary = Rotary(self.dense)
        dispatch_experts(self.dense, self._experts_of)
        self.streams = [stream for stream in map(new_stream, devices) if stream is not None]
        """Its own, so that a main model on the same devices need not wait for it, nor it for that."""
        for stream in self.streams:
            torch.accelerator.synchronize(stream.device)  # the weights were made on another one

    def _quantise(self, store: ExpertStore, progress: Callable[[int, int], None] | None) -> None:
        quantise_model(self.dense, self.scheme, self._placed.of)
        return_freed_memory()
        modules = family.experts_modules(self.dense)
        for done, (layer, (name, module)) in enumerate(modules.items()):
            experts = ShadowExperts(module, self.scheme, self._placed.of(name))
            self.experts[layer] = self._quantise_layer(store, layer, experts)
            if progress:
                progress(done + 1, len(modules))

    def _quantise_layer(self, store: ExpertStore, layer: int, experts: ShadowExperts) -> ShadowExperts:
        spec = store.manifest.layers[layer]
        parameters = ExpertParameters(store.manifest, threads=torch.get_num_threads())
        freed = 0
        with (store.path / spec.file).open("rb") as stream:
            for number, blob in enumerate(spec.blobs):
                stream.seek(blob.offset)
                buffer = torch.frombuffer(bytearray(stream.read(blob.length)), dtype=torch.uint8)
                experts.add(number, parameters.of(buffer, layer))
                freed += blob.length
                if freed > FREED_BYTES:
                    return_freed_memory()  # else as much as all experts in full precision stays with the process
                    freed = 0
        return_freed_memory()
        return experts

    def _experts_of(self, layer: int) -> Callable[..., torch.Tensor]:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            chosen, last = to_host(index, weights[-1])  # on an accelerator the layer's only wait
            if in_coroutine():
                output: torch.Tensor = suspend(Gate(layer, hidden, chosen, weights, last.tolist()))
                return output
            if self.on_routed is not None:
                self.on_routed(layer, chosen[-1].tolist(), last.tolist())
            return self.experts[layer].forward(hidden, chosen, weights)

        return experts

    def kept_prompts(self, most_bytes: int) -> PrefixCache | None:
        """For the KV caches of its prompts. None: nothing is kept of them."""
        return kept_prompts(self.dense, self._rotary, self.device, most_bytes)

    def new_cache(self) -> Any:
        return family.new_cache(self.dense.config)

    def forward(self, tokens: list[int], cache: Any) -> int:
        """Run one pass, which adds `len(tokens)` positions to the cache. Returns the greedy next token."""
        with inference():
            return self._forward(tokens, cache)

    def lock_step(self, tokens: list[int], cache: Any) -> Coroutine[int]:
        """As `forward`, but stops at each gate: `resume` returns a `Gate`, and takes the output of its experts, see
        `experts_of`. Run it in inference mode."""
        return Coroutine(lambda: self._forward(tokens, cache))

    def experts_of(self, gates: Sequence[Gate]) -> list[torch.Tensor]:
        """The experts' outputs of several passes at the same layer, their rows multiplied together."""
        experts = self.experts[gates[0].layer]
        if len(gates) == 1:
            return [experts.forward(gates[0].hidden, gates[0].chosen, gates[0].weights)]
        hidden, chosen = torch.cat([gate.hidden for gate in gates]), torch.cat([gate.chosen for gate in gates])
        output = experts.forward(hidden, chosen, torch.cat([gate.weights for gate in gates]))
        return list(output.split([len(gate.hidden) for gate in gates]))

    def _forward(self, tokens: list[int], cache: Any) -> int:
        ids = token_ids(tokens, self._placed.devices[0])
        out = self.dense(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(to_host(out.logits[0, -1].float().argmax())[0])

    def reach(self) -> None:
        """A main node has come: see that all processes that share the layers are there. Raises ODMoEError."""

    @property
    def device_bytes(self) -> int:
        """Bytes of all weights, from the tensors."""
        return module_bytes([self.dense, *self.experts.values()])


def _expert_elements(store: ExpertStore) -> dict[int, int]:
    """Of all experts of each layer."""
    manifest = store.manifest
    return {
        layer: len(spec.blobs) * sum(math.prod(tensor.shape) for tensor in manifest.restored_layout(layer).tensors)
        for layer, spec in manifest.layers.items()
    }
