"""The training script: a checkpoint that Transformers reads, a loss that falls, and a start after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from main_node.answer import collect
from scripts.models import train

SMALL = ["--batch", "4", "--length", "32", "--seconds", "0"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(*args)`: the script in this process, its shapes with fewer layers, and losses of fewer stretches."""
    monkeypatch.setattr(train, "loss_on", partial(train.loss_on, batches=2))
    for shape, (family, values) in train.SHAPES.items():
        monkeypatch.setitem(train.SHAPES, shape, (family, values | {"num_hidden_layers": 2}))

    def call(*args: str) -> None:
        monkeypatch.setattr(sys, "argv", [train.__file__, *args])
        train.main()

    return call


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, gsm8k: list[str]) -> Path:
    """The test prompts, in both forms that a .jsonl file may have."""
    folder = tmp_path_factory.mktemp("texts")
    halves = [prompt.removeprefix("Question: ").split("\n")[0] for prompt in gsm8k]
    lines = [{"question": half, "answer": "It is <<1+1=2>>2."} for half in halves] + [{"text": p} for p in gsm8k]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "b.txt").write_text("\n".join(gsm8k))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["demo", "fine"])
def test_a_checkpoint_that_works(shape: str, texts: Path, tmp_path: Path, run: Any, capsys: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings
    from odmoe.stores import prepare_store

    out = tmp_path / shape
    held = ["--held-out", str(texts / "b.txt")]
    run(str(out), "--shape", shape, "--data", str(texts), *held, "--steps", "14", "--lr", "0.02", *SMALL)
    figures = json.loads(capsys.readouterr().out)
    assert figures["validation loss, nats a token"] < figures["validation loss before training"] - 0.2
    assert figures["steps"] == 14
    assert figures["loss on b.txt"] > 0
    model = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager")
    assert model.config.model_type == {"demo": "mixtral", "fine": "qwen3_moe"}[shape]
    card = (out / "README.md").read_text()
    assert ".venv/bin/python -m scripts.models.train " in card
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=out, check=False).returncode == 0
    assert not (out / "training.pt").exists()
    prompt = [0, 5, 17, 300]
    told = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=1)
    cluster = EmbeddedCluster(
        Settings(model=shape, shadow="none", threads=1), prepare_store(str(out), None, "bfloat16")
    )
    try:
        assert collect(cluster.generate(prompt, 3, ignore_eos=True))[0] == told[0, 4:].tolist()
    finally:
        cluster.close()


@pytest.mark.slow
def test_interrupted_it_goes_on(
    texts: Path, tmp_path: Path, run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal in the middle of a step; the next start takes it up, with a model and an optimiser of its own."""
    out, drawn, draw = tmp_path / "out", 0, train.draw

    def interrupting(*args: Any) -> Any:
        nonlocal drawn
        if args[1] == 4:  # those of a step, not of a measure
            drawn += 1
            if drawn == 6:
                signal.raise_signal(signal.SIGINT)
        return draw(*args)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put us behind
    try:
        monkeypatch.setattr(train, "draw", interrupting)
        with pytest.raises(SystemExit) as ended:
            run(str(out), "--data", str(texts), "--steps", "100000", *SMALL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert "interrupted at step 5; the same command goes on" in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in out.iterdir()} == {"training.pt"}
    monkeypatch.setattr(train, "draw", draw)
    run(str(out), "--data", str(texts), "--steps", "7", *SMALL)
    said = capsys.readouterr()
    assert "going on from step 5" in said.err
    assert json.loads(said.out)["steps"] == 7


@pytest.mark.slow
def test_training_starts_from_another_model(texts: Path, tmp_path: Path, run: Any, capsys: Any) -> None:
    """What has the same name and shape is copied, the experts are not, and the tokenizer is that of the other model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    demo = Path("models/demo-moe")
    out = tmp_path / "many"
    rest = ["--data", str(texts), "--steps", "1", "--lr", "0", *SMALL]
    run(str(out), "--shape", "many", "--start-from", str(demo), *rest)
    copied, source = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out, demo))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"):
        assert copied[name].equal(source[name])
    assert copied["model.layers.0.mlp.gate.weight"].shape == (64, 192)
    assert AutoTokenizer.from_pretrained(out)("HAMLET") == AutoTokenizer.from_pretrained(demo)("HAMLET")
    assert "start from models/demo-moe" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit, match="no weight of the same name and shape"):
        run(str(tmp_path / "deep"), "--shape", "shared", "--start-from", str(demo), *rest)


def test_what_cannot_be(texts: Path, tmp_path: Path, run: Any, capsys: Any) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "only"}')
    for args, words in (
        (["--data", str(tmp_path / "none")], "is not there"),
        (["--data", str(tmp_path / "bad.jsonl")], "bad.jsonl, line 1"),
        (["--data", str(texts), "--steps", "0", "--seconds", "0"], "must end"),
        (["--data", str(texts), "--length", "9999"], "allowed: 2 to 1024"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(str(tmp_path / "out"), *args)
        assert ended.value.code != 0
        assert words in capsys.readouterr().err + str(ended.value.code)
