"""Models and machines of home set-ups, as a plan takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from odmoe.api.plan_model import model_of
from odmoe.settings.machine_texts import parse_machines
from scheduler.planning.machine_plan import Home, MachineAdvice, advise
from scheduler.timing.profile import find_profile
from scheduler.types import ModelSize
from support.paths import CONFIGS

BASE = find_profile("pc-nvme-2.5gbe")


def model(name: str, dtype: str = "bfloat16", experts: str | None = None, **fields: Any) -> ModelSize:
    """A published configuration, with other `fields`."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | fields
    return model_of(name, config, dtype, 4096, experts, dense="int4" if experts == "int4" else None)


def glm_5() -> ModelSize:
    """GLM-5.2's shape (744 billion parameters) in int4, by hand: 78 layers, of which 3 are dense, 6144 wide, 256
    experts of 2048 and a shared one, top-8; latent attention of 64 heads."""
    hidden, expert, vocabulary = 6144, 3 * 6144 * 2048, 154880 * 6144
    latent = 2048 * (hidden + 64 * 256) + hidden * 576 + 512 * 64 * 448 + 64 * 256 * hidden
    linear = 78 * latent + 75 * expert + 3 * 3 * hidden * 12288
    read = linear + 75 * 256 * hidden + vocabulary
    return ModelSize(
        "GLM-5.2's shape",
        dtype="bfloat16",
        item_bytes=2,
        depth=78,
        layers=75,
        experts=256,
        top_k=8,
        hidden=hidden,
        expert=expert,
        experts_all=75 * 256 * expert,
        dense=read + vocabulary,
        read=read,
        linear=linear,
        cache_token=78 * 576,
        cache=4096 * 78 * 576,
        context=4096,
        context_max=200_000,
        native_bits=4.5,
        dense_saved=int((linear + vocabulary) * (2 - 4.5 / 8)),
    )


def home(size: ModelSize, *machines: str) -> Home:
    return Home(BASE, size, parse_machines(machines, BASE))


def advice_on(size: ModelSize, *machines: str) -> MachineAdvice:
    return advise(home(size, *machines))


def with_links(of: Home, bits_per_s: float) -> Home:
    return replace(of, machines=tuple(replace(one, link=bits_per_s) for one in of.machines))
