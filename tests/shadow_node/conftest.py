"""Shadows of the demo model, and what its main model answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.shadows.shadow_client import PROMPT_TOKENS, STEPS, MainAnswer, ShadowClient
from wire.messages import ShadowReady


@pytest.fixture(scope="session")
def whole(demo: Any) -> Any:
    """The demo model in float32, as Transformers runs it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo, dtype="float32", experts_implementation="eager")


@pytest.fixture(scope="session")
def answers(demo: Any, whole: Any, gsm8k: list[str]) -> list[MainAnswer]:
    """Two short prompts, answered by Transformers in float32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    made = []
    for text in gsm8k[:2]:
        ids = torch.tensor([tokenizer(text)["input_ids"][:PROMPT_TOKENS]])
        with torch.inference_mode():
            out = whole.generate(
                ids,
                max_new_tokens=STEPS + 1,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
                return_dict_in_generate=True,
            )
        kv = [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
        made.append(MainAnswer(tuple(ids[0].tolist()), out.sequences[0, PROMPT_TOKENS:].tolist(), kv))
    return made


@pytest.fixture
def shadow_of(shadow_model: Callable[[str], ShadowModel]) -> Iterator[Callable[..., Shadow]]:
    made: list[Shadow] = []

    def build(scheme: str = "fp16") -> Shadow:
        made.append(Shadow("shadow", shadow_model(scheme), "abc", "float32"))
        return made[-1]

    yield build
    for shadow in made:
        shadow.close()
        shadow.model.on_routed = None


@pytest.fixture
def main_of(shadow_of: Callable[..., Shadow]) -> Callable[..., ShadowClient]:
    def build(scheme: str = "fp16") -> ShadowClient:
        main = ShadowClient(shadow_of(scheme))
        main.hello()
        assert isinstance(main.got[0], ShadowReady)
        return main

    return build
