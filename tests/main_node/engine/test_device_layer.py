"""A layer on an accelerator beside the same layer on the processor: rows, outputs and what crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from checkpoint.devices.transfer import to_device, to_host
from main_node.engine.device_layer import DeviceLayerWork
from main_node.engine.layer import LayerWork
from scheduler import types as t
from support.devices.counted_device import Crossings, counted_device
from wire.lent_threads import LentThreads

HIDDEN, HERE, THERE = 16, 0, 1
"""Of workers: one of another process, and one on the device."""
ONE = [[3, 0]]
TWICE = [[2, 2]]
NONE_OF_SOME = [[1, -1], [3, 1], [0, 2]]
SEVERAL = [[1, 0], [3, 1], [0, 2], [2, 3], [1, 3]]


@pytest.fixture
def counted() -> Iterator[tuple[torch.device, Crossings]]:
    with counted_device() as found:
        yield found


def compute(work: LayerWork, split: bool, workers: tuple[int, ...]) -> None:
    """Expert e adds e, and multiplies by the row's weight; worker n has every expert with e % 2 == n, or all."""
    for expert, count in work.rows:
        worker = workers[expert % len(workers)]
        half = count // 2 if split else count
        for start, stop in ((0, half), (half, count)) if 0 < half < count else ((0, count),):
            call = t.Compute(worker, 0, t.ExpertId(0, expert), expert, t.Visit(1, 0, 0), start, stop, False)
            hidden, weights = work.rows_of(call)
            if isinstance(work, DeviceLayerWork):
                assert hidden.is_cpu == weights.is_cpu == (worker == HERE)
            work.keep(call, (hidden + expert) * weights[:, None])


def layers(
    index: list[list[int]], counted: tuple[torch.device, Crossings], leave: bool
) -> tuple[LayerWork, DeviceLayerWork]:
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(index), HIDDEN, generator=made)
    weights = torch.rand(len(index), len(index[0]), generator=made)
    gate = torch.tensor(index)
    there = to_device(counted[0], hidden, gate, weights)
    counted[1].clear()
    work = DeviceLayerWork(*there, LentThreads(), lambda worker: worker == THERE, leave)
    return LayerWork(hidden, gate, weights, LentThreads()), work


@pytest.mark.parametrize("workers", [(HERE,), (THERE,), (HERE, THERE)])
@pytest.mark.parametrize("index", [ONE, TWICE, NONE_OF_SOME, SEVERAL])
@pytest.mark.parametrize("split", [False, True])
def test_it_gives_the_processors_bits(
    counted: tuple[torch.device, Crossings], index: list[list[int]], workers: tuple[int, ...], split: bool
) -> None:
    here, there = layers(index, counted, HERE in workers)
    assert there.rows == here.rows
    for work in (here, there):
        compute(work, split, workers)
    output = there.combine()
    assert output.device == counted[0]
    by_asker = counted[1].by_asker()
    assert by_asker["transfer.py:to_host"] == 1
    assert by_asker.keys() <= {"transfer.py:to_host", "transfer.py:to_device"}
    assert by_asker["transfer.py:to_device"] <= (HERE in workers) + (index != ONE)
    assert torch.equal(to_host(output)[0], here.combine())


def test_a_decoded_row_that_stays_is_not_copied_at_all(counted: tuple[torch.device, Crossings]) -> None:
    _, there = layers(ONE, counted, leave=False)
    compute(there, False, (THERE,))
    there.combine()
    assert counted[1].by_asker() == Counter({"transfer.py:to_host": 1})


@pytest.mark.parametrize("experts", [(1, 3), (0, 3)])
def test_the_routers_choice_replaces_the_gates(
    counted: tuple[torch.device, Crossings], experts: tuple[int, int]
) -> None:
    """Also where only the weights differ."""
    both = layers(ONE, counted, leave=False)
    new = torch.tensor([experts]), torch.tensor([[0.25, 0.5]])
    for work in both:
        work.reweigh = lambda _: new
        work.route((experts,), ())
        compute(work, False, (THERE,))
    here, there = both
    assert there.rows == here.rows == tuple((expert, 1) for expert in experts)
    assert torch.equal(to_host(there.combine())[0], here.combine())


def test_a_worker_that_comes_in_the_middle_gets_its_rows(counted: tuple[torch.device, Crossings]) -> None:
    here, there = layers(SEVERAL, counted, leave=False)
    for work in (here, there):
        compute(work, False, (HERE, THERE))
    assert counted[1].by_asker()["transfer.py:to_host"] == 2
    assert torch.equal(to_host(there.combine())[0], here.combine())
