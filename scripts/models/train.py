"""Trains a small Mixture-of-Experts checkpoint, such as models/demo-moe, from plain texts.

    .venv/bin/python -m scripts.models.train OUT --data gsm8k_train.jsonl plays.txt speeches.txt --seconds 5100
    .venv/bin/python -m scripts.models.train OUT --shape fine --data DIRECTORY --held-out test.jsonl --seconds 3600

Shapes: `demo` (Mixtral: 8 layers, 8 experts, top-2), `deep` (Mixtral: 32 layers), `fine` (Qwen3-MoE: 32 small experts,
top-4), `shared` (Qwen2-MoE: 32 small experts beside a shared one, top-4), `many` (the same, 64 experts, top-6). With
--start-from a checkpoint, training starts with its tokenizer and with every weight of the same name and shape:
attention, norms and embeddings, but no experts of another width (sparse upcycling, Komatsuzaki et al. 2023).

A .jsonl file holds GSM8K's `question` and `answer`, or `text`, a line; any other file is text. Runs on the GPU if
there is one. Interrupted or killed, the same command goes on from its last snapshot (OUT/training.pt).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.lib.flags import script_parser
from scripts.lib.provenance import command, machine

VOCABULARY, CONTEXT, BOS, EOS = 2048, 1024, 0, 1
PIECE = 40_000
HELD_DOCUMENTS = 150
SNAPSHOT_S = 120.0
SNAPSHOT = "training.pt"
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": True,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": (
        "mixtral",
        dict(
            hidden_size=192,
            intermediate_size=288,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=10000.0,
            **COMMON,
        ),
    ),
    "deep": (
        "mixtral",
        dict(
            hidden_size=96,
            intermediate_size=96,
            num_hidden_layers=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=10000.0,
            **COMMON,
        ),
    ),
    "fine": (
        "qwen3_moe",
        dict(
            hidden_size=192,
            moe_intermediate_size=96,
            intermediate_size=384,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=32,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            **COMMON,
        ),
    ),
    "shared": (
        "qwen2_moe",
        dict(
            hidden_size=128,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
            intermediate_size=256,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=32,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            **COMMON,
        ),
    ),
    "many": (
        "qwen2_moe",
        dict(
            hidden_size=192,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=192,
            intermediate_size=384,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            num_experts=64,
            num_experts_per_tok=6,
            norm_topk_prob=True,
            **COMMON,
        ),
    ),
}
"""What Transformers calls the family, and its configuration."""


@dataclass
class Run:
    """Where a training stands. `spent_s`: seconds of it so far, over all its starts."""

    model: Any
    optimiser: torch.optim.Optimizer
    step: int = 0
    spent_s: float = 0.0
    losses: list[float] = field(default_factory=list)


def documents(files: list[Path]) -> Iterator[str]:
    """The texts of files and directories, long ones in pieces. Raises SystemExit naming what cannot be read."""
    for file in files:
        if file.is_dir():
            yield from documents(sorted(p for p in file.iterdir() if p.suffix in (".jsonl", ".txt")))
        elif file.suffix == ".jsonl":
            for number, line in enumerate(file.read_text().splitlines(), 1):
                yield _from_json(line, f"{file}, line {number}")
        else:
            text = file.read_text()
            yield from (text[start : start + PIECE].strip() for start in range(0, len(text), PIECE))


def _from_json(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
        if "text" in fields:
            return str(fields["text"]).strip()
        answer = re.sub(r"<<.*?>>", "", fields["answer"]).strip()
        return f"Question: {fields['question'].strip()}\nAnswer: {answer}"
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{where}: no JSON with text, or question and answer ({error!r})") from error


def make_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """All token ids in one line, [N]."""
    found = tokenizer.backend_tokenizer.encode_batch(texts)
    return torch.tensor([i for one in found for i in [*one.ids, EOS]])


def draw(ids: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random stretches of `length` tokens, [count, length]."""
    starts = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


@torch.no_grad()
def loss_on(model: Any, ids: torch.Tensor, length: int, batches: int = 10) -> float:
    """Mean cross-entropy a token, in nats, on the same stretches each time it is called."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for _ in range(batches):
        x = draw(ids, 16, length, generator).to(model.device)
        logits = model(input_ids=x).logits[:, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()))
    model.train()
    return total / batches


def train(run: Run, ids: torch.Tensor, args: argparse.Namespace, out: Path, console: Console) -> None:
    """Until `args.seconds` have been spent or `args.steps` done; the learning rate falls on a cosine over that."""
    device = run.model.device
    began, saved = time.monotonic() - run.spent_s, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=1.0)
        while (done := progress(run, args)) < 1:
            rate = args.lr * min(1, (run.step + 1) / 100) * (0.5 * (1 + math.cos(math.pi * done)) * 0.95 + 0.05)
            for group in run.optimiser.param_groups:
                group["lr"] = rate
            x = draw(ids, args.batch, args.length, torch.Generator().manual_seed(args.seed * 1_000_003 + run.step))
            x = x.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = run.model(input_ids=x, labels=x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimiser.step()
            run.optimiser.zero_grad(set_to_none=True)
            run.losses.append(loss.item())
            run.step, run.spent_s = run.step + 1, time.monotonic() - began
            bar.update(task, completed=progress(run, args), description=f"step {run.step}, loss {run.losses[-1]:.3f}")
            if run.step % 100 == 0 and not console.is_terminal:
                console.print(f"step {run.step}, loss {run.losses[-1]:.3f}, {run.spent_s:.0f} s")
            if time.monotonic() - saved > SNAPSHOT_S:
                snapshot(run, out)
                saved = time.monotonic()


def start_from(model: Any, directory: Path) -> int:
    """Copies every weight that the checkpoint has with the same name and shape; how many parameters these are. Raises
    SystemExit if there is none."""
    from transformers import AutoModelForCausalLM

    own = model.state_dict()
    source = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    same = {name: value for name, value in source.items() if name in own and own[name].shape == value.shape}
    if not same:
        raise SystemExit(
            f"{directory} has no weight of the same name and shape; start from a model with the same widths"
        )
    model.load_state_dict(same, strict=False)
    return sum(value.numel() for value in same.values())


def progress(run: Run, args: argparse.Namespace) -> float:
    by_steps = run.step / args.steps if args.steps else 0.0
    return max(by_steps, run.spent_s / args.seconds if args.seconds else 0.0)


def snapshot(run: Run, out: Path) -> None:
    """All that a later start needs; written whole or not at all."""
    partial = out / f".{SNAPSHOT}.partial"
    state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state_dict()}
    torch.save(state | {"step": run.step, "spent_s": run.spent_s, "losses": run.losses}, partial)
    os.replace(partial, out / SNAPSHOT)


def resume(run: Run, out: Path) -> bool:
    if not (out / SNAPSHOT).is_file():
        return False
    state = torch.load(out / SNAPSHOT, map_location=run.model.device, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimiser.load_state_dict(state["optimiser"])
    run.step, run.spent_s, run.losses = state["step"], state["spent_s"], state["losses"]
    return True


def finish(run: Run, tokenizer: Any, figures: dict[str, Any], out: Path) -> None:
    """The checkpoint in bfloat16, a card, and digests; the snapshot goes."""
    run.model.config.output_router_logits = False
    run.model.to("cpu", torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    lines = [f"# {out.name}", "", "Made by:", "", f"    {figures.pop('command')}", ""]
    (out / "README.md").write_text("\n".join([*lines, *(f"- {k}: {v}" for k, v in figures.items())]) + "\n")
    (out / SNAPSHOT).unlink(missing_ok=True)
    files = sorted(p for p in out.iterdir() if p.suffix in (".json", ".safetensors"))
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files, or directories of them")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="texts to measure on, never trained on")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--start-from", type=Path, metavar="MODEL", help="a checkpoint; without it, random weights")
    parser.add_argument("--seconds", type=float, default=600, help="0: no limit")
    parser.add_argument("--steps", type=int, default=0, help="0: no limit")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seconds <= 0 and args.steps <= 0:
        parser.error("give --seconds or --steps above 0: a training must end")
    if not 2 <= args.length <= CONTEXT:
        parser.error(f"--length is {args.length}; allowed: 2 to {CONTEXT}")
    for path in [*args.data, *args.held_out, *([args.start_from] if args.start_from else [])]:
        if not path.exists():
            parser.error(f"{path} is not there")
    return args


def _run_figures(run: Run, args: Any) -> dict[str, Any]:
    return {
        "command": command(),
        "machine": machine(),
        "shape": args.shape,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.step,
        "tokens seen": run.step * args.batch * args.length,
        "seconds": round(run.spent_s),
    }


def main() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    args = parse()
    console = Console(stderr=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    texts = [text for text in documents(args.data) if text]
    tokenizer = AutoTokenizer.from_pretrained(args.start_from) if args.start_from else make_tokenizer(texts)
    random.Random(0).shuffle(texts)
    held = max(1, min(HELD_DOCUMENTS, len(texts) // 10))
    valid, ids = encode(tokenizer, texts[:held]), encode(tokenizer, texts[held:])
    for what, tokens in (("to train on", ids), ("held out of it", valid)):
        if len(tokens) <= args.length:
            raise SystemExit(f"the texts {what} are {len(tokens)} tokens; at least {args.length + 1} are needed")
    torch.manual_seed(args.seed)
    family, shape = SHAPES[args.shape]
    config = AutoConfig.for_model(family, **shape)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").to(device)
    if args.start_from:
        copied = start_from(model, args.start_from)
        console.print(f"{copied / 1e6:.1f} M parameters start from {args.start_from}")
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    run = Run(model.train(), optimiser)
    if resume(run, args.out):
        console.print(f"going on from step {run.step}, after {run.spent_s:.0f} s")
    untrained = loss_on(model, valid, args.length) if not run.step else None
    try:
        train(run, ids, args, args.out, console)
    except KeyboardInterrupt:
        snapshot(run, args.out)
        console.print(f"interrupted at step {run.step}; the same command goes on from there")
        raise SystemExit(130) from None
    model.to(torch.bfloat16)
    figures = _run_figures(run, args)
    figures["validation loss, nats a token"] = round(loss_on(model, valid, args.length), 4)
    if untrained is not None:
        figures["validation loss before training"] = round(untrained, 4)
    for path in args.held_out:
        other = encode(tokenizer, [text for text in documents([path]) if text])
        figures[f"loss on {path.name}"] = round(loss_on(model, other, min(args.length, len(other) - 1)), 4)
    print(json.dumps(figures, indent=1))
    finish(run, tokenizer, figures, args.out)


if __name__ == "__main__":
    main()
