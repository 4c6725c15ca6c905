"""Other people's text in errors, logs and terminals: one line, nothing that steers a terminal, bounded."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from main_node.engine.peer import PeerHandler
from odmoe.clusters.process import OneLineFormatter
from odmoe.commands.shared.exit import outcome
from odmoe.log_thread import LogThread
from odmoe.machines.table import cells, empty_row
from odmoe.serve.access_log import FORMATS, AccessLog
from odmoe.terminal import Terminal
from scheduler.errors import ClusterError, HostError, LinkError, ODMoEError
from scheduler.one_line import MOST, escape, one_line
from wire.messages import Failed

HOSTILE = {
    "line breaks": "a\nERROR root: forged\r\n\x0b\x0c\x85\u2028\u2029b",
    "escape sequences": "\x1b[2J\x1b[31mred\x1b]0;title\x07\x1bP$q\x1b\\",
    "C1 controls": "".join(map(chr, range(0x7F, 0xA0))),
    "C0 controls": "".join(map(chr, range(0x20))),
    "direction": "\u202eevil\u202c \u2066x\u2069 \u200f\u200b\ufeff",
    "surrogates": "\ud800 \udfff",
    "markup": "[red]x[/red] [/nothing] [link=file:///etc/passwd]y[/link] [",
    "length": "x" * (1 << 20),
    "length of escapes": "\x1b" * (1 << 20),
}
each = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def check(shown: str, most: int = 6 * MOST + 200) -> None:
    """One line that may be printed."""
    assert shown.isprintable(), ascii(shown)[:300]
    assert len(shown) <= most
    shown.encode()


@given(st.text())
def test_any_text(text: str) -> None:
    check(one_line(text))
    check(escape(text), 10 * len(text) + 1)
    if text.isprintable():
        assert one_line(text) == escape(text) == text


def test_how_it_is_written() -> None:
    assert one_line("a\x1b[31m\r\u202e\ud800\x9b") == r"a\x1b[31m\r\u202e\ud800\x9b"
    assert one_line("two\n  lines \r\nare one") == "two lines are one"
    assert one_line("é 日本 😀 [red]") == "é 日本 😀 [red]"
    assert one_line("x" * 10 + "end", most=8) == "xxxxxx... (13 characters) ...nd"


@each
def test_an_error(text: str) -> None:
    for kind in (ODMoEError, LinkError, HostError):
        check(str(kind(f"the peer says: {text}")))


@each
def test_what_a_peer_says(text: str) -> None:
    heard: list[Failed] = []
    peer = PeerHandler("worker 3", heard.append, lambda error: None)  # type: ignore[arg-type]
    peer.on_message(Failed(text[:1024], text, 1))
    check(heard[0].message)
    check(heard[0].error)
    check(str(ClusterError(heard[0].message)))


@each
def test_a_log(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("a logger")
    logger.addHandler(handler)
    logger.warning("refused %s", text)
    assert stream.getvalue().endswith("\n")
    check(stream.getvalue()[:-1])
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed")
    for line in stream.getvalue().split("\n"):
        check(line)


@each
def test_a_line_of_the_log_thread(text: str) -> None:
    lines: list[str] = []
    with LogThread() as log:
        log.line(f"GET {text}", lines.append)
    check(lines[0], 10 * len(text))


@each
@pytest.mark.parametrize("form", FORMATS)
def test_a_request(text: str, form: str) -> None:
    """Its path and its model are the client's."""
    lines: list[str] = []

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        scope["state"]["record"].model = text

    path = "/v1/" + text
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(errors="surrogatepass")}
    asyncio.run(AccessLog(app, lines.append, FORMATS[form])(scope, None, None))  # type: ignore[arg-type]
    check(lines[0], 8000)
    if form == "json":
        assert json.loads(lines[0])["path"].startswith("/v1/")


@each
def test_a_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich's markup is no markup, and its own escapes are the only ones."""
    text = text[: 1 << 12]
    for is_terminal in (False, True):
        stream = io.StringIO()
        terminal = Terminal()
        terminal.console = Console(
            file=stream, force_terminal=is_terminal, color_system=None, width=80, highlight=False
        )
        terminal.notify(text)
        terminal.print_always(text)
        terminal.facts(text, {text: text, "the model": text[:100]})
        terminal.table(text, [text], [[text]])
        with terminal.status(text[:1000]) as say:
            say(text[:1000])
        with terminal.progress(text[:1000]) as move:
            move(text[:1000], 1, 2)
        shown = stream.getvalue()
        assert "\x1b[2J" not in shown
        assert "\x1b]0" not in shown
        assert "\u202e" not in shown
        if not is_terminal:
            for line in shown.split("\n"):
                check(line, 1 << 19)
            if "[red]" in text:
                assert shown.count("[red]x[/red] [/nothing]") >= 4


@each
def test_a_command_that_fails(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of ours, and with one of the operating system about a file of that name."""

    def fails(error: Exception) -> None:
        raise error

    for error in (HostError(text), FileNotFoundError(2, "No such file", text)):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        assert outcome(lambda error=error: fails(error)) == 1  # type: ignore[misc]
        check(stream.getvalue().removesuffix("\n"))


@each
def test_a_row_of_a_host(text: str) -> None:
    row = empty_row(None, "10.0.0.1") | {"detail": text, "device": text, "store": text, "loader": text, "state": text}
    for cell in cells(row):
        check(cell)
