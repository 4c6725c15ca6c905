"""The command line in this process, small checkpoints, and what Transformers answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.machines.cli import CommandLine
from support.models.tiny_mixtral import save_tiny_mixtral


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    """As in a process of the command line, which says so before Transformers is imported."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture
def cli() -> CommandLine:
    """`cli("generate", ..., stdin=b"", tty=False)`: the command line in this process."""
    return CommandLine()


@pytest.fixture(scope="session")
def expected(demo: Path) -> Callable[[str, int], tuple[list[int], str]]:
    """(prompt, tokens) -> what Transformers answers with the checkpoint as it is stored: token ids and their text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, experts_implementation="eager")

    @cache
    def answer(prompt: str, count: int) -> tuple[list[int], str]:
        inputs: Any = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        ids = out[0, inputs["input_ids"].shape[1] :].tolist()
        return ids, tokenizer.decode(ids, skip_special_tokens=True)

    return answer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of two layers and three experts, in two weight files; no tokenizer."""
    return save_tiny_mixtral(tmp_path_factory.mktemp("tiny"))
