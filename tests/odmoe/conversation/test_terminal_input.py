"""What keys make of a message, typed into the line editor itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from odmoe.conversation import terminal_input
from odmoe.conversation.terminal_input import TerminalInput, history_file


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda stdout: DummyOutput())
    with create_pipe_input() as given, create_app_session(input=given, output=DummyOutput()):
        yield given


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello\r", "hello"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("'''\rone\r\rtwo'''\r", "one\n\ntwo"),
        ('"""one"""\r', "one"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\ntwo\r\nthree\x1b[201~\r", "one\ntwo\nthree"),
        ("\r\r  \rhello\r", "hello"),
        ("gone\x03hello\r", "hello"),
        ("\x03hello\r", "hello"),
        ("\x04", None),
        ("\x03\x03", None),
    ],
)
def test_messages(keys: Any, typed: str, message: str | None) -> None:
    said: list[str] = []
    keys.send_text(typed)
    assert TerminalInput(said.append, lambda: True).read() == message


def test_the_history_is_kept_for_its_owner(keys: Any, tmp_path: Path) -> None:
    keys.send_text("remember\r")
    TerminalInput(print, lambda: True).read()
    assert history_file() == tmp_path / "state" / "odmoe" / "chat-history"
    assert history_file().stat().st_mode & 0o077 == 0
    keys.send_text("\x1b[A\r")
    assert TerminalInput(print, lambda: True).read() == "remember"
    assert terminal_input.PROMPT.strip()
