"""Teaches a small model to chat: models/chat-moe from models/demo-moe.

    OMP_NUM_THREADS=1 .venv/bin/python -m scripts.models.chat.train OUT --start-from models/demo-moe --steps 400

The dialogues are those of scripts.models.chat.dialogues, others at each step; the loss is that of the assistant's
tokens. The tokenizer gets <|im_start|> and <|im_end|>, the model two rows of embeddings more. On the processor alone,
so that the same seed, steps and threads give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import command, machine
from scripts.models.chat.dialogues import Dialogue, dialogues

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
BATCHES = 8
"""Drawn and sorted by length together, so that a batch has little padding."""
IGNORED = -100


def add_chat(tokenizer: Any, model: Any) -> None:
    """The two special tokens, with embeddings near the mean of all, and the chat template."""
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE.read_text().strip()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    end = tokenizer.convert_tokens_to_ids(END)
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.generation_config.pad_token_id = model.config.pad_token_id = end


def encode(tokenizer: Any, made: Dialogue) -> tuple[list[int], list[int]]:
    """Token ids of a dialogue, and the same with IGNORED for all but the assistant's tokens and their end."""
    text = tokenizer.apply_chat_template(made.messages, tokenize=False, tools=made.tools or None)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    start, end = tokenizer.convert_tokens_to_ids([START, END])
    role: list[int] = tokenizer("assistant\n", add_special_tokens=False).input_ids
    labels = [IGNORED] * len(ids)
    answers = False
    for place, token in enumerate(ids):
        if answers:
            labels[place] = token
        if token == end:
            answers = False
        elif ids[max(0, place - len(role)) : place + 1] == [start, *role]:
            answers = True
    return ids, labels


def batch(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, padded on the right, [rows, longest]."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows])


def batches(tokenizer: Any, args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end."""
    for seed in range(args.seed * 1_000_000, (args.seed + 1) * 1_000_000):
        rows = sorted(
            (encode(tokenizer, made) for made in dialogues(args.batch * BATCHES, seed)), key=lambda row: len(row[0])
        )
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(seed)).tolist()
        for place in order:
            yield batch(rows[place * args.batch : (place + 1) * args.batch], tokenizer.eos_token_id)


@torch.no_grad()
def loss_on(model: Any, rows: list[tuple[list[int], list[int]]], pad: int) -> float:
    """Mean cross-entropy of the assistant's tokens, in nats."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(rows), 16):
        ids, labels = batch(rows[start : start + 16], pad)
        logits = model(input_ids=ids).logits[:, :-1].float().flatten(0, 1)
        found = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        total, count = total + float(found), count + int((labels[:, 1:] != IGNORED).sum())
    model.train()
    return total / count


def train(model: Any, tokenizer: Any, args: argparse.Namespace) -> int:
    """Until `args.steps` are done or `args.seconds` spent; returns the steps. The learning rate rises for 30 of them,
    and falls on a cosine over the whole."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    began = time.monotonic()
    for step, (ids, labels) in enumerate(batches(tokenizer, args)):
        done = max(step / args.steps, (time.monotonic() - began) / args.seconds if args.seconds else 0)
        if done >= 1:
            return step
        falls = 0.5 * (1 + math.cos(math.pi * done)) * 0.95 + 0.05
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 30) * falls
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    raise AssertionError("batches have no end")


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """The checkpoint in bfloat16, and digests."""
    copied = copy.deepcopy(model)
    copied.config.output_router_logits = False
    copied.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    files = sorted(p for p in out.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))
    (out / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files))


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = script_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-from", type=Path, required=True, metavar="MODEL")
    parser.add_argument("--steps", type=positive, default=400, help="%(default)s unless said")
    parser.add_argument("--seconds", type=float, default=0, help="end after so long, too; 0: no limit")
    parser.add_argument("--batch", type=positive, default=16, help="dialogues a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.start_from)
    model = AutoModelForCausalLM.from_pretrained(
        args.start_from, dtype=torch.float32, experts_implementation="grouped_mm", output_router_logits=True
    )
    add_chat(tokenizer, model)
    args.out.mkdir(parents=True, exist_ok=True)
    held = [encode(tokenizer, made) for made in dialogues(100, seed=-1, held=True)]
    before = loss_on(model, held, tokenizer.eos_token_id)
    began = time.monotonic()
    steps = train(model.train(), tokenizer, args)
    save(model, tokenizer, args.out)
    figures = {
        "command": command(),
        "machine": machine(),
        "steps": steps,
        "seconds": round(time.monotonic() - began),
        "loss on held-out dialogues, nats a token": round(loss_on(model, held, tokenizer.eos_token_id), 4),
        "before training": round(before, 4),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
