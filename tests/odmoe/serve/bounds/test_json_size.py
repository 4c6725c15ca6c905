"""What a body's JSON may hold: counted as a parser finds it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odmoe.serve.api_error import ApiError
from odmoe.serve.bounds import json_size
from odmoe.serve.bounds.json_size import check_json_size
from odmoe.serve.openai.requests import ChatRequest, CompletionRequest, read_object, to_request
from odmoe.serve.request_fields import UnknownFields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é') | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\[{,'), inner),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Texts and names, containers, depth."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    texts = sum(one[0] for one in inner) + (len(value) if isinstance(value, dict) else 0)
    return texts, 1 + sum(one[1] for one in inner), 1 + max((one[2] for one in inner), default=0)


@given(VALUES, st.sampled_from([None, 1]))
def test_counts_are_a_parsers(value: Any, indent: int | None) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    texts, containers, depth = counted(json.loads(body))
    for name, count in (("MOST_TEXTS", texts), ("MOST_CONTAINERS", containers), ("MOST_DEPTH", depth)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_size, name, count)
            check_json_size(body)
            patch.setattr(json_size, name, count - 1)
            with pytest.raises(ApiError):
                check_json_size(body)


def parse(kind: Any, body: bytes) -> Any:
    return to_request(kind, read_object(body), UnknownFields(True, print))


HEAD = b'{"model": "m", "prompt": "a", '
LARGE: dict[str, Callable[[], bytes]] = {
    "names": lambda: HEAD + b",".join(b'"k%d": 1' % number for number in range(900_000)) + b"}",
    "empty lists": lambda: b'{"prompt": [' + b"[]," * 4_000_000 + b"[]]}",
    "empty objects": lambda: b'{"prompt": [' + b"{}," * 4_000_000 + b"{}]}",
    "deep": lambda: b'{"prompt": ' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}",
    "texts": lambda: b'{"prompt": [' + b'"",' * 4_000_000 + b'""]}',
    "integers": lambda: b'{"prompt": [' + b"1," * 7_000_000 + b"1]}",
    "fractions": lambda: b'{"prompt": [' + b"1.5," * 1_000_000 + b"1]}",
    "words": lambda: b'{"prompt": [' + b"true," * 1_000_000 + b"1]}",
    "long numbers": lambda: b'{"prompt": [' + b"1" * 4000 + b"]}",
    "an endless number": lambda: b'{"seed": ' + b"1" * 15_000_000 + b"}",
    "an endless fraction": lambda: b'{"temperature": 0.' + b"1" * 15_000_000 + b"}",
    "blanks": lambda: b'{"prompt": ' + b" " * 15_000_000 + b"1}",
    "only quotes": lambda: b'"' * 15_000_000,
    "only commas": lambda: b"," * 15_000_000,
    "only backslashes": lambda: b"\\" * 15_000_000,
    "two bytes a character": lambda: '{"prompt": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_would_take_long_is_refused_soon(kind: str) -> None:
    body = LARGE[kind]()
    began = time.thread_time()
    with pytest.raises(ApiError) as found:
        parse(CompletionRequest, body)
    assert (found.value.status, found.value.code) == (400, "invalid_json")
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("place", ["", "stream_options"])
def test_many_unknown_names_are_one_error(place: str) -> None:
    strangers = {f"k{number}": 1 for number in range(60_000)}
    body = {"model": "m", "prompt": "a"} | ({place: strangers} if place else strangers)
    with pytest.raises(ApiError) as found:
        parse(CompletionRequest, json.dumps(body).encode())
    assert found.value.param == (f"{place}.k0" if place else "k0")


def test_what_clients_send_is_taken() -> None:
    code = 'if (a["b\\\\"] == "{[,]}") { return [1, 2, "x"]; }\n' * 20_000
    turn = {"role": "user", "content": code[:2000]}
    chat = {"model": "m", "messages": [*[turn] * 5000, {"role": "user", "content": code}]}
    assert len(parse(ChatRequest, json.dumps(chat).encode()).messages) == 5001
    ids = {"model": "m", "prompt": [list(range(100_000, 131_072))] * 30}
    assert len(parse(CompletionRequest, json.dumps(ids).encode()).prompts) == 30


def test_names_are_not_repeated_at_length() -> None:
    with pytest.raises(ApiError) as found:
        parse(CompletionRequest, json.dumps({"model": "m", "prompt": "a", "x" * 1_000_000: 1}).encode())
    assert len(found.value.message) < 500
    assert len(found.value.param or "") <= 100
