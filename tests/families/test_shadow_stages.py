"""A shadow of every family whose layers are divided over nodes predicts what a whole one predicts, and goes back in the
same way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from scheduler.errors import LaunchError, ODMoEError, UnsupportedFamilyError
from shadow_node.cache import request_cache
from shadow_node.model import ShadowModel
from shadow_node.stages.division import CARRYING, Part
from shadow_node.stages.first import FirstStage
from shadow_node.stages.later import LaterStage
from shadow_node.stages.node import Stage
from wire.inprocess import connect

AHEAD = [[12], [40]]
ONE_MOE_LAYER = {"beam"}


def predictions(model: ShadowModel, prompt: list[int]) -> list[Any]:
    """The experts and weights at each gate and each pass's token, of a prompt, of passes ahead, and of those after the
    way back."""
    found: list[Any] = []
    model.on_routed = lambda *gate: found.append(gate)
    cache = model.new_cache()
    kept = request_cache(cache)
    with torch.inference_mode():
        found.append(model.forward(prompt, cache))
        before = kept.mark()
        found += [model.forward(tokens, cache) for tokens in AHEAD]
        kept.go_to(before)
        found += [model.forward(tokens, cache) for tokens in reversed(AHEAD)]
    kept.close()
    return found


@pytest.fixture
def divided(tiny: Any) -> Iterator[FirstStage | ODMoEError]:
    """Over two nodes of this process, or why it is not."""
    rooms, manifest = (1, 1), tiny.store.manifest
    try:
        later = LaterStage(tiny.store, "fp16", part=Part(1, rooms))
    except (UnsupportedFamilyError, LaunchError) as error:
        yield error
        return
    stage = Stage("stage", later, manifest.model_digest, manifest.dtype)
    first = FirstStage(tiny.store, "fp16", "cpu", Part(0, rooms), [partial(connect, stage)])
    first.reach()
    yield first
    stage.close()


def test_two_nodes_predict_as_one(tiny: Any, divided: FirstStage | ODMoEError) -> None:
    if isinstance(divided, ODMoEError):
        assert tiny.model.config.get_text_config().model_type in CARRYING | ONE_MOE_LAYER, divided
        assert "give --shadow-hosts 1" in str(divided) or "fewer --shadow-hosts" in str(divided)
        return
    wanted = predictions(ShadowModel(tiny.store, "fp16"), tiny.prompt)
    assert predictions(divided, tiny.prompt) == wanted
    assert divided.experts.keys() < tiny.store.manifest.layers.keys()
