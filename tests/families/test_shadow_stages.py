"""A shadow of every family whose layers are divided over nodes predicts what a whole one predicts: in passes alone and
in lock-step, after the way back, and after alignments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from checkpoint import kv
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
    whole = ShadowModel(tiny.store, "fp16")
    assert divided.experts.keys() < whole.experts.keys()
    aligned = other_rows(whole, tiny.prompt)
    assert alone(divided, tiny.prompt, aligned) == alone(whole, tiny.prompt, aligned)
    of_prompt = prompt_parts(whole, tiny.prompt)
    assert from_prompt(divided, tiny.prompt, of_prompt) == from_prompt(whole, tiny.prompt, of_prompt)
    assert together(divided, tiny.prompt) == together(whole, tiny.prompt)


def other_rows(model: ShadowModel, prompt: list[int]) -> list[list[torch.Tensor]]:
    """The KV rows and states of an answer to another prompt: after it, and after each of its tokens."""
    cache, end, found = model.new_cache(), len(prompt), []
    for start, tokens in ((0, prompt[::-1]), (end, [33]), (end + 1, [7])):
        model.forward(tokens, cache)
        found.append([tensor.clone() for tensor in kv.take(cache, start, start + len(tokens)).tensors])
    return found


def alone(model: ShadowModel, prompt: list[int], aligned: list[list[torch.Tensor]]) -> list[Any]:
    """The experts and weights at each gate and each pass's token: of a prompt, of passes ahead, of those after the way
    back, and of those after alignments, which go on from another model's rows."""
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
        end = len(prompt) + 1
        found.append(kept.put(end, aligned[2]))
        found.append(model.forward([5], cache))
        if not kept.has_states(aligned[1]):
            found.append(kept.take_over(end - 1, aligned[1]))
            found.append(model.forward([6], cache))
    kept.close()
    model.on_routed = None
    return found


def prompt_parts(model: ShadowModel, prompt: list[int]) -> list[tuple[int, list[torch.Tensor]]]:
    """The KV rows and states of another prompt, as the alignment of a prompt: windows begin in its middle."""
    cache = model.new_cache()
    model.forward(prompt[::-1], cache)
    row_bytes = kv.cache_bytes(cache) // len(prompt)
    return list(kv.take(cache, 0, len(prompt)).parts(5 * row_bytes))


def from_prompt(model: ShadowModel, prompt: list[int], parts: list[tuple[int, list[torch.Tensor]]]) -> list[Any]:
    """The experts and weights of a pass after the alignment of a whole prompt, and after the same was taken over."""
    found: list[Any] = []
    cache = model.new_cache()
    kept = request_cache(cache)
    model.forward(prompt, cache)
    found += [kept.put(start, tensors) for start, tensors in parts]
    model.on_routed = lambda *gate: found.append(gate)
    found.append(model.forward([5], cache))
    if not any(kept.has_states(tensors) for _, tensors in parts):
        found += [kept.take_over(start, tensors) for start, tensors in parts]
        found.append(model.forward([6], cache))
    kept.close()
    model.on_routed = None
    return found


def together(model: ShadowModel, prompt: list[int]) -> list[Any]:
    """As `alone`, of two prompts whose passes stop at each gate and take turns."""
    caches = [model.new_cache() for _ in range(2)]
    found: list[Any] = []
    with torch.inference_mode():
        for tokens in ([prompt, prompt[:5]], [[12], [40]]):
            runs = [model.lock_step(*one) for one in zip(tokens, caches, strict=True)]
            outputs: list[Any] = [None, None]
            while not all(run.ended for run in runs):
                for number, run in enumerate(runs):
                    if not run.ended and (gate := run.resume(outputs[number])) is not None:
                        found.append((number, gate.layer, gate.experts, gate.scores))
                        (outputs[number],) = model.experts_of([gate])
            found += [run.result for run in runs]
    for cache in caches:
        request_cache(cache).close()
    return found
