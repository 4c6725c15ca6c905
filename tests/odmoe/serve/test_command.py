"""`odmoe serve` in a process of its own: from its start to its end by a signal."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

from support.machines.cli import CommandLine, check_one_line
from support.machines.processes import Running, Starter, starter, wait_until_gone

if TYPE_CHECKING:
    from openai import OpenAI

SMALL = ("--shadow", "none", "--workers", "2", "--threads", "1", "--bind", "127.0.0.1:0")


@pytest.fixture
def start() -> Iterator[Starter]:
    with starter() as made:
        yield made


def address(running: Running) -> str:
    """What it says when it serves."""
    assert running.process.stderr is not None
    for line in running.process.stderr:
        if found := re.fullmatch(rb"serving demo-moe at (http://127\.0\.0\.1:\d+/v1)\n", line):
            return found[1].decode()
    pytest.fail(f"it ended with {running.process.wait()}")


def client(url: str) -> OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_it_with_its_answers(start: Starter, demo: Path, number: signal.Signals) -> None:
    running = start("serve", "-m", str(demo), *SMALL)
    url = address(running)
    stream = client(url).completions.create(model="demo-moe", prompt="Natalia", max_tokens=30, stream=True)
    text = next(iter(stream)).choices[0].text
    running.interrupt(number)
    events = list(stream)
    assert text
    assert events[-1].choices[0].finish_reason == "length"
    code, out, err = running.finish()
    assert (code, out) == (0, b""), err.decode()
    assert b"stopping: 1 request under way, for at most 600 s; once more to stop at once\n" in err
    assert b" tokens=30 " in err
    wait_until_gone(running.mark)


def test_a_second_signal_ends_it_at_once(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SMALL)
    stream = client(address(running)).completions.create(
        model="demo-moe", prompt="Natalia", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    running.interrupt(signal.SIGTERM)
    assert running.process.stderr is not None
    assert b"stopping: 1 request under way" in running.process.stderr.readline()
    running.interrupt(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="was stopped before the answer was complete"):
        list(stream)
    code, _, err = running.finish()
    assert code == 128 + signal.SIGTERM, err.decode()
    assert err.endswith(b"terminated\n")


def test_interrupted_while_it_loads(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SMALL)
    running.wait_until_caught()
    running.interrupt(signal.SIGTERM)
    running.check_interrupted(signal.SIGTERM)


def test_quiet_and_named(start: Starter, demo: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough\n\n  another-key-long-enough  \n")
    running = start("serve", "-q", "-m", str(demo), *SMALL, "--api-key-file", str(keys), "--model-name", "demo-moe")
    url = address(running)
    assert httpx2.get(f"{url}/models").status_code == 401
    header = {"Authorization": "Bearer another-key-long-enough"}
    assert httpx2.get(f"{url}/models", headers=header).json()["data"][0]["id"] == "demo-moe"
    running.interrupt(signal.SIGTERM)
    assert running.finish() == (0, b"", b"")


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
    (["--cluster", "cluster.yaml"], ["cluster.yaml", "--cluster auto"]),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_settings(cli: CommandLine, demo: Path, flags: list[str], words: list[str]) -> None:
    check_one_line(cli("serve", "-m", str(demo), *flags), 2, "ConfigError", words)


def test_a_port_in_use_is_told_before_anything_is_loaded(
    cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.serve.start.open_model", lambda *given: pytest.fail("a model was opened"))
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
