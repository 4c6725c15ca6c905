"""One environment for every test: no network, a cache of its own, one thread (float32 sums depend on their number)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.paths import DEMO, ROOT

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_CACHE = tempfile.TemporaryDirectory(prefix="odmoe-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["XDG_CONFIG_HOME"] = _CACHE.name


@dataclass
class Reference:
    """Transformers' greedy answer: tokens and the float32 logits [V] that chose each."""

    prompt: list[int]
    tokens: list[int]
    logits: list[Any]


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo checkpoint."""
    return DEMO


@pytest.fixture(scope="session")
def gsm8k() -> list[str]:
    """Twenty GSM8K test prompts."""
    prompts: list[str] = json.loads((ROOT / "tests" / "data" / "gsm8k_prompts.json").read_text())
    return prompts


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Every node and its reference compute with one thread, whatever an earlier test has set; no progress bars."""
    torch = sys.modules.get("torch")  # most tests of the scheduler and of the wire do without
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and logging.is_progress_bar_enabled():
        logging.disable_progress_bar()


@pytest.fixture(scope="session")
def demo_store() -> Callable[[str], Any]:
    """dtype -> the demo model's expert store in it."""
    from odmoe.stores import prepare_store

    return cache(lambda dtype: prepare_store(str(DEMO), None, dtype))


@pytest.fixture(scope="session")
def reference(gsm8k: list[str]) -> Callable[[str, int, int], Reference]:
    """(dtype, prompt number, tokens) -> what Transformers' own `generate` answers, `eager` experts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)

    @cache
    def model(dtype: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype, experts_implementation="eager")

    @cache
    def answer(dtype: str, number: int, count: int) -> Reference:
        inputs = tokenizer(gsm8k[number], return_tensors="pt")
        with torch.inference_mode():
            out = model(dtype).generate(
                **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=1,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        prompt = inputs["input_ids"][0].tolist()
        tokens = out.sequences[0, len(prompt) :].tolist()
        return Reference(prompt, tokens, [step[0].float() for step in out.logits])

    return answer


@pytest.fixture(scope="session")
def shadow_model(demo_store: Callable[[str], Any]) -> Callable[[str], Any]:
    """scheme -> the demo model as the shadow holds it."""
    from shadow_node.model import ShadowModel

    return cache(lambda scheme: ShadowModel(demo_store("float32"), scheme))
