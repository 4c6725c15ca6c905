"""The training script: a checkpoint that Transformers reads, a loss that falls, and a start after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train.py"
SMALL = ["--batch", "4", "--length", "48", "--seconds", "0"]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a shell has put us behind
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, gsm8k: list[str]) -> Path:
    """The test prompts, in both forms that a .jsonl file may have."""
    folder = tmp_path_factory.mktemp("texts")
    halves = [prompt.removeprefix("Question: ").split("\n")[0] for prompt in gsm8k]
    lines = [{"question": half, "answer": "It is <<1+1=2>>2."} for half in halves] + [{"text": p} for p in gsm8k]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "b.txt").write_text("\n".join(gsm8k))
    return folder


@pytest.mark.parametrize("shape", ["demo", "fine"])
def test_a_checkpoint_that_works(shape: str, texts: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / shape
    held = ["--held-out", str(texts / "b.txt")]
    process = start(str(out), "--shape", shape, "--data", str(texts), *held, "--steps", "14", "--lr", "0.02", *SMALL)
    told, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    figures = json.loads(told)
    assert figures["validation loss, nats a token"] < figures["validation loss before training"] - 0.2
    assert figures["steps"] == 14
    assert figures["loss on b.txt"] > 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == {"demo": "mixtral", "fine": "qwen3_moe"}[shape]
    card = (out / "README.md").read_text()
    assert "scripts/train.py" in card
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=out, check=False).returncode == 0
    assert not (out / "training.pt").exists()
    flags = ["generate", "-q", "-m", str(out), "-n", "3", "--shadow", "none", "--threads", "1", "Question:"]
    said = subprocess.run([Path(sys.executable).with_name("odmoe"), *flags], check=False, capture_output=True)
    assert said.returncode == 0, said.stderr


def test_interrupted_it_goes_on(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(str(out), "--data", str(texts), "--steps", "100000", *SMALL)
    until = time.monotonic() + 200
    while not out.is_dir() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(8)  # it tokenises, then trains; interrupted anywhere in that it leaves nothing half-written
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    left = {path.name for path in out.iterdir()}
    assert left <= {"training.pt"}
    if left:
        assert process.returncode == 130
        again = start(str(out), "--data", str(texts), "--steps", "1", *SMALL)
        told, errors = again.communicate(timeout=200)
        assert again.returncode == 0, errors
        assert "going on from step" in errors
        assert json.loads(told)["steps"] > 1


def test_what_cannot_be(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "only"}')
    for args, words in (
        (["--data", str(tmp_path / "none")], "is not there"),
        (["--data", str(tmp_path / "bad.jsonl")], "bad.jsonl, line 1"),
        (["--data", str(texts), "--steps", "0", "--seconds", "0"], "must end"),
        (["--data", str(texts), "--length", "9999"], "allowed: 2 to 1024"),
    ):
        process = start(str(tmp_path / "out"), *args)
        _, errors = process.communicate(timeout=100)
        assert process.returncode != 0
        assert words in errors
