"""Exact means exact: tokens and logits of Transformers `eager`, whatever the workers, slots, shadow and periods."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings

TOKENS = 24
PROMPTS = (0, 4, 8)  # 88, 149 and 120 tokens
WHOLE = {"mini_batch": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "base": WHOLE,
    "slots 2": {"slots": 2, **WHOLE},
    "shadow none": {"shadow": "none", **WHOLE},
    "shadow nf4": {"shadow": "nf4", **WHOLE},
    "shadow fp16": {"shadow": "fp16", **WHOLE},
    "workers 1": {"workers": 1, **WHOLE},
    "workers 1, no shadow": {"workers": 1, "shadow": "none", **WHOLE},
    "workers 3, slots 2, memory": {"workers": 3, "slots": 2, "loader": "memory", **WHOLE},
    "workers 12, group 4": {"workers": 12, "group_size": 4, **WHOLE},
    "workers 5, group 1": {"workers": 5, "group_size": 1, "shadow": "fp16", **WHOLE},
    "periods 4": {"align_token": 4, "align_kv": 4, **WHOLE},
    "never aligned": {"align_token": 0, "align_kv": 0, **WHOLE},
    "token never, KV every 3": {"align_token": 0, "align_kv": 3, "shadow": "nf4", **WHOLE},
}


def answers(cluster: EmbeddedCluster, prompt: list[int], count: int = TOKENS) -> tuple[Any, list[torch.Tensor]]:
    """The report of one answer, and the logits of each of its tokens."""
    logits: list[torch.Tensor] = []
    cluster.main.on_logits = logits.append
    *_, last = cluster.generate(prompt, count, ignore_eos=True)
    return last.report, logits


@pytest.fixture
def embedded(demo_store: Callable[[str], Any]) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Builds embedded clusters and closes them."""
    made: list[EmbeddedCluster] = []

    def build(dtype: str, **settings: Any) -> EmbeddedCluster:
        made.append(EmbeddedCluster(Settings(model="demo", threads=1, **settings), demo_store(dtype)))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_logits_bit_for_bit(name: str, dtype: str, embedded: Any, reference: Any) -> None:
    cluster = embedded(dtype, **SETTINGS[name])
    for number in PROMPTS[: 1 if dtype == "bfloat16" else 2]:
        expected = reference(dtype, number, TOKENS)
        report, logits = answers(cluster, expected.prompt)
        assert report.token_ids == expected.tokens
        assert [torch.equal(a, b) for a, b in zip(logits, expected.logits, strict=True)] == [True] * TOKENS
        assert max(report.resident_experts_max) <= SETTINGS[name].get("slots", 1)


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_split_prefill_keeps_the_tokens(rows: int, embedded: Any, reference: Any) -> None:
    """Mini-batches change the shapes of the products, so logits agree to rounding and tokens agree."""
    cluster = embedded("float32", mini_batch=rows, shadow="none")
    for number in PROMPTS:
        expected = reference("float32", number, TOKENS)
        report, logits = answers(cluster, expected.prompt)
        assert report.token_ids == expected.tokens
        for got, wanted in zip(logits, expected.logits, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scheme", "least"), [("fp16", 0.999), ("int8", 0.99), ("nf4", 0.94)])
def test_recall_aligned_and_never(scheme: str, least: float, embedded: Any, reference: Any) -> None:
    """Equation (3) over five prompts x 24 tokens; without alignment a quantised shadow drifts away."""
    recalls = {}
    for period in (1,) if scheme == "fp16" else (1, 0):
        cluster = embedded("float32", shadow=scheme, align_token=period, align_kv=period)
        reports = [answers(cluster, reference("float32", n, TOKENS).prompt)[0] for n in range(5)]
        assert all(len(report.recall_by_token) == TOKENS - 1 for report in reports)
        recalls[period] = sum(report.recall for report in reports) / len(reports)
    assert recalls[1] >= least
    if scheme != "fp16":
        assert recalls[0] < recalls[1] - 0.04


def test_device_bytes_are_a_fraction_of_the_whole(embedded: Any, reference: Any) -> None:
    from transformers import AutoModelForCausalLM

    cluster = embedded("float32", shadow="nf4")
    report, _ = answers(cluster, reference("float32", 0, TOKENS).prompt)
    whole = AutoModelForCausalLM.from_pretrained("models/demo-moe", dtype="float32")
    held = report.memory_bytes["main"] + report.memory_bytes["shadow"] + sum(report.memory_bytes["workers"])
    assert held < 0.5 * sum(p.nbytes for p in whole.parameters())
    one_expert = cluster.main.store.manifest.blob_bytes
    assert report.memory_bytes["workers"] == [one_expert] * 8


def test_two_requests_in_turns(embedded: Any, reference: Any) -> None:
    """Two answers a token at a time, each as if it were alone; a third is given up half-way."""
    cluster = embedded("float32", shadow="nf4", **WHOLE)
    first, second, third = (reference("float32", n, TOKENS) for n in PROMPTS)
    runs = [cluster.generate(r.prompt, TOKENS, ignore_eos=True) for r in (first, second, third)]
    got: list[list[int]] = [[], [], []]
    for turn in range(TOKENS):
        for number, run in enumerate(runs):
            if number < 2 or turn < 5:
                got[number].append(next(run).token_id)
        if turn == 5:
            runs[2].close()
    assert got == [first.tokens, second.tokens, third.tokens[:5]]


def test_end_of_sequence_ends_the_answer(embedded: Any, demo: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, experts_implementation="eager")
    inputs = tokenizer("Question: Tom has 3 apples and buys 5 more. How many?\nAnswer:", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=100, do_sample=False)
    prompt = inputs["input_ids"][0].tolist()
    expected = out[0, len(prompt) :].tolist()
    assert len(expected) < 100
    with closing(embedded("bfloat16", shadow="none").generate(prompt, 100)) as steps:
        assert [step.token_id for step in steps] == expected


def test_no_copy_of_an_expert_outside_the_slots(
    embedded: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Counted in this process's live tensors while a worker computes: as many expert-sized ones as there are slots."""
    from worker_node.node import Worker

    cluster = embedded("float32", shadow="none", workers=2, slots=1)
    prompt = reference("float32", 1, TOKENS).prompt[:4]  # with its model, before anything is counted
    size = cluster.main.store.manifest.blob_bytes * 0.9
    counts: list[int] = []

    def live() -> dict[int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and not o.is_meta]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return {pointer: nbytes for pointer, nbytes in storages.items() if nbytes >= size}

    slots = {buffer.data_ptr() for node in cluster._nodes for buffer in node.slots.buffers}
    before = live().keys()
    gc.freeze()  # what was there before is not looked through again: that would take most of the time
    request.addfinalizer(gc.unfreeze)
    compute = Worker.compute

    def counting(worker: Worker, *what: Any) -> torch.Tensor:
        output = compute(worker, *what)
        counts.append(len(live().keys() - before - slots))
        return output

    monkeypatch.setattr(Worker, "compute", counting)
    answers(cluster, prompt, 2)
    assert len(counts) > 16
    assert max(counts) == 0
