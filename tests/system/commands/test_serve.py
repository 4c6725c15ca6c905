"""`odmoe serve` in a process of its own: signals while it loads and while it drains, keys in a file."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import openai
import pytest

from support.machines.processes import Starter
from support.machines.served_process import SERVED_SMALL, address_of, client_of


def test_ctrl_c_is_as_sigterm(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SERVED_SMALL)
    stream = client_of(address_of(running)).completions.create(
        model="demo-moe", prompt="Natalia", max_tokens=30, stream=True
    )
    assert next(iter(stream)).choices
    running.interrupt(signal.SIGINT)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert running.finish()[0] == 0


def test_a_second_signal_ends_it_at_once(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SERVED_SMALL)
    stream = client_of(address_of(running)).completions.create(
        model="demo-moe", prompt="Natalia", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    running.interrupt(signal.SIGTERM)
    assert running.process.stderr is not None
    assert running.process.stderr.readline().startswith(b"page for a browser: ")
    assert b"stopping: 1 request under way" in running.process.stderr.readline()
    running.interrupt(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="was stopped before the answer was complete"):
        list(stream)
    code, _, err = running.finish()
    assert code == 128 + signal.SIGTERM, err.decode()
    assert err.endswith(b"terminated\n")


def test_interrupted_while_it_loads(start: Starter, demo: Path) -> None:
    running = start("serve", "-m", str(demo), *SERVED_SMALL)
    running.wait_until_caught()
    running.interrupt(signal.SIGTERM)
    running.check_interrupted(signal.SIGTERM)


def test_quiet_and_named(start: Starter, demo: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough\n\n  another-key-long-enough  \n")
    running = start(
        "serve", "-q", "-m", str(demo), *SERVED_SMALL, "--api-key-file", str(keys), "--model-name", "demo-moe"
    )
    url = address_of(running)
    assert httpx2.get(f"{url}/models").status_code == 401
    header = {"Authorization": "Bearer another-key-long-enough"}
    assert httpx2.get(f"{url}/models", headers=header).json()["data"][0]["id"] == "demo-moe"
    running.interrupt(signal.SIGTERM)
    assert running.finish() == (0, b"", b"")
