"""/tokenize and /detokenize, beside the tokenizer itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2
import pytest

if TYPE_CHECKING:
    from odmoe.api.model import Model
    from support.machines.http_service import Served


def post(served: Served, path: str, **asked: Any) -> Any:
    return httpx2.post(f"{served.url}{path}", json=asked).json()


@pytest.mark.parametrize("text", ["Natalia sold clips", "größer\n", "</s> in a text", "a " * 2000])
def test_texts(served: Served, model: Model, text: str) -> None:
    tokenizer = model.opened.tokenizer
    found = post(served, "/tokenize", prompt=text, return_token_strs=True)
    assert found["tokens"] == tokenizer(text)["input_ids"]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    plain = post(served, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert plain == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert post(served, "/detokenize", tokens=plain)["prompt"] == tokenizer.decode(plain)


def test_a_chat(served: Served, model: Model) -> None:
    chat = [{"role": "user", "content": "hi"}]
    found = post(served, "/tokenize", model="demo-moe", messages=chat)
    assert found["tokens"] == model.opened.tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("path", "asked", "says"),
    [
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"prompt": 5}, "prompt is not text"),
        ("/tokenize", {"prompt": "a" * (16 * 65_536 + 1)}, "at most 1048576 are taken here"),
        ("/tokenize", {"prompt": "a b" * 60_000}, "more than 65536 tokens"),
        ("/detokenize", {"tokens": [2048]}, "tokens has 2048; allowed: 0 to 2047"),
        ("/detokenize", {"tokens": ["a"]}, "tokens has a; allowed"),
        ("/detokenize", {"model": "other", "tokens": []}, "'other' does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served: Served, path: str, asked: dict[str, Any], says: str) -> None:
    assert says in post(served, path, **asked)["error"]["message"]
