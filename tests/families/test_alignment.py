"""KV alignment of every kind of cache: whose cache has become another's goes on as that other does, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint import family as families
from checkpoint import kv
from checkpoint.tensors import tensor_from_bytes
from main_node.engine import sequence
from scheduler import types as t
from wire import odmoe_pb2
from wire.codec import Codec

OTHER_PROMPT = [70, 2, 35, 35, 80, 14, 6, 91, 57, 23, 44, 8]
MINE, OTHERS = [31, 4, 77, 15], [62, 90, 11, 28]


class Run:
    """Transformers' model and a cache of its own."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model = model
        self.cache = families.new_cache(model.config)
        self.read(*prompt)

    def read(self, *tokens: int) -> torch.Tensor:
        """One pass; the last token's logits."""
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache, use_cache=True)
        return out.logits[0, -1]


def align(main: Run, shadow: Run, start: int, stop: int) -> int:
    """As the nodes do it, over the wire's bytes. How many messages it took."""
    codec = Codec(odmoe_pb2.ToShadow)
    messages = sequence.align_messages(t.Align(1, 0, True, start, stop), 7, kv.take(main.cache, start, stop))
    at = messages[0].kv_start
    for number, message in enumerate(messages, 1):
        got = codec.decode(codec.encode(message))
        assert (got.kv_start, got.more) == (at, number < len(messages))
        at = kv.put(shadow.cache, at, [tensor_from_bytes(each.dtype, each.shape, each.data) for each in got.kv])
    assert at == stop
    return len(messages)


@pytest.fixture
def runs(tiny: Any) -> tuple[Run, Run]:
    """The same model after two prompts of one length."""
    return Run(tiny.model, tiny.prompt), Run(tiny.model, OTHER_PROMPT)


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_the_next_pass_is_the_main_models(
    part_bytes: int, runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "ALIGN_PART_BYTES", part_bytes)
    main, shadow = runs
    prompt = len(OTHER_PROMPT)
    assert kv.cache_bytes(main.cache) == kv.cache_bytes(shadow.cache) > 0
    parts = align(main, shadow, 0, prompt)
    assert (parts == 1) == (part_bytes > 1)
    told, own = main.read(MINE[0]), shadow.read(MINE[0])
    assert torch.equal(told, own)
    for mine, other in zip(MINE[1:], OTHERS[1:], strict=True):  # a period of three: the shadow reads its own tokens
        told, own = main.read(mine), shadow.read(other)
    assert not torch.equal(told, own)
    align(main, shadow, prompt + 1, prompt + 4)
    assert torch.equal(main.read(5), shadow.read(5))


def test_in_the_midst_of_a_pass_only_lasting_rows_are_taken(runs: tuple[Run, Run]) -> None:
    """A layer may be a token ahead by then; what is not sent stays the shadow's own."""
    main, shadow = runs
    stop = len(OTHER_PROMPT)
    before = [tensor.clone() for tensor in passing(shadow.cache, stop)]
    main.read(MINE[0])
    taken = kv.take(main.cache, 0, stop, resting=False)
    assert taken.states == []
    assert all(row.count == (stop if row.whole else 0) for row in taken.rows)
    for first, tensors in taken.parts(1 << 20):
        kv.put(shadow.cache, first, tensors)
    assert [torch.equal(a, b) for a, b in zip(before, passing(shadow.cache, stop), strict=True)] == [True] * len(before)
    for told, own in zip(lasting(main.cache, stop), lasting(shadow.cache, stop), strict=True):
        assert torch.equal(told, own)


def passing(cache: Any, stop: int) -> list[torch.Tensor]:
    """Of positions [0, stop), what later passes forget or overwrite."""
    taken = kv.take(cache, 0, stop)
    return [row.tensor for row in taken.rows if not row.whole] + taken.states


def lasting(cache: Any, stop: int) -> list[torch.Tensor]:
    return [row.tensor for row in kv.take(cache, 0, stop).rows if row.whole]
