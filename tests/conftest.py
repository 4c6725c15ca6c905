"""One environment for every test: no network, a cache of its own, one thread (float32 sums depend on their number)."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from odmoe.settings import settings as odmoe_settings
from support.paths import DEMO, ROOT

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
odmoe_settings.available_cores = lambda: 1
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
_CACHE = tempfile.TemporaryDirectory(prefix="odmoe-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["XDG_CONFIG_HOME"] = _CACHE.name

gc.disable()  # until all tests are collected: what that makes stays


def pytest_collection_finish() -> None:
    """What is there before the first test is not looked through again: a collection of it takes a second."""
    gc.freeze()
    gc.enable()


@dataclass
class Reference:
    """Transformers' greedy answer: tokens and the float32 logits [V] that chose each."""

    prompt: list[int]
    tokens: list[int]
    logits: list[Any]


# Properties are tried on the same examples every time, however slow the machine is: a test that fails, fails again.
# ODMOE_SEARCH=1 looks for new ones, and prints how to try one again.
hypothesis_settings.register_profile(
    "steady", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.register_profile(
    "search", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("search" if os.environ.get("ODMOE_SEARCH") else "steady")


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


LONGEST = 24


@pytest.fixture(scope="session")
def reference(gsm8k: list[str]) -> Callable[[str, int, int], Reference]:
    """(dtype, prompt number, tokens) -> what Transformers' own `generate` answers, `eager` experts.

    Up to `LONGEST` tokens are the beginning of one answer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)

    @cache
    def model(dtype: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype, experts_implementation="eager")

    @cache
    def whole(dtype: str, number: int, count: int) -> Reference:
        inputs = tokenizer(gsm8k[number], return_tensors="pt")
        with torch.inference_mode():
            out = model(dtype).generate(
                **inputs,
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=1,
                return_dict_in_generate=True,
                output_logits=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        tokens = out.sequences[0, len(prompt) :].tolist()
        return Reference(prompt, tokens, [step[0].float() for step in out.logits])

    def answer(dtype: str, number: int, count: int) -> Reference:
        found = whole(dtype, number, max(count, LONGEST))
        return Reference(found.prompt, found.tokens[:count], found.logits[:count])

    return answer


@pytest.fixture(scope="session")
def shadow_model(demo_store: Callable[[str], Any]) -> Callable[..., Any]:
    """scheme, and dtype unless it is float32 -> the demo model as the shadow holds it."""
    from shadow_node.model import ShadowModel

    return cache(lambda scheme, dtype="float32": ShadowModel(demo_store(dtype), scheme))


@pytest.fixture
def embedded(
    demo_store: Callable[[str], Any], shadow_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes embedded clusters of the demo model in a dtype, by settings, and closes them. Their shadows hold the
    session's models: to quantise one takes longer than most answers."""
    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings
    from odmoe.stores import with_forms
    from scheduler.policies.registry import forms_of

    made: list[Any] = []
    held: list[Any] = []

    def model(store: Any, scheme: str, device: str) -> Any:
        assert device == "cpu"
        held.append(shadow_model(scheme, store.manifest.dtype))
        return held[-1]

    def build(dtype: str = "float32", **settings: Any) -> Any:
        chosen = Settings(model=str(DEMO), threads=1, **settings)
        made.append(EmbeddedCluster(chosen, with_forms(demo_store(dtype), forms_of(chosen.system_config))))
        return made[-1]

    monkeypatch.setattr("shadow_node.model.ShadowModel", model)
    yield build
    for cluster in made:
        cluster.close()
    for one in held:
        one.on_routed = None


@pytest.fixture
def short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans simulate one fit of a profile, and drafts of one length."""
    from scheduler.drafts.length import AUTO
    from scheduler.planning.scaling import Together

    monkeypatch.setattr("scheduler.planning.plan.other_fits", lambda setup: ())
    monkeypatch.setattr("scheduler.planning.plan.DRAFTED", [Together(1, False, AUTO)])


@pytest.fixture
def few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans simulate answers of two tokens, for what does not depend on how fast they are."""
    names = ("VISITS", "VISITS_COMPARED", "VISITS_TOGETHER", "LEAST", "LEAST_COMPARED", "LEAST_DRAFTED", "LEAST_LAYERS")
    for name in names:
        monkeypatch.setattr(f"scheduler.planning.scaling._{name}", 2)


@pytest.fixture(scope="session")
def crowd_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """See `support.nodes.crowd.making_crowds`."""
    from support.nodes.crowd import making_crowds

    with making_crowds(tmp_path_factory.mktemp("crowds")) as crowd:
        yield crowd


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 KiB; skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root, to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
