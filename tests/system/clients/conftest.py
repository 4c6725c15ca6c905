"""A service whose model's tokens are written beforehand, and environments with clients of their exact versions."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from main_node.answer import Step
from odmoe.text import StoppedText
from support.chats.script import Script
from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from main_node.report import Report

HERE = Path(__file__).parent
KEY = "a-key-of-the-clients"
INSTALL_S = 240
TOKEN_S = 0.02
"""Between two tokens: those that come at once are one event."""
ASKED = '{"name": "add", "arguments": {"a": 19, "b": 23}}'
CALL = f"<tool_call>\n{ASKED}\n</tool_call>"
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</{{ m.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Hermes and Qwen have it, in short."""


def says(prompt: str) -> str:
    """A model that calls, and then answers with what the tool has said. A prompt may have begun the call."""
    if prompt.rstrip().endswith("<tool_call>"):
        return ASKED
    result = re.search(r"<tool_response>\s*\"?(\d+)", prompt)
    return f"The sum of both is {result[1]}." if result else CALL if "<tools>" in prompt else "Nineteen and more."


@pytest.fixture(scope="module")
def served(demo_store: Callable[[str], Any]) -> Iterator[Served]:
    """With a key, as a service for others has it."""
    with demo_model(demo_store("float32")) as model, pytest.MonkeyPatch.context() as patch:
        tokenizer: Any = model.opened.tokenizer
        tokenizer.chat_template = TEMPLATE
        *_, last = model.cluster.generate([5], 1)
        assert last.report is not None
        report: Report = last.report

        def generate(prompt: list[int], max_new_tokens: int, **how: Any) -> Script:
            return Script(steps(prompt, max_new_tokens, how.get("stop", ())))

        def steps(prompt: list[int], most: int, stop: tuple[str, ...]) -> Iterator[Step]:
            shown = StoppedText(tokenizer, stop, prompt)
            text = says(tokenizer.decode(prompt))
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id][:most]
            for count, token in enumerate(ids, 1):
                shown.push(token)
                end = "stop" if token == tokenizer.eos_token_id else "stop_text" if shown.stopped else None
                finish = end or ("length" if count == most else None)
                time.sleep(TOKEN_S)
                yield Step(token, finish=finish)
                if finish is not None:
                    yield Step(None, replace(report, finish=finish, new_tokens=count))
                    return

        patch.setattr(model.cluster, "generate", generate)
        with serving(model, keys=(KEY,)) as made:
            yield made


@contextmanager
def install(command: list[str], folder: Path) -> Iterator[None]:
    """Skips the tests where the packages cannot be had. What is half there is made again."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        shutil.rmtree(folder)
        pytest.skip(f"the clients were not installed within {INSTALL_S} s")
    if done.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"the clients cannot be installed: {done.stderr.strip()[-300:]}")
    yield


def folder_for(config: pytest.Config, file: Path) -> tuple[Path, Path]:
    """A folder for what a file names, in pytest's cache, and the mark that it is whole."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    folder = Path(config.cache.mkdir(f"clients-{digest}"))  # type: ignore[union-attr]
    return folder, folder / "whole"


@pytest.fixture(scope="session")
def python_of(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The interpreter of an environment with the clients of a file of requirements, which names their dependencies
    too."""

    @cache
    def interpreter(name: str) -> Path:
        asked = HERE / name
        folder, whole = folder_for(request.config, asked)
        found = folder / "venv" / "bin" / "python"
        if not whole.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "venv"], check=True, timeout=INSTALL_S)
            pip = [str(found), "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "-r", str(asked)]
            with install(pip, folder):
                whole.touch()
        return found

    return interpreter


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Path:
    """The folder of a program of node, with its packages."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    asked = HERE / "node" / "package.json"
    folder, whole = folder_for(request.config, asked)
    if not whole.exists():
        shutil.copy(asked, folder)
        with install(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], folder):
            whole.touch()
    for program in (HERE / "node").glob("*.mjs"):
        shutil.copy(program, folder)
    return folder
