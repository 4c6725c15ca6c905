"""The training of token-wise predictors: what it writes, against the checkpoint's routing as Transformers has it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoint import token_predictor
from checkpoint.gates import Gates
from scripts.models import train_predictor


@pytest.fixture(scope="module")
def demo_model(demo: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()


def accuracy(model: Any, path: Path, ids: torch.Tensor, decoded: int) -> float:
    """Over the last `decoded` tokens: the part of each gate's top-2 that the token before foretold. Rows and routes are
    those of one plain forward over the whole answer, the matrices read by safetensors."""
    rows: dict[int, torch.Tensor] = {}
    handles = [
        layer.mlp.gate.register_forward_pre_hook(lambda _, args, n=n: rows.update({n: args[0]}))
        for n, layer in enumerate(model.model.layers)
    ]
    with torch.inference_mode():
        logits = model(ids, output_router_logits=True).router_logits
    for handle in handles:
        handle.remove()
    right = []
    with safe_open(path, "pt") as file:
        for n, said in enumerate(logits):
            expected = (rows[n] @ file.get_tensor(f"layers.{n}.weight").T)[-decoded - 1 : -1].topk(2).indices
            chosen = said[-decoded:].topk(2).indices
            right.append((expected[:, :, None] == chosen[:, None, :]).any(1).float().mean())
    return float(torch.stack(right).mean())


@pytest.fixture(scope="module")
def answered(demo_model: Any, demo: Path, gsm8k: list[str]) -> torch.Tensor:
    """A prompt that nothing was trained on, and 40 tokens of its answer."""
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(demo)(gsm8k[3], return_tensors="pt")
    out: torch.Tensor = demo_model.generate(
        **inputs, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    return out


def test_the_demo_models_own_predictor_foretells(demo_model: Any, demo: Path, answered: torch.Tensor) -> None:
    path = demo / token_predictor.FILE
    assert accuracy(demo_model, path, answered, 40) > 0.5  # chance is a quarter
    facts = token_predictor.load(path, Gates(demo_model)).facts
    assert facts["accuracy"] > 0.5
    assert re.search(r"train_predictor(\.py)? models/demo-moe$", facts["command"])


def test_a_few_answers_are_enough_to_be_better_than_chance(
    demo_model: Any,
    demo: Path,
    answered: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(demo / name, tmp_path / name)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {token_predictor.FILE}\n")
    argv = [train_predictor.__file__, str(tmp_path), "--quick", "--samples", "3", "--tokens", "30"]
    monkeypatch.setattr(sys, "argv", argv)
    assert train_predictor.main() == 0
    told = capsys.readouterr().out
    path = tmp_path / token_predictor.FILE
    assert accuracy(demo_model, path, answered, 40) > 0.35
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path, check=False).returncode == 0
    facts = token_predictor.load(path, Gates(demo_model)).facts
    rows = [json.loads(line) for line in told.splitlines() if line.startswith('{"layer"')]
    assert [row["layer"] for row in rows] == list(range(8))
    assert facts["accuracy by layer"] == {str(row["layer"]): row["accuracy"] for row in rows}
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert facts["answers"] == 3
    assert facts["seed"] == 0
    assert facts["tokens"]["held out"] < facts["tokens"]["learned"]


def test_what_cannot_be(
    tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, words in (
        ((tmp_path,), "holds no config.json"),
        ((demo, "--samples", "1"), "allowed: 2 to 20"),
        ((demo, "--samples", "21"), "allowed: 2 to 20"),
    ):
        monkeypatch.setattr(sys, "argv", [train_predictor.__file__, *map(str, args)])
        with pytest.raises(SystemExit) as left:
            train_predictor.parse()
        assert left.value.code == 2
        assert words in capsys.readouterr().err
