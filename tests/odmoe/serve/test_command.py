"""`odmoe serve`: its settings, and a process of it from its start to its end by a signal. More of these:
tests/system/commands."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from scheduler.errors import ClusterError
from support.machines.cli import CommandLine, check_one_line
from support.machines.processes import Starter, starter, wait_until_gone
from support.machines.served_process import SERVED_SMALL, address_of, client_of


@pytest.fixture
def start() -> Iterator[Starter]:
    with starter() as made:
        yield made


@pytest.mark.slow
def test_a_signal_ends_it_with_its_answers(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SERVED_SMALL)
    url = address_of(running)
    stream = client_of(url).completions.create(model="demo-moe", prompt="Natalia", max_tokens=30, stream=True)
    text = next(iter(stream)).choices[0].text
    running.interrupt(signal.SIGTERM)
    events = list(stream)
    assert text
    assert events[-1].choices[0].finish_reason == "length"
    code, out, err = running.finish()
    assert (code, out) == (0, b""), err.decode()
    assert b"stopping: 1 request under way, for at most 600 s; once more to stop at once\n" in err
    assert b" tokens=30 " in err
    wait_until_gone(running.mark)


WRONG: list[tuple[list[str], list[str]]] = [
    (["--bind", "0.0.0.0:8000"], ["--bind is 0.0.0.0:8000", "no API key", "--api-key-file", "ODMOE_API_KEY"]),
    (["--bind", "example.org:8000"], ["no API key"]),
    (["--bind", "[::]:8000"], ["no API key"]),
    (["--bind", "8000"], ["--bind is 8000", "HOST:PORT"]),
    (["--bind", "192.0.2.1:8000", "--api-key", "a-key-that-is-long-enough"], ["--bind is 192.0.2.1:8000", "address"]),
    (["--api-key", "short"], ["--api-key has a key of 5 characters", "at least 16"]),
    (["--api-key", "a key with spaces in it"], ["--api-key has a key", "without spaces"]),
    (["--api-key-file", "/nowhere"], ["--api-key-file /nowhere cannot be read"]),
    (["--api-key-file", "/dev/null"], ["has no key"]),
    (["--api-key-file", "x", "--api-key", "y"], ["both given"]),
    (["--log-format", "xml"], ["--log-format is 'xml'", "text", "json"]),
    (["--drain-timeout", "-1"], ["--drain-timeout", "-1"]),
    (["--retry", "2"], ["--retry is 2", "embedded"]),
    (["--cluster", "nowhere.yaml"], ["nowhere.yaml"]),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_settings(cli: CommandLine, demo: Path, flags: list[str], words: list[str]) -> None:
    check_one_line(cli("serve", "-m", str(demo), *flags), 2, "ConfigError", words)


def test_a_port_in_use_is_told_before_anything_is_loaded(
    cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.serve.start.start_model", lambda *given: pytest.fail("a model was opened"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        answer = cli("serve", "-m", str(demo), "--bind", f"127.0.0.1:{port}")
    check_one_line(answer, 2, "ConfigError", [f"--bind is 127.0.0.1:{port}", "in use"])


def test_a_model_is_needed(cli: CommandLine) -> None:
    check_one_line(cli("serve"), 2, "ConfigError", ["--model is not given"])


def test_the_key_from_the_environment(cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no setting of other commands, and it is not shown."""
    monkeypatch.setenv("ODMOE_API_KEY", "short")
    wrong = cli("serve", "-m", str(demo))
    check_one_line(wrong, 2, "ConfigError", ["ODMOE_API_KEY has a key of 5 characters"])
    assert "short" not in wrong.err
    assert cli("config").code == 0


def test_it_says_that_it_starts(cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, too, where no spinner does: a model takes long to load. Not with --quiet."""

    def start(*_: object) -> NoReturn:
        raise ClusterError("no nodes")

    monkeypatch.setattr("odmoe.serve.start.start_model", start)
    for flags, said in (((), [f"starting {demo}"]), (("--quiet",), [])):
        answer = cli("serve", "-m", str(demo), "--bind", "127.0.0.1:0", *flags)
        assert answer.err.splitlines() == [*said, "odmoe: ClusterError: no nodes"]
