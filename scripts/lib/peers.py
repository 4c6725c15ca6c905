"""Engines that nobody here wrote: Transformers with every expert in memory, and accelerate's disk offload.

accelerate keeps experts on disk and reads a layer's, all of them, when its turn comes: a module is the least that it
moves. It maps files, so what is read once stays in the kernel's page cache as far as memory suffices; a model that is
larger than memory has no such luck. `cold` drops those files' pages after each token, outside the time measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint.family import experts_modules, parse_dtype
from odmoe.commands.shared.whole_model import load_whole
from scripts.lib.disk import disk_bytes

TRANSFORMERS, OFFLOADED, COLD = "Transformers", "accelerate", "accelerate, cold"
NAMES = (TRANSFORMERS, OFFLOADED, COLD)
DENSE = "dense.safetensors"
"""The weights of an offloaded model that stay in memory."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One greedy answer. Times in seconds. `device_bytes`: weights that were in memory at once, at most, and the KV
    cache. `read_bytes`: what the kernel fetched from disks for this process."""

    token_ids: list[int]
    ttft_s: float
    decode_s: float
    device_bytes: int
    read_bytes: int

    @property
    def decode_tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / (self.ttft_s + self.decode_s)


@dataclass
class Peer:
    """A model of Transformers, and where its experts lie if not in memory. `cold`: they are read from the disk."""

    model: Any
    folder: Path | None = None
    cold: bool = False
    weight_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.model.eval()
        self.weight_bytes = self._most_weight_bytes()

    def answer(self, prompt: list[int], tokens: int) -> Timed:
        """By Transformers' own `generate`; end of sequence is not heeded."""
        clock = Clock(self._forget if self.cold else lambda: None)
        ids = torch.tensor([prompt])
        before = disk_bytes()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
                return_dict_in_generate=True,
            )
        cache = sum(t.nbytes for layer in out.past_key_values.layers for t in (layer.keys, layer.values))
        start, first, last = clock.times[0], clock.times[1], clock.times[-1]
        found = out.sequences[0, len(prompt) :].tolist()
        return Timed(found, first - start, last - first, self.weight_bytes + cache, disk_bytes() - before)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] float32 of one forward pass without a cache."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    def _forget(self) -> None:
        """Drop the experts' pages, so that the next pass reads the disk."""
        for path in sorted(self.folder.iterdir()) if self.folder else ():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _most_weight_bytes(self) -> int:
        """The tensors that are not on the meta device, when an offloaded module has computed and still has its own."""
        seen = [held_bytes(self.model)]
        if self.folder is not None:
            with watched(lambda: seen.append(held_bytes(self.model))):
                self.logits([0])
        return max(seen)


class Clock:
    """A streamer of `generate`: when the prompt was taken, then when each token came, without the time of `between`."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._between = between
        self._out_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        self.times.append(now - self._out_s)
        self._between()
        self._out_s += time.perf_counter() - now

    def end(self) -> None:
        pass


def make_peer(name: str, model: str, dtype: str, make_folder: Callable[[], Path] | None = None) -> Peer:
    """One of `NAMES`. `make_folder`: called for those that keep experts on the disk."""
    if name == TRANSFORMERS or make_folder is None:
        return transformers_peer(model, dtype)
    return accelerate_peer(model, dtype, make_folder(), cold=name == COLD)


def transformers_peer(model: str, dtype: str) -> Peer:
    """Every expert in memory, `eager`."""
    return Peer(load_whole(Path(model), dtype))


def accelerate_peer(model: str, dtype: str, folder: Path, cold: bool) -> Peer:
    """Experts in files beneath `folder`, the rest in memory; dispatched by accelerate's hooks."""
    return Peer(_offload(model, dtype, folder), folder, cold)


def _offload(model: str, dtype: str, folder: Path) -> Any:
    """Transformers writes the experts into `folder`, whatever is there."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    where = offloading(shapes(model))
    peer = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, device_map=where, offload_folder=str(folder), experts_implementation="eager"
    )
    for path in folder.iterdir():  # a page that is not yet on the disk cannot be dropped
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return peer


def prepare_offload(model: str, dtype: str, folder: Path) -> None:
    """A folder for `offloaded_model`, written unless it is there already: the experts, and beside them the weights that
    stay in memory."""
    from safetensors.torch import save_file

    if (folder / DENSE).is_file():
        return
    peer = _offload(model, dtype, folder)
    held = {name: weight for name, weight in peer.state_dict().items() if not weight.is_meta}
    partial = folder / f".{DENSE}.partial"
    save_file(held, partial)
    os.replace(partial, folder / DENSE)


def offloaded_model(model: str, dtype: str, folder: Path) -> Any:
    """The model of `accelerate_peer` from a folder of `prepare_offload`. It reads no expert and writes nothing, so it
    starts in little memory, which `from_pretrained` does not: that converts all experts each time."""
    from accelerate import dispatch_model, init_empty_weights
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        peer = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=parse_dtype(dtype), experts_implementation="eager"
        )
    peer.load_state_dict(load_file(folder / DENSE), assign=True, strict=False)
    index = {
        path.stem: {"safetensors_file": str(path), "weight_name": path.stem, "dtype": dtype}
        for path in folder.glob("*.safetensors")
        if path.name != DENSE
    }
    dispatch_model(peer, offloading(peer), offload_dir=str(folder), offload_index=index)
    return peer.eval()


def shapes(model: str) -> Any:
    """The whole model, without its weights' bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))


def whole_bytes(model: str, dtype: str) -> int:
    """Its weights, tied ones once, with every expert in memory."""
    return sum(one.numel() for one in shapes(model).parameters()) * parse_dtype(dtype).itemsize


def offloading(model: torch.nn.Module) -> dict[str, str]:
    """accelerate's device map: the experts modules on `disk`, every other module on `cpu`."""
    experts = {name for name, _ in experts_modules(model).values()}
    found: dict[str, str] = {}

    def visit(module: torch.nn.Module, name: str) -> None:
        if name in experts:
            found[name] = "disk"
        elif not any(one.startswith(f"{name}." if name else "") for one in experts):
            found[name] = "cpu"
        else:
            for own, _ in module.named_parameters(recurse=False):
                found[f"{name}.{own}" if name else own] = "cpu"
            for child, inner in module.named_children():
                visit(inner, f"{name}.{child}" if name else child)

    visit(model, "")
    return found


def held_bytes(model: torch.nn.Module) -> int:
    """Weights and buffers that hold memory, those that share it once."""
    held = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())


@contextlib.contextmanager
def watched(look: Callable[[], None]) -> Iterator[None]:
    """`look` is called before accelerate takes a module's weights out of memory again."""
    from accelerate.hooks import AlignDevicesHook

    before = AlignDevicesHook.post_forward

    def post_forward(self: Any, module: Any, output: Any) -> Any:
        if self.offload:
            look()
        return before(self, module, output)

    AlignDevicesHook.post_forward = post_forward
    try:
        yield
    finally:
        AlignDevicesHook.post_forward = before
