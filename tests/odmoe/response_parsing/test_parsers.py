"""Answers in each family's form, as its chat template writes them: whole, and in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from odmoe.chat import chat_text
from odmoe.response_parsing.forms import find_form
from odmoe.response_parsing.parsers import make_parser
from odmoe.text import without_marks
from support.chats.answers import plain, read, tokenizer_of
from support.chats.families import FAMILIES, TOOLS

USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'Köln "am"\n  Rhein', "days": 3, "where": {"a": [1, None, "x"], "b": {"}": "{"}}},
    {},
]


def calls_of(arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ["get_weather", "now"]
    return [
        {
            "id": f"functions.{name}:{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given)},
        }
        for number, (name, given) in enumerate(zip(names, arguments, strict=False))
    ]


def answer_of(family: str, message: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and what the model would write after it, without its end-of-sequence token."""
    tokenizer = tokenizer_of(FAMILIES[family].template)
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    text = without_marks(chat_text(tokenizer, [USER, message], TOOLS, add_generation_prompt=False))
    assert text.startswith(prompt), "the template begins an answer as it writes one"
    return prompt, text[len(prompt) :].rstrip("\n").removesuffix(FAMILIES[family].end).removesuffix("<|call|>")


def message_of(family: str, content: str, arguments: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if FAMILIES[family].thinks and not (family == "gpt-oss" and content and arguments):
        message["reasoning_content"] = "I might say <tool_call> here.\nThen <b>."
    if arguments:
        message["tool_calls"] = calls_of(arguments)
    return message


@pytest.mark.parametrize("content", ["", "It is.\n\nSee: {x}"])
@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_writes_is_read_back(family: str, calls: int, content: str) -> None:
    if not content and not calls:
        return
    message = message_of(family, content, ARGUMENTS[:calls])
    prompt, text = answer_of(family, message)
    expected = plain({name: value for name, value in message.items() if value and name != "role"})
    for piecewise in (False, True):
        assert plain(read(family, prompt, [text], piecewise)) == expected
        assert plain(read(family, prompt, list(text), piecewise)) == expected


PARTS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(sizes=PARTS, cut=st.integers(0, 400))
def test_in_pieces_it_is_the_same(family: str, sizes: list[int], cut: int) -> None:
    """And nothing that was given of it is taken back, wherever the answer is cut."""
    prompt, text = answer_of(family, message_of(family, "It is.", ARGUMENTS))
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    parts.append(text[at:])
    whole = read(family, prompt, [text], False)
    assert plain(read(family, prompt, parts, True)) == plain(whole)
    short = text[:cut]
    found = read(family, prompt, [short[i : i + sizes[0]] for i in range(0, len(short), sizes[0])], True, cut=True)
    for one, full in zip(found.get("tool_calls", []), whole["tool_calls"], strict=False):
        assert one["function"]["name"] == full["function"]["name"]
        begun, all_of_it = (given["function"]["arguments"] for given in (one, full))
        assert all_of_it.startswith(begun)
    left = read(family, prompt, [short], False, cut=True)
    for call in left.get("tool_calls", []):
        assert json.loads(call["function"]["arguments"]) in ARGUMENTS, "of a cut answer, whole calls alone"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_read_may_be_sent_again(family: str) -> None:
    """With the ids that we gave, cut wherever it may be."""
    prompt, text = answer_of(family, message_of(family, "It is.", ARGUMENTS))
    tokenizer = tokenizer_of(FAMILIES[family].template)
    for end in range(0, len(text) + 1, 7):
        message = {
            "role": "assistant",
            "content": None,
            **read(family, prompt, [text[:end]], True, cut=end < len(text)),
        }
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message.get("tool_calls", [])
        ]
        assert chat_text(tokenizer, [USER, message, *results, USER], TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_calls_are_text(family: str) -> None:
    prompt, text = answer_of(family, message_of(family, "It is.", ARGUMENTS[:1]))
    found = read(family, prompt, list(text), True, tools=[])
    assert "tool_calls" not in found
    assert "Köln" in found["content"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_where_there_must_be_no_other(family: str) -> None:
    prompt, text = answer_of(family, message_of(family, "", ARGUMENTS))
    for piecewise in (False, True):
        assert len(read(family, prompt, list(text), piecewise, parallel=False)["tool_calls"]) == 1


QWEN = "Qwen3"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "now", "parameters": {"a": 1}}', {"a": 1}),
        ('{"arguments": {"a": 1}, "name": "now"}', {"a": 1}),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "now"}', {}),
        ('{"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"name": "now", "arguments": {"a": "two\nlines"}}', {"a": "two\nlines"}),
        ('{"name": "now", "arguments": {"a": 1}', {"a": 1}),
    ],
)
@pytest.mark.parametrize("piecewise", [False, True])
def test_ways_to_write_a_call(text: str, arguments: dict[str, Any], piecewise: bool) -> None:
    found = read(QWEN, "", list(f"<tool_call>\n{text}\n</tool_call>"), piecewise)
    assert plain(found) == {"tool_calls": [("now", arguments)]}


@pytest.mark.parametrize(
    "text",
    ["{now}", '{"name": "now", "arguments": [1]}', '{"name": "now", "arguments": {"a": }}', "is a tag", '{"name": 5}'],
)
def test_what_is_no_call_is_text(text: str) -> None:
    whole = f"So: <tool_call>{text}</tool_call> and more"
    assert read(QWEN, "", list(whole), False) == {"content": whole}


def test_arguments_come_as_they_are_written() -> None:
    parser = make_parser(find_form(tokenizer_of(FAMILIES[QWEN].template)), "", TOOLS, piecewise=True)
    found = []
    for char in '<tool_call>{"name": "now", "arguments": {"text": "abcdefgh"}}</tool_call>':
        found += [call["function"] for delta in parser.push(char) for call in delta["tool_calls"]]
    assert found[0] == {"name": "now", "arguments": ""}
    assert [one["arguments"] for one in found[1:]] == list('{"text": "abcdefgh"}')


QWEN_TEMPLATES = {"Qwen3": "qwen3_moe", "Qwen3-Coder": "qwen3_5_moe"}


@pytest.mark.parametrize("family", QWEN_TEMPLATES)
@pytest.mark.parametrize("content", ["", "It is."])
def test_as_transformers_serves_the_family(family: str, content: str) -> None:
    """`transformers serve` has response templates of its own for two of the forms."""
    from transformers.cli.serving import utils
    from transformers.utils.chat_parsing import parse_response

    (template,) = [one for kinds, one in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if QWEN_TEMPLATES[family] in kinds]
    prompt, text = answer_of(family, message_of(family, content, [{"city": "Köln", "days": 3}, {}]))
    theirs = parse_response(text, template, prefix=prompt, tools=TOOLS)
    ours = plain(read(family, prompt, list(text), True))
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in theirs["tool_calls"]]
    assert ours["tool_calls"] == calls
    for name in ("content", "reasoning_content"):
        assert ours.get(name, "") == theirs.get(name, "").strip()


def test_harmony_without_channels_is_text() -> None:
    assert read("gpt-oss", "", list("Hello there.\n"), True) == {"content": "Hello there.\n"}


def test_other_tokenizers_have_other_forms() -> None:
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    made.chat_template = "{{ messages }}"
    assert find_form(made).is_plain
    made.add_tokens(["<think>", "</think>"])
    assert find_form(made).think == ("<think>", "</think>")
