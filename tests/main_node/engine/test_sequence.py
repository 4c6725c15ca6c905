"""A request's tokens and KV rows, as the shadow is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint.kv import CachePiece, Growing
from checkpoint.tensors import tensor_from_bytes
from main_node.engine import sequence
from main_node.engine.sequence import Sequence, align_messages
from scheduler import types as t
from wire import messages as w

pytestmark = pytest.mark.timeout(60)


# --- alignment messages -----------------------------------------------------------------------------------------


def kv(count: int, layers: int = 3) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    return [torch.randn(1, 2, count, 4, generator=made) for _ in range(2 * layers)]


def snapshot(rows: list[torch.Tensor], start: int) -> CachePiece:
    return CachePiece(start, start + rows[0].shape[2], [Growing(each, -2, start) for each in rows])


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


def test_an_alignment_without_rows_is_one_message() -> None:
    assert align_messages(t.Align(4, 9, False, 30, 30), None, CachePiece(30, 30)) == [w.Align(4, 9, None, 30, ())]


def test_a_sequence_tells_its_rows_and_tokens() -> None:
    from transformers import DynamicCache

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
