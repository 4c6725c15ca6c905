"""One model for the tests of the Python interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import odmoe

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
