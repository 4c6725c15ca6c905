"""How fast this machine's processor computes what nodes compute, at the widths of Qwen3-30B-A3B in bfloat16, and the
profile that follows from all measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from checkpoint.kernels import FAST
from scheduler.timing.profile import find_profile, load_profile

HIDDEN, INNER, TOP_K = 2048, 768, 8
SECONDS, LEAST = 1.0, 5
"""No measurement begins after so many seconds, once there are so many."""
_LAYERS, _EXPERTS, _ROWS = 4, 16, 17
"""Layers and experts larger than a processor's cache together; rows of a pass of several."""
_READ = 1 << 28
_SIZES = "pc-nvme-2.5gbe"
"""The shipped profile of the same model."""
_NO_LINK = 1e9
"""Bits a second that a profile has if only loopback was measured."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Seconds; `extra`: of each further row. `bytes_per_s`: read from memory in a product of one row."""

    bytes_per_s: float
    layer_s: float
    layer_extra_s: float
    expert_s: float
    expert_extra_s: float


def measure_processor(step: Callable[[int, int], None]) -> Processor:
    """The least times, with torch's threads as they are and the products of `--kernel fast`. A layer is Transformers'
    own, without experts."""
    wide = torch.ones(_READ // 4 // 8192, 8192)
    row = torch.ones(1, 8192)
    with torch.inference_mode():
        read_s = _least(lambda: row @ wide.T)
        step(1, 5)
        layers = [_layers_s(rows) for rows in (1, _ROWS)]
        step(3, 5)
        experts = [_experts_s(rows) for rows in (1, _ROWS)]
        step(5, 5)
    extra = [max(0.0, (many - one) / (_ROWS - 1)) for one, many in (layers, experts)]
    return Processor(_READ / read_s, layers[0], extra[0], experts[0], extra[1])


def _layers_s(rows: int) -> float:
    """Of one layer: attention, norms and a gate, after as many tokens as a short prompt has."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=128,  # as many weights as the gate has, but for a factor of three
        num_hidden_layers=_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        dtype="bfloat16",
    )
    model = Qwen3Model(config).to(torch.bfloat16).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = FAST.bind(layer.weight)  # type: ignore[method-assign, assignment]
    ids = torch.ones(1, rows, dtype=torch.long)
    return _least(lambda: model(ids, use_cache=True)) / _LAYERS


def _experts_s(rows: int) -> float:
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    made = [[FAST.bind(torch.ones(*shape, dtype=torch.bfloat16)) for shape in shapes] for _ in range(_EXPERTS)]
    given = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)

    def compute() -> None:
        for up, down in made:
            gate, value = up(given).chunk(2, dim=-1)
            down(torch.nn.functional.silu(gate).mul(value))

    return _least(compute) / _EXPERTS


def _least(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < LEAST or time.perf_counter() - began < SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def write_profile(file: Path, host: str, found: Processor, load_rate: float, link: tuple[float, float | None]) -> None:
    """`load_rate`: bytes a second of loads. `link`: seconds one way of a row, and bits a second or None if no network
    was measured. Raises OSError, or ConfigError for figures that no profile can have."""
    sizes = find_profile(_SIZES)
    expert_bytes, parameters, layer_bytes, shadow_bytes = sizes.model_sizes or (0, 0, 0, 0)
    hop_s, bits = link
    shadow_s = found.layer_s + TOP_K * found.expert_s / 2
    fields = {
        "name": file.stem,
        "model": {
            "layers": sizes.layers,
            "experts": sizes.experts,
            "top_k": sizes.top_k,
            "hidden_bytes": sizes.hidden_bytes,
            "kv_bytes_per_token_layer": sizes.kv_bytes,
            "expert_parameters": parameters,
            "expert_bytes": expert_bytes,
            "main_layer_bytes": layer_bytes,
            "shadow_layer_bytes": shadow_bytes,
        },
        "cluster": {"workers": sizes.workers, "group_size": sizes.group_size},
        "devices": {f"{role}_bytes_per_s": round(found.bytes_per_s) for role in ("main", "worker", "shadow")},
        "main_layer_ms": _ms(found.layer_s),
        "main_layer_ms_per_extra_token": _ms(found.layer_extra_s),
        "expert_ms": _ms(found.expert_s),
        "expert_ms_per_extra_token": _ms(found.expert_extra_s),
        "load_ms": _ms(expert_bytes / load_rate),
        "hop_ms": _ms(hop_s),
        "link_bits_per_s": round(bits or _NO_LINK),
        "shadow_layer_ms": _ms(shadow_s),
        "shadow_layer_ms_per_extra_token": _ms(found.expert_s / 2),
    }
    network = "" if bits else " The link was not measured: 1 Gbit/s is assumed, with a hop of loopback."
    about = (
        f"# Measured by odmoe bench on {host}, with --kernel fast at the widths of Qwen3-30B-A3B in bfloat16.\n"
        f"# The shadow's times are derived: a layer, and half of eight experts.{network}\n"
    )
    file.write_text(about + yaml.safe_dump(fields, sort_keys=False), "utf-8")
    load_profile(file)


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")
