"""Exact means exact: tokens and logits of Transformers `eager`, whatever the workers, slots, shadow and periods.

Short answers; long ones are in tests/test_exact_long.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from main_node.answer import collect
from support.cases import slow_except
from support.nodes import two_threads
from support.nodes.exact import SETTINGS, WHOLE, answers, check_bit_for_bit, check_split_prefill, mean_recall
from support.paths import ROOT

TOKENS = 6
PROMPTS = (0, 4, 8)  # 88, 149 and 120 tokens
# Each setting with one dtype, in turn; those of the shadow's arithmetic with the other, too.
CASES = [
    (name, dtype, PROMPTS[number % 3 if dtype == "float32" else 0])
    for number, name in enumerate(SETTINGS)
    for dtype in ("float32", "bfloat16")
    if name in ("base", "shadow nf4") or dtype == ("float32", "bfloat16")[number % 2]
]


FAST = (
    *(("base", "float32"), ("shadow none", "float32"), ("shadow nf4", "bfloat16")),
    *(("workers 3, slots 2, memory", "bfloat16"), ("token never, KV every 3", "float32")),
)


@pytest.mark.parametrize(
    ("name", "dtype", "number"),
    slow_except([case for case in CASES if case[:2] in FAST], CASES),
    ids=[f"{name}-{dtype}" for name, dtype, _ in CASES],
)
def test_tokens_and_logits_bit_for_bit(name: str, dtype: str, number: int, embedded: Any, reference: Any) -> None:
    check_bit_for_bit(embedded(dtype, **SETTINGS[name]), name, reference(dtype, number, TOKENS))


@pytest.mark.slow
def test_bit_for_bit_with_two_threads() -> None:
    """In a process of its own, with its own reference: all other tests compute with one thread."""
    ended = subprocess.run(
        [sys.executable, two_threads.__file__],
        # Threads that wait in a loop would take the cores from those that compute.
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, two_threads.PATHS))}
        | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout.split() == ["float32", "True", "2", "bfloat16", "True", "2"], ended.stderr


def test_the_fast_kernel_keeps_the_tokens_but_does_not_promise_them(embedded: Any, reference: Any) -> None:
    expected = reference("bfloat16", 0, TOKENS)
    report, logits = answers(embedded("bfloat16", shadow="none", kernel="fast", **WHOLE), expected.prompt, TOKENS)
    assert (report.token_ids, report.kernel, report.exact) == (expected.tokens, "fast", False)
    for got, wanted in zip(logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("rows", slow_except([7], [1, 7]))
def test_split_prefill_keeps_the_tokens(rows: int, embedded: Any, reference: Any) -> None:
    check_split_prefill(embedded(mini_batch=rows, shadow="none"), reference("float32", 0, TOKENS))


@pytest.mark.parametrize(
    ("scheme", "least"), slow_except([("int8", 0.99)], [("fp16", 0.99), ("int8", 0.99), ("nf4", 0.94)])
)
def test_recall_aligned_and_never(scheme: str, least: float, embedded: Any, reference: Any) -> None:
    """Without alignment a quantised shadow drifts away; soon so with this prompt."""
    prompts, recalls = [reference("float32", 4, 12).prompt], {}
    for period in (1,) if scheme == "fp16" else (1, 0):
        recalls[period] = mean_recall(embedded(shadow=scheme, align_token=period, align_kv=period), prompts, 12)
    assert recalls[1] >= least
    if scheme != "fp16":
        assert recalls[0] < recalls[1] - 0.04


def test_device_bytes_are_a_fraction_of_the_whole(embedded: Any, reference: Any) -> None:
    from transformers import AutoModelForCausalLM

    cluster = embedded("float32", shadow="nf4")
    report, _ = answers(cluster, reference("float32", 0, TOKENS).prompt, TOKENS)
    whole = AutoModelForCausalLM.from_pretrained("models/demo-moe", dtype="float32")
    held = report.memory_bytes["main"] + report.memory_bytes["shadow"] + sum(report.memory_bytes["workers"])
    assert held < 0.5 * sum(p.nbytes for p in whole.parameters())
    one_expert = cluster.main.store.manifest.blob_bytes
    assert report.memory_bytes["workers"] == [one_expert] * 8


@pytest.mark.slow
def test_two_requests_in_turns(embedded: Any, reference: Any) -> None:
    """Two answers a token at a time, each as if it were alone; a third is given up half-way."""
    cluster = embedded("float32", shadow="nf4", **WHOLE)
    first, second, third = (reference("float32", n, TOKENS) for n in PROMPTS)
    runs = [cluster.generate(r.prompt, TOKENS, ignore_eos=True) for r in (first, second, third)]
    got: list[list[int]] = [[], [], []]
    for turn in range(TOKENS):
        for number, run in enumerate(runs):
            if number < 2 or turn < 4:
                got[number].append(next(run).token_id)
        if turn == 4:
            runs[2].close()
    assert got == [first.tokens, second.tokens, third.tokens[:4]]


@pytest.mark.slow
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
    with embedded("bfloat16", shadow="none").generate(prompt, 100) as answer:
        assert collect(answer)[0] == expected


@pytest.mark.slow
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

    before = live().keys()  # slots, too
    gc.freeze()  # what was there before is not looked through again: that would take most of the time
    request.addfinalizer(gc.unfreeze)
    compute = Worker.compute

    def counting(worker: Worker, *what: Any) -> torch.Tensor:
        output = compute(worker, *what)
        counts.append(len(live().keys() - before))
        return output

    monkeypatch.setattr(Worker, "compute", counting)
    answers(cluster, prompt, 2)
    assert len(counts) > 16
    assert max(counts) == 0
