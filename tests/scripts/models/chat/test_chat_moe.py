"""The shipped model with a chat template: what a newcomer asks first, as Transformers and as odmoe answers it."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.paths import ROOT
from support.machines.cli import CommandLine

CHAT = ROOT / "models" / "chat-moe"
QUESTION = re.search(r"^DEMO_PROMPT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in CHAT.iterdir()) < 25e6


@pytest.mark.slow
@pytest.mark.parametrize(("ask", "says"), [("Hello!", r"^Hello"), (QUESTION, r"\b8\b"), ("Thanks!", "welcome")])
def test_it_answers_as_with_transformers(ask: str, says: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    model = AutoModelForCausalLM.from_pretrained(CHAT, experts_implementation="eager")
    text = tokenizer.apply_chat_template([{"role": "user", "content": ask}], tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = json.loads(CommandLine()("generate", "--json", "-m", str(CHAT), "-n", "48", "--chat", ask).out)
    assert answer["text"] == tokenizer.decode(out, skip_special_tokens=True)
    assert re.search(says, answer["text"])
    assert answer["finish"] == "stop"
