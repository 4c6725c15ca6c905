"""`odmoe chat` as a person uses it: on a terminal of 80 columns, with a service of our own behind it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from support.machines.processes import Starter
from support.machines.served_process import SERVED_SMALL, address_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WAIT_S = 60
Talk = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    """`talk("--url", ...)`: `odmoe chat` on a terminal."""
    running = []

    def start(*args: str) -> pexpect.spawn[str]:
        env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path)}
        command = ["-m", "odmoe", "chat", *args]
        found = pexpect.spawn(sys.executable, command, env=env, dimensions=(40, 80), encoding="utf-8", timeout=WAIT_S)
        running.append(found)
        return found

    yield start
    for one in running:
        one.close(force=True)


@pytest.fixture
def chatty(demo: Path, tmp_path: Path) -> Path:
    """The demo model with a chat template."""
    model = shutil.copytree(demo, tmp_path / "chatty" / "demo-moe")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def test_a_conversation_by_url(start: Starter, chatty: Path, talk: Talk, tmp_path: Path) -> None:
    running = start("serve", "-m", str(chatty), *SERVED_SMALL)
    address = address_of(running)
    chat = talk("--url", address, "-n", "900")
    chat.expect("demo-moe - /help")
    chat.expect(">>>")
    chat.send("/stats\r")
    chat.expect("each answer: on")
    chat.expect(">>>")
    chat.send("Natalia\r")
    chat.expect(r"\w+ \w+ \w+")
    chat.sendintr()
    chat.expect_exact("(stopped)")
    chat.expect(">>>")
    chat.send(f"/save {tmp_path}/talk.json\r")
    chat.expect("saved 1 turn in")
    assert re.search(r'"assistant",\s+"content": "\S', (tmp_path / "talk.json").read_text()), "what came is kept"
    chat.send("/reset\r")
    chat.expect("empty")
    chat.expect(">>>")
    chat.sendintr()
    chat.expect("again")
    chat.expect(">>>")
    chat.sendintr()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0

    chat = talk("--url", address, "-n", "8")
    chat.expect(">>>")
    chat.send("Natalia\r")
    chat.expect("cut at the most tokens")
    chat.expect(">>>")
    chat.kill(signal.SIGTERM)
    chat.expect("terminated")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 128 + signal.SIGTERM
