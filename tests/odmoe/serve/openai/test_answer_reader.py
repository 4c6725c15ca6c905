"""Answers whose marks are special tokens, which their text has not: read token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from main_node.answer import Step
from odmoe.api.text_answer import Piece
from odmoe.response_parsing.forms import HARMONY_MARKS, find_form, marking_tokens
from odmoe.response_parsing.parsers import make_parser, merge_deltas
from odmoe.response_parsing.shown_answer import ShownAnswer
from odmoe.serve.openai.answer_reader import AnswerReader
from odmoe.serve.openai.parts import Part
from odmoe.text import StoppedText
from support.chats.families import FAMILIES, TOOLS

MARKS = {
    "Gemma-4": ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
    "gpt-oss": [*HARMONY_MARKS],
    "Kimi-K2": [
        *(f"<|tool_call{name}|>" for name in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end"))
    ],
}
ANSWERS = {
    "Gemma-4": (
        '<|channel>thought\nHm, <b>ü.\n<channel|>I look. END<|tool_call>call:now{a:<|"|><|im<|"|>}<tool_call|>'
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm, <b>ü.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. END"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
        '{"a": "<|im"}<|call|>'
    ),
    "Kimi-K2": (
        "<think>Hm, <b>ü.</think>I look. END<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        '<|tool_call_argument_begin|>{"a": "<|im"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}


@pytest.fixture(params=MARKS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(family: str) -> Any:
    """A token a byte; the marks are special, and so is what marks nothing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.add_special_tokens({"additional_special_tokens": MARKS[family]})
    made.chat_template = FAMILIES[family].template
    return made


def read(tokenizer: Any, text: str, size: int, stop: tuple[str, ...] = ()) -> tuple[dict[str, Any], bool]:
    """The message, and whether it has calls. As the service: the engine ends the answer at a stop text."""
    form = find_form(tokenizer)
    parser = make_parser(form, "", TOOLS, piecewise=size < 1000)
    prompt = tokenizer.encode("Weather?")
    reader = AnswerReader(parser, StoppedText(tokenizer, stop, prompt, marking_tokens(tokenizer, form)))
    engine = StoppedText(tokenizer, stop, prompt)
    steps = []
    for token in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        engine.push(token)
        is_end = token == tokenizer.eos_token_id
        finish = "stop_text" if engine.stopped else "stop" if is_end else None
        steps.append(Step(token, finish=finish, is_end=is_end))
        if finish:
            break
    deltas = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        deltas += reader.push(Part(0, "", part, part[-1].finish))
    return merge_deltas(deltas), reader.has_calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marks_are_read_and_other_special_tokens_are_not_shown(family: str, tokenizer: Any, size: int) -> None:
    text = ANSWERS[family].replace("I look", "<|pad|>I <|pad|>look")
    message, has_calls = read(tokenizer, text, size)
    (call,) = message.pop("tool_calls")
    assert message == {"reasoning_content": "Hm, <b>ü.", "content": "I look. END"}
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"a": "<|im"})
    assert has_calls


@pytest.mark.parametrize("size", [1, 1000])
def test_a_stop_text_ends_it(family: str, tokenizer: Any, size: int) -> None:
    message, has_calls = read(tokenizer, ANSWERS[family], size, ("END",))
    assert message == {"reasoning_content": "Hm, <b>ü.", "content": "I look. "}
    assert not has_calls


def test_on_a_terminal_reasoning_stands_between_marks(family: str, tokenizer: Any) -> None:
    shown = ShownAnswer(tokenizer, tokenizer.encode("Weather?"), ())
    text = ANSWERS[family].split("END")[0]
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    found = [shown.push(Piece("", Step(token, finish=None, is_end=False))) for token in ids[:-1]]
    found.append(shown.push(Piece("", Step(ids[-1], finish="stop", is_end=True))))
    assert "".join(found) == "<think>\nHm, <b>ü.\n</think>\n\nI look. "


def test_a_text_without_special_marks_is_shown_as_it_is(tokenizer: Any) -> None:
    tokenizer.chat_template = FAMILIES["Qwen3"].template
    shown = ShownAnswer(tokenizer, tokenizer.encode("Weather?"), ())
    assert shown.push(Piece("<think>", Step(5))) == "<think>"
