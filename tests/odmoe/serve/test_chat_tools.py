"""/v1/chat/completions with tools, by the official client: calls are read, streamed, forced, cut, and gone on after."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema
import openai
import pytest
from pydantic_core import from_json

from main_node.answer import Step
from odmoe.text import StoppedText
from support.cases import slow_except
from support.chats.answers import SCHEMA
from support.chats.demo_chat import CHAT, NAME, TOOL, answer
from support.chats.script import Script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

    from main_node.report import Report
    from odmoe.api.model import Model
    from support.machines.http_service import Served

PICK: Any = {"type": "function", "function": {"name": "pick"}}
TOOL_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}</{{ m.role }}>{% endfor %}"
)


def scripted(tokenizer: Any, report: Report, text: str, prompt: list[int], max_new_tokens: int, **how: Any) -> Script:
    """As `Cluster.generate`."""

    def steps() -> Iterator[Step]:
        shown = StoppedText(tokenizer, how["stop"], prompt)
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for count, token in enumerate(ids, 1):
            shown.push(token)
            finish = "stop" if token == ids[-1] else "stop_text" if shown.stopped else None
            finish = finish or ("length" if count == max_new_tokens else None)
            yield Step(token, finish=finish)
            if finish is not None:
                yield Step(None, replace(report, finish=finish, new_tokens=count))
                return

    return Script(steps())


def whole_of(answered: Any, stream: bool) -> tuple[str, list[str], str]:
    """Content, names of the calls, and the finish reason."""
    if not stream:
        choice = answered.choices[0]
        calls = choice.message.tool_calls or []
        return choice.message.content, [call.function.name for call in calls], choice.finish_reason
    choices = [event.choices[0] for event in answered]
    content = "".join(choice.delta.content or "" for choice in choices)
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    names = [call.function.name for call in calls if call.function.name is not None]
    return content, names, choices[-1].finish_reason


class TestTools:
    CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'

    @pytest.fixture(autouse=True)
    def template(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model.opened.tokenizer, "chat_template", TOOL_TEMPLATE)

    @pytest.fixture
    def says(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
        """`says(text)`: what the model answers, before its end-of-sequence token."""
        *_, last = model.cluster.generate([5], 1)
        assert last.report is not None
        report: Report = last.report

        def say(text: str) -> None:
            monkeypatch.setattr(model.cluster, "generate", partial(scripted, model.opened.tokenizer, report, text))

        return say

    def test_the_template_gets_them(self, client: OpenAI) -> None:
        with_tools = answer(client, tools=[TOOL]).usage.prompt_tokens
        assert with_tools > answer(client).usage.prompt_tokens + 20
        assert answer(client, tools=[TOOL], tool_choice="none").usage.prompt_tokens < with_tools

    def test_an_answer_without_a_call(self, client: OpenAI) -> None:
        plain = answer(client, tools=[TOOL])
        assert plain.choices[0].finish_reason == "length"
        assert plain.choices[0].message.tool_calls is None
        parts = list(answer(client, tools=[TOOL], stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == plain.choices[0].message.content

    def test_calls_are_read(self, client: OpenAI, says: Any) -> None:
        says("I add.\n" + self.CALL + "\n" + self.CALL.replace("1", "2"))
        choice = answer(client, tools=[TOOL], max_completion_tokens=200).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["add", "add"]
        assert [json.loads(call.function.arguments)["a"] for call in calls] == [1, 2]
        assert json.loads(calls[0].function.arguments)["b"] == "ü"
        assert len({call.id for call in calls}) == 2

    def test_calls_are_streamed(self, client: OpenAI, says: Any) -> None:
        says(self.CALL)
        with client.chat.completions.stream(
            model=NAME, messages=CHAT, max_completion_tokens=200, tools=[TOOL]
        ) as stream:
            found = stream.get_final_completion().choices[0]
        assert found.finish_reason == "tool_calls"
        assert found.message.tool_calls is not None
        assert found.message.tool_calls[0].function.name == "add"
        assert json.loads(found.message.tool_calls[0].function.arguments) == {"a": 1, "b": "ü"}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("left", [0, 4])
    def test_an_answer_cut_by_its_length_says_so(
        self, client: OpenAI, model: Model, says: Any, left: int, stream: bool
    ) -> None:
        """After a whole call, or within one: that is text, or in a stream a call as far as it came."""
        text = "I add. " + self.CALL
        says(text)
        ids = model.opened.tokenizer(text, add_special_tokens=False)["input_ids"]
        found = whole_of(answer(client, tools=[TOOL], max_completion_tokens=len(ids) - left, stream=stream), stream)
        if left:
            shown = model.opened.tokenizer.decode(ids[:-left])
            assert text.startswith(shown)
            assert found == (("I add.", ["add"], "length") if stream else (shown, [], "length"))
        else:
            assert found == ("I add.", ["add"], "length")

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_text_cuts_calls_too(self, client: OpenAI, says: Any, stream: bool) -> None:
        asked: Any = {"tools": [TOOL], "max_completion_tokens": 200, "stop": ["Then", "Result"], "stream": stream}
        says("I wait. Then I add.\n" + self.CALL)
        assert whole_of(answer(client, **asked), stream) == ("I wait. ", [], "stop")
        says(self.CALL + "\nResult: " + self.CALL)
        assert whole_of(answer(client, **asked), stream)[1:] == (["add"], "tool_calls")

    @pytest.mark.parametrize("effort", [None, "low"])
    def test_thinking_is_streamed_apart(
        self, client: OpenAI, model: Model, says: Any, monkeypatch: pytest.MonkeyPatch, effort: Any
    ) -> None:
        """The template begins it; a call within it is none."""
        template = TOOL_TEMPLATE + "{% if not reasoning_effort %}<think>\n</think>{% endif %}<think>\n"
        monkeypatch.setattr(model.opened.tokenizer, "chat_template", template)
        says(f"I could {self.CALL}.\n</think>\n\nI add.\n{self.CALL}")
        asked: Any = {"tools": [TOOL], "max_completion_tokens": 300, **({"reasoning_effort": effort} if effort else {})}
        message = answer(client, **asked).choices[0].message
        assert (message.reasoning_content, message.content) == (f"I could {self.CALL}.", "I add.")
        events = [event.choices[0] for event in answer(client, stream=True, **asked)]
        texts = {name: "" for name in ("reasoning_content", "content")}
        for name in texts:
            texts[name] = "".join(getattr(event.delta, name, None) or "" for event in events)
        assert texts == {"reasoning_content": message.reasoning_content, "content": message.content}
        pieces = [call for event in events for call in event.delta.tool_calls or []]
        assert (pieces[0].function.name, pieces[0].function.arguments) == ("add", "")
        assert json.loads("".join(call.function.arguments for call in pieces)) == {"a": 1, "b": "ü"}
        assert events[-1].finish_reason == "tool_calls"

    @pytest.mark.parametrize("stream", slow_except([True], [False, True]))
    @pytest.mark.parametrize("choice", slow_except([PICK], ["required", PICK]))
    def test_a_call_is_forced(self, client: OpenAI, choice: Any, stream: bool) -> None:
        """By a model that knows nothing of tools. Its arguments follow the schema."""
        tools = [
            {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
            for name in ("choose", "pick")
        ]
        asked: Any = {"tools": tools, "tool_choice": choice, "max_completion_tokens": 120, "frequency_penalty": 2.0}
        if stream:
            with client.chat.completions.stream(model=NAME, messages=CHAT, **asked) as events:
                found = events.get_final_completion().choices[0]
        else:
            found = answer(client, **asked).choices[0]
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls or []
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert call.function.name in (["pick", "choose"] if choice == "required" else ["pick"])

    @pytest.mark.slow
    def test_with_tools_an_answer_is_a_call_or_follows_the_format(self, client: OpenAI, model: Model) -> None:
        """The model knows neither. Where it may not begin with a brace, it begins a call."""
        form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
        asked: Any = {"tools": [TOOL], "response_format": form, "max_completion_tokens": 120, "frequency_penalty": 2.0}
        brace = model.opened.tokenizer.convert_tokens_to_ids("{")
        less = model.opened.tokenizer.convert_tokens_to_ids("<")
        found = answer(client, **asked, logit_bias={str(brace): 100}).choices[0]
        jsonschema.validate(json.loads(found.message.content), SCHEMA)
        assert found.finish_reason == "stop"
        called = answer(client, **(asked | {"max_completion_tokens": 24}), logit_bias={str(less): 100}).choices[0]
        assert called.message.content.lstrip().startswith("<tool_call>"), "which is no call yet"

    def test_a_call_that_is_no_json_is_text(self, client: OpenAI, says: Any) -> None:
        says("<tool_call>{add</tool_call>")
        choice = answer(client, tools=[TOOL], max_completion_tokens=200).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content == "<tool_call>{add</tool_call>"

    def test_the_chat_goes_on_after_a_call(self, client: OpenAI, model: Model) -> None:
        call: dict[str, Any] = {"id": "1", "type": "function"}
        call["function"] = {"name": "add", "arguments": '{"a": 41}'}
        chat = [
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
        short = answer(client, messages=CHAT, tools=[TOOL]).usage.prompt_tokens
        more = len(model.opened.tokenizer("<assistant>41</assistant><tool>42</tool>")["input_ids"])
        assert answer(client, messages=chat, tools=[TOOL]).usage.prompt_tokens == pytest.approx(short + more, abs=2)
        for arguments in ('{"a": 41', "[" * 1000):  # as models write them
            call["function"] = {"name": "add", "arguments": arguments}
            assert answer(client, messages=chat, tools=[TOOL], max_completion_tokens=1).choices
        for wrong in ("add", {"arguments": "{}"}):
            call["function"] = wrong
            with pytest.raises(openai.BadRequestError, match=r"messages\.2\.tool_calls"):
                answer(client, messages=chat, tools=[TOOL])

    @pytest.mark.parametrize("more", ["", '"x"'])
    def test_the_chat_goes_on_after_a_call_that_broke_in_a_stream(self, client: OpenAI, says: Any, more: str) -> None:
        """What was given cannot be taken back. It is the beginning of JSON, and is taken again."""
        says('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ' + more + "\n</tool_call>")
        asked: Any = {"tools": [TOOL], "max_completion_tokens": 200}
        calls = [
            call
            for event in answer(client, stream=True, **asked)
            for call in (event.choices[0].delta.tool_calls or [] if event.choices else [])
        ]
        arguments = "".join(call.function.arguments for call in calls)
        assert from_json(arguments, allow_partial=True)["a"] == 1
        assert arguments.startswith('{"a": 1, "b":')
        function = {"name": calls[0].function.name, "arguments": arguments}
        called = {"role": "assistant", "tool_calls": [{"id": calls[0].id, "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "the arguments are no JSON"}
        assert answer(client, messages=[*CHAT, called, result], **asked).choices

        function_tool = {"type": "function", **TOOL["function"]}
        events = list(client.responses.create(model=NAME, input=CHAT[-1:], tools=[function_tool], stream=True))
        output = [item.model_dump() for item in events[-1].response.output]
        called_ids = [item["call_id"] for item in output if item["type"] == "function_call"]
        said = [{"type": "function_call_output", "call_id": one, "output": "no JSON"} for one in called_ids]
        assert called_ids
        again = client.responses.create(model=NAME, input=[*CHAT[-1:], *output, *said], tools=[function_tool])
        assert again.status in ("completed", "incomplete")

    def test_it_goes_on_in_the_other_apis(self, served: Served, says: Any) -> None:
        """Their calls have objects, in a stream too."""
        says('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": \n</tool_call>')

        def post(path: str, **body: Any) -> httpx2.Response:
            found = httpx2.post(f"{served.url}{path}", json={"model": NAME, **body}, timeout=60)
            assert found.status_code == 200, found.text
            return found

        lines = post("/api/chat", messages=CHAT[-1:], tools=[TOOL]).text.splitlines()
        (call,) = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
        assert call["function"]["arguments"]["a"] == 1
        done = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "no JSON"}]
        post("/api/chat", messages=[*CHAT[-1:], *done], tools=[TOOL], stream=False)

        tool = {"name": "add", "input_schema": {"type": "object"}}
        asked: dict[str, Any] = {"tools": [tool], "max_tokens": 200}
        text = post("/v1/messages", messages=CHAT[-1:], stream=True, **asked).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        (use,) = [one["content_block"] for one in events if one.get("content_block", {}).get("type") == "tool_use"]
        pieces = [one["delta"].get("partial_json", "") for one in events if one["type"] == "content_block_delta"]
        use["input"] = from_json("".join(pieces), allow_partial=True)  # as the official client does
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "no JSON"}
        chat = [*CHAT[-1:], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        post("/v1/messages", messages=chat, **asked)

    def test_it_is_not_known_how_the_model_calls(
        self, client: OpenAI, model: Model, says: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = TOOL_TEMPLATE.replace("<tool_call>", "")
        monkeypatch.setattr(model.opened.tokenizer, "chat_template", template)
        says(self.CALL)
        found = answer(client, tools=[TOOL], max_completion_tokens=200).choices[0]
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == (self.CALL, None, "stop")

    def test_the_models_own_way_to_call(
        self, client: OpenAI, model: Model, says: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As its tokenizer declares it."""
        own = {
            "start_anchor": "<assistant>",
            "fields": {"content": {}, "tool_calls": {"open": "[", "close": "]", "repeats": True, "content": "json"}},
        }
        monkeypatch.setattr(model.opened.tokenizer, "response_template", own, raising=False)
        says('[{"name": "add", "arguments": {"a": 5}}]')
        calls = answer(client, tools=[TOOL], max_completion_tokens=200).choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 5}]
