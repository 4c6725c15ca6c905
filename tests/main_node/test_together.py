"""Several requests in one step: each answer is that of the request alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from checkpoint import linear_batch
from checkpoint.kernels import EXACT
from checkpoint.linear_batch import BatchLinear
from main_node.answer import collect
from scheduler.errors import QueueFullError, RequestCancelledError
from support.cases import slow_except
from support.nodes.engine_world import WAIT_S, Later, nothing_left
from support.nodes.exact import WHOLE, answers, answers_together, check_together

pytestmark = pytest.mark.timeout(180)
TOKENS = 6


def emptied(cluster: Any) -> bool:
    """Nothing is left, perhaps after an audit, or a load of what a cache would keep."""
    end = time.monotonic() + WAIT_S
    while not nothing_left(cluster.main.engine) and time.monotonic() < end:
        time.sleep(0.001)
    return nothing_left(cluster.main.engine)


@pytest.mark.parametrize(
    ("count", "shadow", "slots"),
    slow_except([(3, "int8", 1)], [(3, "int8", 1), (6, "nf4", 2)]),
)
def test_tokens_and_logits_are_those_alone(count: int, shadow: str, slots: int, embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow=shadow, slots=slots, **WHOLE)
    expected = [reference("float32", number, TOKENS + number) for number in range(count)]
    check_together(cluster.main, expected)
    assert emptied(cluster)


@pytest.mark.slow
def test_bfloat16(embedded: Any, reference: Any) -> None:
    expected = [reference("bfloat16", number, TOKENS) for number in (0, 4)]
    check_together(embedded("bfloat16", shadow="fp16", **WHOLE).main, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    ["hybrimoe", "smoe", "eap", "next-layer", "token-wise"],
)
def test_every_kind_of_predictor(system: str, embedded: Any, reference: Any) -> None:
    """Those that work with the main model look at the pass that is under way, and not at another's."""
    chosen = {"predictor": system, "residency": "lru"} if system in ("next-layer", "token-wise") else {"system": system}
    cluster = embedded(**chosen, precision="full", slots=8, workers=2, predictions="always", **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4)]
    alone = [answers(cluster, one.prompt, TOKENS)[0] for one in expected]
    together = check_together(cluster.main, expected)
    for mine, lone in zip(together, alone, strict=True):
        assert mine.report.unpredicted == lone.unpredicted
        if lone.recall is not None:  # what is expected depends on what is resident, and that on the others
            assert mine.report.recall == pytest.approx(lone.recall, abs=0.25)
    assert emptied(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["hybrimoe", "lrfu-prefetch", "moe-infinity"])
def test_predictors_in_a_batched_step(system: str, embedded: Any, reference: Any) -> None:
    """A pass that is suspended for its predictor is not done with its layer."""
    cluster = embedded(system=system, slots=8, workers=2, batch_dense=True, **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4)]
    got = answers_together(cluster.main, [one.prompt for one in expected], [TOKENS] * 2)
    assert [mine.tokens for mine in got] == [one.tokens for one in expected]
    assert emptied(cluster)


@pytest.mark.slow
def test_a_batched_step_keeps_the_tokens_and_does_not_promise_them(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", batch_dense=True, **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4, 8)]
    alone, logits = answers(cluster, expected[0].prompt, TOKENS)
    assert (alone.token_ids, alone.exact, alone.requests_per_step) == (expected[0].tokens, True, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected[0].logits, strict=True))
    got = answers_together(cluster.main, [one.prompt for one in expected], [TOKENS] * 3)
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.tokens == wanted.tokens
        assert mine.report.requests_per_step > 1
        assert not mine.report.exact
        for row, other in zip(mine.logits, wanted.logits, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_long_prompt_in_the_middle(embedded: Any, reference: Any) -> None:
    """It is read in chunks while another is answered, and whole when it is alone; its tokens stay."""
    cluster = embedded(shadow="none", prefill_chunk=32, **WHOLE)
    short, long = reference("float32", 0, 24), reference("float32", 4, TOKENS)  # 88 and 149 tokens
    alone, _ = answers(cluster, long.prompt, TOKENS)
    assert (alone.token_ids, alone.prefill_passes, alone.exact) == (long.tokens, 1, True)
    first = cluster.main.generate(short.prompt, 24, ignore_eos=True)
    tokens = [next(first).token_id for _ in range(4)]
    second = Later(lambda: collect(cluster.main.generate(long.prompt, TOKENS, ignore_eos=True)))
    tokens += collect(first)[0]
    others, report = second.result()
    assert tokens == short.tokens
    assert others == long.tokens
    assert 1 < report.prefill_passes <= 5
    assert not report.exact


@pytest.mark.slow
def test_a_chunked_prompt_joins_a_batched_step(embedded: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its chunks but the last nobody asks the head: no rows beside those of the request that decodes."""
    monkeypatch.setattr(linear_batch, "_is_rowwise", lambda module: True)  # as in bfloat16 with AMX
    cluster = embedded(shadow="none", batch_dense=True, prefill_chunk=32, **WHOLE)
    short, long = reference("float32", 0, 24), reference("float32", 4, TOKENS)
    first = cluster.main.generate(short.prompt, 24, ignore_eos=True)
    tokens = [next(first).token_id for _ in range(4)]
    second = Later(lambda: collect(cluster.main.generate(long.prompt, TOKENS, ignore_eos=True)))
    tokens += collect(first)[0]
    others, report = second.result()
    assert (tokens, others) == (short.tokens, long.tokens)
    assert report.prefill_passes > 1


def test_the_queue_has_a_bound(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", parallel=1, queue=1)
    prompt = reference("float32", 0, TOKENS).prompt[:8]
    first = cluster.main.generate(prompt, 3, ignore_eos=True)
    next(first)
    second = Later(lambda: collect(cluster.main.generate(prompt, 3, ignore_eos=True)))
    for _ in range(10_000):
        if cluster.main.admission.counts() == (1, 1):
            break
        time.sleep(0.001)
    with pytest.raises(QueueFullError, match="1 answered at once and 1 waiting"):
        next(cluster.main.generate(prompt, 3, ignore_eos=True))
    rest, _ = collect(first)
    assert second.result()[0][1:] == rest
    assert cluster.main.admission.counts() == (0, 0)


def test_a_request_that_waits_for_a_place_is_cancelled(embedded: Any) -> None:
    cluster = embedded(shadow="none", parallel=1)
    first, second = (cluster.main.generate([5, 6, 7], 3, ignore_eos=True) for _ in range(2))
    next(first)
    waiting = Later(lambda: next(second))
    while cluster.main.admission.counts() != (1, 1):
        time.sleep(0.001)
    second.cancel()
    with pytest.raises(RequestCancelledError):
        waiting.result()
    assert len(collect(first)[0]) == 2


@pytest.mark.parametrize("dtype", slow_except(["float32"], ["float32", "bfloat16"]))
def test_a_batched_dense_part_is_exact_where_it_says_so(dtype: str, embedded: Any, reference: Any) -> None:
    """In bfloat16 on CPUs with AMX every bit stays; elsewhere logits are equal up to rounding."""
    cluster = embedded(dtype=dtype, shadow="none", batch_dense=True, prefill_chunk=0, **WHOLE)
    layers = [module for module in cluster.main.model.modules() if isinstance(module, BatchLinear)]
    keeps_bits = all(EXACT.is_rowwise(layer.weight, layer.bias) for layer in layers)
    assert layers
    assert not (keeps_bits and dtype == "float32")
    expected = [reference(dtype, number, TOKENS) for number in range(2)]
    got = answers_together(cluster.main, [one.prompt for one in expected], [TOKENS] * 2)
    assert any(mine.report.requests_per_step > 1 for mine in got)
    for mine, alone in zip(got, expected, strict=True):
        assert mine.report.exact == (keeps_bits or mine.report.requests_per_step == 1)
        equal = [torch.equal(a, b) for a, b in zip(mine.logits, alone.logits, strict=True)]
        assert all(equal) or not keeps_bits
        if dtype == "float32":
            for logits, wanted in zip(mine.logits, alone.logits, strict=True):
                torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
