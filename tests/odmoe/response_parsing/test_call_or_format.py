"""Grammars of answers that are calls or follow a schema, by llguidance."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from odmoe.response_parsing.call_or_format import call_or_format
from odmoe.response_parsing.forms import find_form
from support.chats.families import FAMILIES

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def follows(tokenizer: Any, family: str, text: str, prompt: str = "") -> bool:
    """Whether an answer may be this text."""
    tokenizer.chat_template = FAMILIES[family].template
    grammar = call_or_format(find_form(tokenizer), prompt, json.dumps(SCHEMA), tokenizer)
    assert grammar is not None
    matcher = LLMatcher(from_tokenizer(tokenizer), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("Qwen3", '<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>...'),
        ("GLM-4.5", "\n<tool_call>now\n</tool_call>"),
        ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'),
    ],
)
def test_a_call_or_the_format(tokenizer: Any, family: str, call: str) -> None:
    for text in ('{"a": 1}', '{\n  "a": 2\n}', call):
        assert follows(tokenizer, family, text)
        assert follows(tokenizer, family, f"<think>\nIf {{so}}.\n</think>\n\n{text}")
        assert follows(tokenizer, family, f"If {{so}}.</think>{text}", prompt="<think>\n")
    for text in ('{"a": 3}', "Hello", '{"a": 1} or so', "<think>so", "<think>so</think> Hello", f"So: {call}"):
        assert not follows(tokenizer, family, text)
    assert not follows(tokenizer, family, '{"a": 1}', prompt="<think>\n")


def test_where_special_tokens_mark_calls_it_is_not_guided(tokenizer: Any) -> None:
    for family in ("gpt-oss", "Gemma-4"):
        tokenizer.chat_template = FAMILIES[family].template
        assert call_or_format(find_form(tokenizer), "", json.dumps(SCHEMA), tokenizer) is None
