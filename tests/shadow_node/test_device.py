"""The shadow on an accelerator: what it predicts, and what crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint import kv
from checkpoint.devices.transfer import to_device
from checkpoint.store import ExpertStore
from scheduler.errors import LaunchError
from shadow_node.model import ShadowModel
from shadow_node.quantise import ShadowExperts
from support.devices.counted_device import Crossings, counted_device

LAYERS = 8
PROMPT = [5, 9, 22, 7, 33]


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[torch.device, Crossings]]:
    with counted_device() as found:
        yield found


@pytest.fixture(scope="module")
def there(counted: tuple[torch.device, Crossings], demo_store: Callable[[str], ExpertStore]) -> ShadowModel:
    return ShadowModel(demo_store("float32"), "fp16", str(counted[0]))


@pytest.fixture(scope="module")
def here(counted: tuple[torch.device, Crossings], demo_store: Callable[[str], ExpertStore]) -> ShadowModel:
    """On the processor, with weights, hidden states and arithmetic as on an accelerator: float16."""
    patch = pytest.MonkeyPatch()
    patch.setattr("shadow_node.model.compute_dtype", lambda scheme, device: torch.float16)
    try:
        return ShadowModel(demo_store("float32"), "fp16")
    finally:
        patch.undo()


def routes(model: ShadowModel, tokens: list[list[int]]) -> tuple[list[Any], list[int], Any]:
    """The experts of each gate, the next token of each pass, and the cache."""
    found: list[Any] = []
    model.on_routed = lambda layer, experts, scores: found.append((layer, experts))
    cache = model.new_cache()
    following = [model.forward(some, cache) for some in tokens]
    model.on_routed = None
    return found, following, cache


def test_it_predicts_as_on_the_processor(here: ShadowModel, there: ShadowModel) -> None:
    passes = [PROMPT, [12], [40]]
    assert routes(there, passes)[:2] == routes(here, passes)[:2]


@pytest.mark.parametrize("tokens", [PROMPT, [12]])
def test_a_pass_waits_once_a_layer_and_once_for_its_token(
    there: ShadowModel, counted: tuple[torch.device, Crossings], tokens: list[int]
) -> None:
    counted[1].clear()
    routes(there, [tokens])
    numbers = LAYERS if len(tokens) > 1 else 0  # of each expert's rows, in one copy
    assert counted[1].by_asker() == Counter({"transfer.py:to_host": LAYERS + 1, "transfer.py:to_device": 1 + numbers})


def test_passes_in_lock_step_do_the_same(there: ShadowModel, counted: tuple[torch.device, Crossings]) -> None:
    alone = [routes(there, [[token]])[1] for token in (12, 40)]
    counted[1].clear()
    with torch.inference_mode():
        runs = [there.lock_step([token], there.new_cache()) for token in (12, 40)]
        gates = [run.resume(None) for run in runs]
        while not all(run.ended for run in runs):
            outputs = there.experts_of([gate for gate in gates if gate is not None])
            gates = [run.resume(output) for run, output in zip(runs, outputs, strict=True)]
    assert [[run.result] for run in runs] == alone
    assert counted[1].by_asker()["transfer.py:to_host"] == 2 * (LAYERS + 1)


@pytest.mark.parametrize("room", [0, 3])
def test_a_device_without_room_is_named_with_what_helps(
    counted: tuple[torch.device, Crossings],
    demo_store: Callable[[str], ExpertStore],
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`room`: layers whose experts fit."""
    add, experts = ShadowExperts.add, 8

    def full(self: ShadowExperts, number: int, parameters: Any) -> None:
        nonlocal room
        if number == 0:
            room -= 1
        if room < 0 and number == experts - 1:
            raise torch.OutOfMemoryError("tried to allocate 20 MiB")
        add(self, number, parameters)

    made = room
    monkeypatch.setattr(ShadowExperts, "add", full)
    with pytest.raises(LaunchError) as caught:
        ShadowModel(demo_store("float32"), "fp16", str(counted[0]))
    assert str(caught.value) == (
        f"privateuseone:0 has no room for the shadow in fp16, {made} of 8 layers were made (tried to allocate 20 MiB); "
        "give another --shadow-device, such as cpu, or a smaller --shadow"
    )


@pytest.mark.parametrize("write", [kv.put, kv.take_over])
def test_kv_rows_come_in_one_copy_and_from_the_same_device_in_none(
    there: ShadowModel, counted: tuple[torch.device, Crossings], write: Callable[..., int]
) -> None:
    cache = routes(there, [PROMPT])[2]
    given = [torch.randn(rows.tensor.shape) for rows in kv.take(cache, 1, 4).rows]
    device, crossings = counted
    for sent, copies in ((given, 1), (list(to_device(device, *given)), 0)):
        crossings.clear()
        assert write(cache, 1, sent) == 4
        assert crossings.by_asker().total() == copies
        written = kv.take(cache, 1, 4).rows
        same = [
            torch.equal(row.tensor.cpu(), one.to(row.tensor.dtype)) for row, one in zip(written, given, strict=True)
        ]
        assert all(same)
