"""The command line, in this process and in one of its own; small checkpoints."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ODMOE = Path(sys.executable).with_name("odmoe")


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str


class Screen(io.TextIOWrapper):
    """A stream in memory, which may say that it is a terminal."""

    def __init__(self, text: bytes = b"", tty: bool = False) -> None:
        super().__init__(io.BytesIO(text), encoding="utf-8", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """`cli("generate", ..., stdin=b"", tty=False)`: the command line in this process."""

    def call(*args: str, stdin: bytes | None = None, tty: bool = False) -> Said:
        from odmoe.cli.main import run

        out, err = Screen(), Screen(tty=tty)
        monkeypatch.setattr(sys, "argv", ["odmoe", *args])
        monkeypatch.setattr(sys, "stdin", Screen(stdin or b"", tty=stdin is None))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        try:
            code = run()
        finally:
            monkeypatch.undo()
        return Said(code, out.text(), err.text())

    return call


@dataclass
class Running:
    """A command in a process and a session of its own, as a shell starts it."""

    process: subprocess.Popen[bytes]
    mark: str
    began: float = field(default_factory=time.monotonic)

    def left_behind(self) -> list[str]:
        """Processes that the command started, or was, and that are still there."""
        return Marked()(self.mark)


class Marked:
    """Finds the processes that carry a mark in their environment, as what they start does too."""

    name = "TEST_MARK_OF_ODMOE"

    def __call__(self, mark: str) -> list[str]:
        """Their numbers and command lines."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{self.name}={mark}".encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{folder.name} {line}")
            except OSError:
                continue
        return found


@pytest.fixture(scope="session")
def marked() -> Marked:
    """`marked(mark)`: the processes that carry it; `marked.name`: the variable to set."""
    return Marked()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`start("generate", ...)`: the command line as a person starts it."""
    made: list[Running] = []

    def begin(*args: str, stdin: Any = subprocess.DEVNULL, **environment: str) -> Running:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [ODMOE, *args], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {Marked.name: mark} | environment,
            # A shell that runs the tests in its background has them ignore Ctrl-C, and their children with them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        made.append(Running(process, mark))
        return made[-1]

    yield begin
    for running in made:
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="session")
def expected(demo: Path) -> Callable[[str, int], tuple[list[int], str]]:
    """(prompt, tokens) -> what Transformers answers with the checkpoint as it is stored: token ids and their text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, experts_implementation="eager")

    def answer(prompt: str, count: int) -> tuple[list[int], str]:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        ids = out[0, inputs["input_ids"].shape[1] :].tolist()
        return ids, tokenizer.decode(ids, skip_special_tokens=True)

    return answer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of two layers and three experts, in two weight files; no tokenizer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    MixtralForCausalLM(config).save_pretrained(path, max_shard_size="100KB")
    return path
