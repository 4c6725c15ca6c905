"""Bodies drawn from the types of OpenAI's own client, some fields replaced by any JSON: each gets an answer or an error
that says why, and none an error of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams

from support.machines.http_service import Served, demo_model, is_idle, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLES = 150
LONGEST = 3
"""Tokens of an answer."""
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    PLAIN, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=8), one, max_size=3)
)
LENGTHS = ("max_tokens", "max_completion_tokens", "n", "best_of")
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": JSON})


@pytest.fixture(scope="module")
def served(demo_store: Callable[[str], Any]) -> Iterator[Served]:
    with demo_model(demo_store("float32")) as model, serving(model) as made:
        yield made


@st.composite
def bodies(draw: Callable[[Any], Any], params: Any, needed: dict[str, Any]) -> bytes:
    """A body of those types. Most have the fields that are needed; numbers of tokens and answers are small."""
    keys = sorted(params.__annotations__)
    body = {key: draw(JSON) for key in draw(st.lists(st.sampled_from(keys), max_size=4, unique=True))}
    body |= {name: draw(value) for name, value in needed.items() if draw(st.integers(0, 9))}
    for name in LENGTHS:
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], LONGEST)
    if draw(st.integers(0, 9)):
        body["max_tokens"] = LONGEST
    text = bytearray(json.dumps(body).encode())
    if not draw(st.integers(0, 9)) and len(text) > 2:
        text[draw(st.integers(0, len(text) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(text)


TEXT = bodies(TextParams, {"model": st.just("demo-moe"), "prompt": st.text(max_size=30) | JSON})
CHAT = bodies(ChatParams, {"model": st.just("demo-moe"), "messages": st.lists(MESSAGE, max_size=3) | JSON})
HEADERS = {"Content-Type": "application/json"}


def check(served: Served, path: str, body: bytes) -> None:
    """The answer is whole, or an error in the form of that API."""
    found = httpx2.post(f"{served.url}{path}", content=body, headers=HEADERS, timeout=60)
    assert found.status_code == 200 or 400 <= found.status_code < 500, (body, found.status_code, found.text)
    if found.headers["content-type"].startswith("text/event-stream"):
        assert found.text.endswith("data: [DONE]\n\n"), (body, found.text)
    elif found.status_code == 200:
        assert found.json()["choices"], (body, found.text)
    else:
        error = found.json()["error"]
        assert isinstance(error["message"], str), body
        assert error["message"], body
        assert error["type"], body


hammer = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("path", "drawn"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_no_body_is_an_error_of_the_server(path: str, drawn: Any, served: Served) -> None:
    @hammer
    @given(drawn)
    def run(body: bytes) -> None:
        check(served, path, body)

    run()
    until(lambda: is_idle(served))
    answer = served.client().completions.create(model="demo-moe", prompt="HAMLET", max_tokens=2, temperature=0)
    assert answer.choices[0].finish_reason == "length"
