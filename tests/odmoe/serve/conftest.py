"""One demo model and one server a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from openai import OpenAI

    from odmoe.api.model import Model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def certificates_once() -> None:
    """Every HTTP client would read the certificates of the machine again: a tenth of these tests' time."""
    import httpcore2

    httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)


@pytest.fixture(scope="module")
def model(demo_store: Callable[[str], Any]) -> Iterator[Model]:
    with demo_model(demo_store("float32")) as made:
        made.opened.tokenizer.chat_template = TEMPLATE
        yield made


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as made:
        yield made


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer has large pieces until it is given up: more than any buffer."""
    from main_node.answer import Step
    from odmoe.api.text_answer import Piece, TextAnswer
    from scheduler.errors import RequestCancelledError

    def read(self: Any, *given: Any) -> Iterator[Piece]:
        while not self._given_up.wait(0.005):
            yield Piece("x" * (1 << 20), Step(5))
        raise RequestCancelledError("given up")

    monkeypatch.setattr(TextAnswer, "_read", read)
