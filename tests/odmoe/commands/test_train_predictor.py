"""The training of token-wise predictors: what it writes, against the checkpoint's routing as Transformers has it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoint.gates import Gates
from checkpoint.prediction import token_predictor
from odmoe.commands.train_predictor import digest
from odmoe.training.domains import training_prompts
from support.machines.cli import CommandLine, check_one_line
from support.paths import ROOT


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


@pytest.mark.slow
def test_the_demo_models_own_predictor_foretells(demo_model: Any, demo: Path, answered: torch.Tensor) -> None:
    path = demo / token_predictor.FILE
    assert accuracy(demo_model, path, answered, 40) > 0.5  # chance is a quarter
    facts = token_predictor.load(path, Gates(demo_model)).facts
    assert facts["accuracy"] > 0.5
    assert re.search(r"train[-_]predictor(\.py)? models/demo-moe$", facts["command"])


@pytest.mark.parametrize("model", ["demo-moe", "deep-moe", "fine-moe", "many-moe"])
def test_shipped_predictors_learned_from_the_packages_prompts(model: str) -> None:
    """And from nothing else: what they are measured on is held apart from these prompts."""
    with safe_open(ROOT / "models" / model / token_predictor.FILE, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    assert facts["prompts"] == digest(training_prompts())
    assert facts["domains"] == {domain: len(texts) for domain, texts in training_prompts().items()}


@pytest.fixture
def bare(demo: Path, tmp_path: Path) -> Path:
    """The demo model without a predictor, and a SHA256SUMS that has another one's line."""
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    path = tmp_path / "bare"
    path.mkdir()
    for name in names:
        shutil.copy(demo / name, path / name)
    (path / "SHA256SUMS").write_text(f"{'0' * 64}  {token_predictor.FILE}\n")
    return path


@pytest.mark.slow
def test_a_few_answers_are_enough_to_be_better_than_chance(
    cli: CommandLine, demo_model: Any, answered: torch.Tensor, bare: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for domain in ("code", "problems"):
        (folder / f"{domain}.txt").write_text("\n".join(map(json.dumps, training_prompts()[domain][:3])))
    flags = ("--prompts", str(folder), "--tokens", "30")
    answer = cli("train-predictor", str(bare), *flags, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    path = bare / token_predictor.FILE
    assert accuracy(demo_model, path, answered, 40) > 0.35
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=bare, check=False).returncode == 0
    facts = token_predictor.load(path, Gates(demo_model)).facts
    assert [row["layer"] for row in found["recall"]] == list(range(8))
    assert facts["accuracy by layer"] == {str(row["layer"]): row["after"] for row in found["recall"]}
    assert all(row["before"] is None and 0 <= row["after"] <= 1 and row["chance"] == 0.25 for row in found["recall"])
    assert (facts["answers"], facts["seed"], found["file"], found["bytes"]) == (6, 0, str(path), path.stat().st_size)
    assert facts["tokens"]["held out"] < facts["tokens"]["learned"]
    assert facts["domains"] == {"code": 3, "problems": 3}
    assert facts["accuracy by domain"] == {row["domain"]: row["after"] for row in found["recall by domain"]}
    by_domain = [row["after"] for row in found["recall by domain"]]
    assert min(by_domain) <= facts["accuracy"] <= max(by_domain)
    again = cli("train-predictor", str(bare), *flags)
    assert again.code == 0, again.err
    told = {line.split()[0]: line.split()[-4:] for line in again.out.splitlines() if line.startswith("  ")}
    expected = {row["domain"]: row["after"] for row in found["recall by domain"]} | {"mean": facts["accuracy"]}
    for name, share in expected.items():
        assert told[name][:2] == 2 * [f"{100 * share:.1f}"], "same seed, same recall"
    assert again.out.endswith(f"written: {path}, {path.stat().st_size:,} bytes\n")


def test_checksums_of_another_folder_stay(cli: CommandLine, bare: Path, tmp_path: Path) -> None:
    """--output elsewhere: the SHA256SUMS there is not the model's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    prompts, sums, before = tmp_path / "prompts.txt", elsewhere / "SHA256SUMS", f"{'0' * 64}  other.txt\n"
    prompts.write_text("\n".join(map(json.dumps, training_prompts()["plays"][:2])))
    sums.write_text(before)
    quick = ("--prompts", str(prompts), "--tokens", "4", "--steps", "1")
    answer = cli("train-predictor", str(bare), *quick, "-o", str(elsewhere / "weights.safetensors"))
    assert answer.code == 0, answer.err
    assert (elsewhere / "weights.safetensors").is_file()
    assert sums.read_text() == before


@pytest.mark.slow
def test_what_cannot_be_is_said_before_the_model_is_loaded(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.commands.shared.whole_model.load_whole", lambda *_: pytest.fail("the model was loaded"))
    one = tmp_path / "one.txt"
    one.write_text("Question: 1 + 1?")
    (tmp_path / "empty").mkdir()
    model = str(demo)
    for args, code, kind, words in (
        ((str(tmp_path),), 1, "MissingShardError", ["config.json"]),
        ((model, "--tokens", "1"), 2, "ConfigError", ["--tokens is 1", "allowed: 2, 3, ..."]),
        ((model, "--tokens", "1023"), 2, "ConfigError", ["--tokens is 1023", "allowed: 2 to 1022"]),
        ((model, "--tokens", "1000"), 2, "PromptTooLongError", ["shorten it"]),
        ((model, "--steps", "0"), 2, "ConfigError", ["--steps is 0"]),
        ((model, "--prompts", str(one)), 2, "ConfigError", ["one.txt has one prompt", "two or more"]),
        ((model, "--prompts", str(tmp_path / "empty")), 2, "ConfigError", ["empty is a folder without .txt files"]),
        ((model, "--prompts", str(tmp_path / "none")), 2, "PromptError", ["cannot be read"]),
        ((model, "-o", str(tmp_path / "nowhere" / "file")), 2, "ConfigError", ["--output", "can be written to"]),
    ):
        check_one_line(cli("train-predictor", *args), code, kind, words)
    monkeypatch.setattr("worker_node.loaders.slab.available_memory", lambda: 10**9)
    words = ["Transformers needs 1.1 GB", "in float32", "1.0 GB are available"]
    check_one_line(cli("train-predictor", model), 1, "DoesNotFitError", words)
