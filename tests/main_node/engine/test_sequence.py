"""A request's tokens and KV rows, as the shadow is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from checkpoint.devices.transfer import to_device
from checkpoint.kv import CachePiece, Growing
from checkpoint.tensors import received_tensor, tensor_from_bytes
from main_node.engine import sequence
from main_node.engine.sequence import Carrier, Sequence, align_messages, shadow_messages
from scheduler import types as t
from scheduler.alignment import AT_ONCE, Alignment
from support.devices.counted_device import counted_device
from wire import messages as w

pytestmark = pytest.mark.timeout(60)


# --- alignment messages -----------------------------------------------------------------------------------------


def kv(count: int, layers: int = 3) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    return [torch.randn(1, 2, count, 4, generator=made) for _ in range(2 * layers)]


def snapshot(rows: list[torch.Tensor], start: int) -> CachePiece:
    return CachePiece(start, start + rows[0].shape[2], [Growing(each, -2, start) for each in rows])


def test_a_cache_that_was_given_up_takes_no_bytes() -> None:
    sequence = Sequence([1, 2], 4, DynamicCache())
    sequence.cache.update(*kv(3, layers=1), layer_idx=0)
    assert sequence.cache_bytes() == 2 * 2 * 3 * 4 * 4
    sequence.free()
    assert sequence.cache_bytes() == 0


@pytest.mark.parametrize("count", [1, 2, 7, 20])
@pytest.mark.parametrize("part_rows", [1, 3, 7, 100])
def test_alignment_parts_add_up(count: int, part_rows: int, monkeypatch: Any) -> None:
    rows = kv(count)
    row_bytes = 6 * 2 * 4 * 4
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", part_rows * row_bytes + 5)
    messages = align_messages(t.Align(4, 9, True, 30, 30 + count), 77, snapshot(rows, 30))
    assert len(messages) == -(-count // part_rows)
    assert [m.more for m in messages] == [True] * (len(messages) - 1) + [False]
    assert {(m.request, m.step, m.token) for m in messages} == {(4, 9, 77)}
    at = 30
    for message in messages:
        assert message.kv_start == at
        at += message.kv[0].shape[2]
        assert sum(len(part.data) for part in message.kv) <= max(part_rows, 1) * row_bytes
    assert at == 30 + count
    for number, whole in enumerate(rows):
        parts = [tensor_from_bytes(m.kv[number].dtype, m.kv[number].shape, m.kv[number].data) for m in messages]
        assert torch.equal(torch.cat(parts, 2), whole)


def test_a_row_larger_than_a_part_travels_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", 1)
    assert len(align_messages(t.Align(4, 9, True, 0, 5), 77, snapshot(kv(5), 0))) == 5


def test_rows_on_an_accelerator_come_to_the_host_in_one_copy_a_part(monkeypatch: Any) -> None:
    """All copies are begun before the first message is made, and the messages are those of rows on the host."""
    rows = kv(7)
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", 3 * 6 * 2 * 4 * 4)
    command = t.Align(4, 9, True, 30, 37)
    wanted = align_messages(command, 77, snapshot(rows, 30))
    with counted_device() as (device, crossings):
        there = snapshot(list(to_device(device, *rows)), 30)
        crossings.clear()
        carrier = Carrier()
        assert not carrier.begun_bytes
        messages = sequence._align_messages(command, 77, there, carrier)
        assert crossings.by_asker() == {"streams.py:begin": len(wanted)}
        assert carrier.begun_bytes == sum(row.nbytes for row in rows)
        assert list(messages) == wanted
        assert crossings.by_asker() == {"streams.py:begin": len(wanted)}


def test_rows_for_a_shadow_of_the_same_process_stay_where_they_are() -> None:
    with counted_device() as (device, crossings):
        (row,) = to_device(device, *kv(2)[:1])
        crossings.clear()
        messages = sequence._align_messages(t.Align(4, 9, True, 0, 2), 77, snapshot([row], 0), Carrier(travels=False))
        kept = [received_tensor(part) for message in messages for part in message.kv]  # type: ignore[union-attr]
        assert [one.data_ptr() for one in kept] == [row.data_ptr()]
        assert not crossings.all


def test_an_alignment_without_rows_is_one_message() -> None:
    assert align_messages(t.Align(4, 9, False, 30, 30), None, CachePiece(30, 30)) == [w.Align(4, 9, None, 30, ())]


def test_a_sequence_tells_its_rows_and_tokens() -> None:

    cache = DynamicCache()
    keys, values = kv(6, 1)
    cache.update(keys, values, 0)
    told = Sequence([1, 2, 3], 9, cache)
    told.tokens += [4, 5]
    assert told.prompt_before(1) == (1, 2, 3, 4)
    assert told.token_of(1) == 5
    assert [row.count for row in told.kv_rows(2, 5).rows] == [3, 3]
    assert torch.equal(told.kv_rows(2, 5).rows[1].tensor, values[:, :, 2:5])
    assert told.kv_rows(4, 4) == CachePiece(4, 4)
    assert told.cache_bytes() == keys.nbytes + values.nbytes


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (t.Align(4, 2, True, 5, 5, 6, 2), w.Align(4, 2, 6, 5, (), drafts=6, before=(4, 5))),
        (t.Align(4, 2, True, 5, 5, 6), w.Align(4, 2, 6, 5, (), drafts=6)),
        (t.Align(4, 2, False, 5, 5), w.Align(4, 2, None, 5, ())),
    ],
)
def test_after_a_block_the_tokens_of_its_passes_are_sent(command: t.Align, expected: w.Align) -> None:
    told = Sequence([1, 2, 3], 9, None)
    told.tokens += [4, 5, 6, 7]
    assert list(shadow_messages(command, told, Alignment(), 2, AT_ONCE)) == [expected]


def test_a_sequence_that_is_freed_has_no_bytes() -> None:
    """Whoever counts the caches of all requests may find one whose answer has just ended."""
    made = Sequence([1, 2], 4, DynamicCache())
    made.cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert made.cache_bytes() == 2 * 24 * 4
    made.free()
    assert made.cache_bytes() == 0


@pytest.mark.parametrize(
    ("policy", "travels", "due"),
    [
        (Alignment(), True, [0, 3, 6]),
        (Alignment(), False, [0, 1, 2, 3, 4, 5, 6]),
        (Alignment(state_period=2), False, [0, 2, 4, 6]),
        (Alignment(state_period=0), True, []),
    ],
)
def test_states_go_with_the_rows_as_a_links_share_allows(policy: Alignment, travels: bool, due: list[int]) -> None:
    """2.5 MiB of them, of which 1 MiB a token may be sent."""
    cache = DynamicCache()
    cache.update(*kv(9, 1), 0)
    cache.layers[0].conv_states = {0: torch.zeros(5 << 17)}
    told = Sequence([1, 2], 9, cache)
    aligned = [t.Align(1, step, True, 1 + step if step else 0, 2 + step) for step in range(7)]
    assert [one.step for one in aligned if told.take_turn(one, policy, travels)] == due
    again = t.Align(1, 6, True, 0, 8)
    assert told.take_turn(again, policy, travels) == bool(due), "a shadow that has just joined"
