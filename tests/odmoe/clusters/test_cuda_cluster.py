"""Every role on a GPU. Without one these tests are skipped: see `test_devices.py` for what can be tested everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint.devices.streams import HostCopies
from checkpoint.devices.transfer import to_device, to_host
from checkpoint.store import ExpertStore
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.paths import DEMO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use over CUDA")
LAYERS, TOKENS = 8, 16
PROMPT = [5, 9, 22, 7, 33, 12, 40]


@pytest.fixture
def cluster(demo_store: Callable[[str], ExpertStore]) -> Iterator[Callable[..., EmbeddedCluster]]:
    made: list[EmbeddedCluster] = []

    def make(dtype: str = "float32", **more: Any) -> EmbeddedCluster:
        settings = Settings(**{"model": str(DEMO), "workers": 1, "audit": 0.0, "device": "cuda", **more})
        made.append(EmbeddedCluster(settings, demo_store(dtype)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answer(cluster: EmbeddedCluster, tokens: int = TOKENS, **how: Any) -> tuple[list[int], Any]:
    steps = list(cluster.generate(PROMPT, tokens, ignore_eos=True, **how))
    return [step.token_id for step in steps if step.token_id is not None], steps[-1].report


def eager(dtype: str, **how: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=getattr(torch, dtype), experts_implementation="eager"
    ).to("cuda")
    ids = torch.tensor([PROMPT], device="cuda")
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=1, **how)
    found: list[int] = out[0, len(PROMPT) :].tolist()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{"residency": "all"}, {"slots": 1}, {"slots": 2, "workers": 4}])
def test_tokens_are_eagers_on_the_same_gpu(cluster: Any, dtype: str, more: dict[str, Any]) -> None:
    found, report = answer(cluster(dtype, shadow="none", **more))
    assert found == eager(dtype, do_sample=False)
    assert report.exact
    assert all(one.startswith("cuda:0 (") for one in [report.devices["main"], *report.devices["workers"]])


def test_drawn_tokens_are_those_of_generate_with_the_same_seed(cluster: Any) -> None:
    from main_node.sampling import Sampling

    found, _ = answer(cluster(shadow="none", residency="all"), sampling=Sampling(temperature=1.0, top_k=0, seed=7))
    torch.manual_seed(7)
    assert found == eager("float32", do_sample=True, temperature=1.0, top_k=0)


@pytest.mark.parametrize("scheme", ["fp16", "int8", "nf4"])
def test_a_shadow_on_the_gpu_predicts(cluster: Any, scheme: str) -> None:
    found, report = answer(cluster(shadow=scheme, residency="all"))
    assert found == eager("float32", do_sample=False)
    assert report.recall > 0.9
    assert report.devices["shadow"] == report.devices["main"]


def test_a_token_waits_once_a_layer_and_once_for_itself(cluster: Any) -> None:
    made = cluster(shadow="none", residency="all")
    answer(made)
    counts = []
    for tokens in (2, 2 + TOKENS):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                answer(made, tokens)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(one.message) for one in told))
    # Waits for events are not told of. Equal: fewer would mean that the copies of `to_host` are not told of either.
    assert counts[1] - counts[0] == TOKENS * (LAYERS + 1)


def test_rows_leave_beside_a_computation() -> None:
    """They are those of the moment in which their copy began, and it ends before a computation that began earlier."""
    device = torch.device("cuda", 0)
    rows = to_device(device, torch.randn(64, 256), torch.arange(12))
    wanted = to_host(*rows)
    torch.cuda.synchronize()
    copies = HostCopies(device)
    landing = copies.begin(rows)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    found = landing.wait()
    assert not busy.query()
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    torch.cuda.synchronize()


def test_the_allocator_holds_what_the_report_counts(cluster: Any) -> None:
    made = cluster(shadow="none", residency="all")
    torch.accelerator.reset_peak_memory_stats()
    _, report = answer(made)
    counted = report.memory_bytes["main"] + sum(report.memory_bytes["workers"])
    assert torch.accelerator.max_memory_allocated() == pytest.approx(counted, rel=0.2)
