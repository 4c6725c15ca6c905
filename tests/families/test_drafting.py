"""A shadow of every family drafts: wherever a block sends it back to, it is where it would be without the way there."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from checkpoint import family as families
from checkpoint import kv
from main_node.engine import sequence
from scheduler import types as t
from shadow_node.followed import Followed
from shadow_node.model import ShadowModel
from support.cases import slow_except
from wire.messages import OpenRequest

PASSES = 12
"""With the prompt, more than any sliding window."""


def contents(cache: Any, stop: int) -> list[torch.Tensor]:
    piece = kv.take(cache, 0, stop)
    return [row.tensor for row in piece.rows] + piece.states


@pytest.mark.parametrize("aligned", slow_except([True], [False, True]))
def test_after_each_block_it_is_where_it_would_be(aligned: bool, tiny: Any) -> None:
    """`aligned`: with the main model's KV rows. Of its own, the whole cache is compared with one that has read the same
    tokens and never went back; with the main model's, what is left of their positions is theirs."""
    shadow, chance, prompt = ShadowModel(tiny.store, "fp16"), Random(aligned), list(tiny.prompt)
    main, straight = families.new_cache(tiny.model.config), shadow.new_cache()
    vocabulary = tiny.model.config.get_text_config().vocab_size
    opened = OpenRequest(1, tuple(prompt), 0, PASSES + 1, 1, int(aligned), 2, False)
    with torch.inference_mode():
        followed = Followed(opened, shadow.new_cache())
        followed.on_prompt_read(shadow.forward(followed.reading.next_tokens(), followed.cache))
        if aligned:
            tiny.model(input_ids=torch.tensor([prompt]), past_key_values=main, use_cache=True)
        else:
            shadow.forward(prompt, straight)
        tokens: list[int] = []
        wrong = drafted = 0
        while len(tokens) < PASSES:
            block = min(chance.randint(1, 4), PASSES - len(tokens))
            first, start = len(tokens), len(prompt) + max(len(tokens) - 1, 0) if tokens else 0
            for step in range(first, first + block):
                own = followed.tokens._read[step] if step <= followed.course.step else 0
                right = chance.random() < 0.7
                tokens.append(own if right else chance.randrange(vocabulary))
                wrong += not right
                if step and aligned:
                    read = torch.tensor([[tokens[step - 1]]])
                    tiny.model(input_ids=read, past_key_values=main, use_cache=True)
            step, stop = len(tokens) - 1, len(prompt) + len(tokens) - 1
            piece = kv.take(main, start, stop) if aligned else kv.CachePiece(stop, stop)
            for message in sequence.align_messages(t.Align(1, step, True, piece.start, stop), tokens[step], piece):
                followed.receive(replace(message, drafts=4, before=tuple(tokens[first:step])))
            while followed.may_start():
                token, _ = followed.start()
                followed.on_pass_ended(shadow.forward([token], followed.cache))
            drafted += len(followed.tokens.take_drafts())
            end = len(prompt) + followed.course.step
            assert followed.course.step == min(step + 5, PASSES)
            if aligned:
                for mine, told in zip(kv.take(followed.cache, 0, stop).rows, kv.take(main, 0, stop).rows, strict=True):
                    held = told.between(mine.first, stop)
                    assert torch.equal(mine.tensor, held.to(mine.tensor.dtype))
                continue
            for one in tokens[max(first - 1, 0) : step]:
                shadow.forward([one], straight)
            fresh, token = copy.deepcopy(straight), tokens[step]
            for _ in range(step, followed.course.step):
                token = shadow.forward([token], fresh)
            for mine, wanted in zip(contents(followed.cache, end), contents(fresh, end), strict=True):
                assert torch.equal(mine, wanted)
    assert wrong > 1
    assert drafted > PASSES
