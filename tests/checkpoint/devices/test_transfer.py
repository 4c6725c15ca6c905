"""Several tensors in one copy, and what the counted device counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.devices.streams import HostCopies, borrow
from checkpoint.devices.transfer import to_device, to_host, token_ids
from support.devices.counted_device import Crossings, counted_device

TENSORS = (
    torch.arange(6).view(2, 3),
    torch.randn(3, 5).to(torch.bfloat16),
    torch.tensor(True),
    torch.randn(2, 7).T,
    torch.empty(0, 4),
    torch.randn(1),
)
"""Of several dtypes, one not contiguous, one without elements, one without dimensions."""


@pytest.fixture
def counted() -> Iterator[tuple[torch.device, Crossings]]:
    with counted_device() as found:
        yield found


def equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_tensors_go_there_and_back_in_one_copy_each(counted: tuple[torch.device, Crossings]) -> None:
    device, crossings = counted
    there = to_device(device, *TENSORS)
    assert {tensor.device for tensor in there} == {device}
    assert [one.kind for one in crossings.all] == ["to device"]
    crossings.clear()
    assert equal(to_host(*there), TENSORS)
    assert [one.kind for one in crossings.all] == ["to host"]


def test_what_is_in_its_place_is_not_touched(counted: tuple[torch.device, Crossings]) -> None:
    device, crossings = counted
    (there,) = to_device(device, TENSORS[0])
    crossings.clear()
    assert to_host(*TENSORS) == TENSORS
    assert to_device(device, there)[0] is there
    assert not crossings.all
    host = to_host(TENSORS[1], there)
    assert host[0] is TENSORS[1]
    assert torch.equal(host[1], TENSORS[0])


def test_rows_are_aligned_wherever_they_come_to_lie(counted: tuple[torch.device, Crossings]) -> None:
    device, _ = counted
    found = to_host(*to_device(device, *TENSORS))
    assert {tensor.data_ptr() % 64 for tensor in found if tensor.numel()} == {0}


def test_rows_on_their_way_to_the_host_are_those_of_the_moment(counted: tuple[torch.device, Crossings]) -> None:
    device, crossings = counted
    there = to_device(device, *TENSORS)
    borrow(there)
    crossings.clear()
    landing = HostCopies(device).begin(there)
    there[0].zero_()
    assert equal(tuple(landing.wait()), TENSORS)
    assert [one.kind for one in crossings.all] == ["to host"]


def test_tensors_of_two_devices_come_in_one_copy_from_each(counted: tuple[torch.device, Crossings]) -> None:
    first, crossings = counted
    second = torch.device(first.type, 1)
    mixed = (*to_device(first, *TENSORS[:2]), *to_device(second, *TENSORS[2:4]), *TENSORS[4:])
    crossings.clear()
    there = to_device(second, *mixed)
    assert {tensor.device for tensor in there} == {second}
    assert [one.kind for one in crossings.all] == ["between devices", "to device"]
    assert there[2:4] == mixed[2:4], "what is there already is not touched"
    crossings.clear()
    assert equal(to_host(*mixed), TENSORS)
    assert [one.kind for one in crossings.all] == ["to host", "to host"]
    assert equal(to_host(*there), TENSORS)


@pytest.mark.parametrize("source", ["cpu", 0])
def test_only_tensors_of_the_processor_are_packed_in_page_locked_memory(
    counted: tuple[torch.device, Crossings], source: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does: it refuses to page-lock memory of an accelerator."""
    device, _ = counted
    given = to_device(device, *TENSORS) if source == 0 else TENSORS
    empty, pinned = torch.empty, []

    def checked(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory and torch.device(more.get("device", "cpu")).type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        pinned.append(pin_memory)
        return empty(*shape, **more)

    monkeypatch.setattr("checkpoint.devices.transfer.pins", lambda device: device.type != "cpu")
    monkeypatch.setattr(torch, "empty", checked)
    there = to_device(torch.device(device.type, 1), *given)
    monkeypatch.undo()
    assert pinned == [source == "cpu", False]
    assert equal(to_host(*there), TENSORS)


def test_tokens_of_a_processor_are_no_copies() -> None:
    assert token_ids([3, 4], torch.device("cpu")).tolist() == [[3, 4]]


# --- the counted device itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (lambda there: there[0, 0].item(), "waits"),
        (lambda there: there.cpu(), "to host"),
        (lambda there: there.tolist(), "to host"),
        (lambda there: bool((there > 0).any()), "waits"),
        (lambda there: torch.where(there > 0), "waits"),
        (lambda there: there.unique(), "waits"),
        (lambda there: there[there > 0], "waits"),
        (lambda there: there.copy_(torch.ones(2, 3)), "to device"),
    ],
)
def test_every_crossing_and_every_wait_counts(
    counted: tuple[torch.device, Crossings], operation: Callable[[torch.Tensor], Any], kind: str
) -> None:
    device, crossings = counted
    there = torch.ones(2, 3, device=device)
    crossings.clear()
    operation(there)
    assert kind in Counter(one.kind for one in crossings.all)
    assert crossings.by_asker() == Counter({"none of this project": len(crossings.all)})


@pytest.mark.parametrize(
    "operation",
    [
        lambda there, here: there + here,
        lambda there, here: here @ there.T,
        lambda there, here: torch.cat([here, there]),
        lambda there, here: torch.nn.functional.linear(there, here),
    ],
)
def test_an_operation_with_two_devices_fails(
    counted: tuple[torch.device, Crossings], operation: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    device, _ = counted
    with pytest.raises(RuntimeError, match="two devices"):
        operation(torch.ones(2, 3, device=device), torch.ones(2, 3))


def test_computing_there_gives_the_processors_bits_and_crosses_nothing(
    counted: tuple[torch.device, Crossings],
) -> None:
    device, crossings = counted
    here = torch.randn(4, 8)
    layer = torch.nn.Linear(8, 8)
    with torch.inference_mode():
        wanted = torch.softmax(layer(here).relu() * 2.0, -1).index_select(0, torch.tensor([3, 1]))
    there, numbers = to_device(device, here, torch.tensor([3, 1]))
    layer = layer.to(device)
    crossings.clear()
    with torch.inference_mode():
        found = torch.softmax(layer(there).relu() * 2.0, -1).index_select(0, numbers)
    assert not crossings.all
    assert torch.equal(to_host(found)[0], wanted)


def test_afterwards_torch_has_no_accelerator(counted: tuple[torch.device, Crossings]) -> None:
    """Other tests of this process find the machine as it is."""
    assert torch.accelerator.current_accelerator() is None or torch.cuda.is_available()
