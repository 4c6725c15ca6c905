"""One model for the tests of the Python interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import odmoe
from support.machines.http_service import Served, serving

CHAT = (
    "{% for m in messages %}{{ raise_exception('no tools') if m['role'] == 'tool' }}"
    "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant:' }}"
)
"""A chat template; the demo model has none."""


@pytest.fixture(scope="session")
def model(demo: Path) -> Iterator[odmoe.Model]:
    """The demo model on an embedded cluster without a shadow."""
    with odmoe.load(demo, shadow="none", threads=1) as loaded:
        yield loaded


@pytest.fixture
def chats(model: odmoe.Model, monkeypatch: pytest.MonkeyPatch) -> odmoe.Model:
    """The same model with a chat template."""
    monkeypatch.setattr(model.opened.tokenizer, "chat_template", CHAT)
    return model


@pytest.fixture(scope="session")
def service(model: odmoe.Model) -> Iterator[Served]:
    """An `odmoe serve` of the same model."""
    with serving(model) as made:
        yield made
