"""Prompts that are kept on a main node: beside Transformers, beside other requests, within the memory for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint.fixed_shapes import LEAST_ROWS
from main_node.answer import collect
from support.nodes.exact import WHOLE, answers, answers_together

pytestmark = pytest.mark.timeout(180)
TOKENS, BLOCK = 6, 32


@pytest.mark.slow
def test_a_warm_answer_has_the_tokens_of_transformers(embedded: Any, reference: Any) -> None:
    """And recall that a cold one has: the shadow reads the whole prompt, and gets all rows."""
    cluster = embedded(shadow="int8", kv_memory="64MiB", prefill_chunk=BLOCK, **WHOLE)
    long, short = reference("float32", 4, TOKENS), reference("float32", 0, TOKENS)
    cold, logits = answers(cluster, long.prompt, TOKENS)
    warm, found = answers(cluster, long.prompt, TOKENS)
    assert (cold.token_ids, cold.cached_tokens, cold.prefill_passes) == (long.tokens, 0, 1)
    assert (warm.token_ids, warm.cached_tokens) == (long.tokens, (len(long.prompt) - 1) // BLOCK * BLOCK)
    assert all(torch.equal(mine, one) for mine, one in zip(found, logits, strict=True))
    for mine, one in zip(found, long.logits, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-4)
    assert (cold.inexact, warm.inexact) == (["--kv-memory"], ["--kv-memory"])
    assert warm.recall == pytest.approx(cold.recall, abs=0.1)
    together = answers_together(cluster.main, [long.prompt, short.prompt, long.prompt], [TOKENS] * 3)
    assert [one.tokens for one in together] == [long.tokens, short.tokens, long.tokens]
    assert all(torch.equal(mine, one) for mine, one in zip(together[2].logits, logits, strict=True))


def test_a_prompt_without_a_block_stays_exact(embedded: Any, reference: Any) -> None:
    kept, plain = (embedded(shadow="none", **more, **WHOLE) for more in ({"kv_memory": "64MiB"}, {}))
    prompt = reference("float32", 4, TOKENS).prompt[: BLOCK + LEAST_ROWS - 1]
    (report, logits), (without, rows) = (answers(cluster, prompt, TOKENS) for cluster in (kept, plain))
    assert (report.exact, report.token_ids) == (True, without.token_ids)
    assert all(torch.equal(mine, row) for mine, row in zip(logits, rows, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_are_not_cut_where_rows_are_alike(embedded: Any, reference: Any, dtype: str) -> None:
    """Prompts that go on at several places, one after the other and at once, in chunks of 64 tokens: each answer has
    the bits of one that is read as a whole, by a node that has read nothing else."""
    tokens = reference("float32", 4, TOKENS).prompt
    tokens = (tokens * (700 // len(tokens) + 1))[:700]
    prompts = [tokens[:stop] for stop in (70, 111, 112, 300, 571, 700)]
    common = {"shadow": "none", "kv_memory": "64MiB", "prefill_chunk": 2 * BLOCK, "dtype": dtype} | WHOLE
    warm, cold = embedded(**common), embedded(**common)
    if not warm.main.kept.is_uncut:
        pytest.skip("this machine's products differ with the number of rows")
    expected = []
    for prompt in prompts:
        cold.main.kept.forget()
        expected.append(answers(cold, prompt, 3))
        assert (expected[-1][0].cached_tokens, expected[-1][0].prefill_passes) == (0, 1)
    for prompt, (report, logits) in zip(prompts, expected, strict=True):
        mine, found = answers(warm, prompt, 3)
        assert (mine.token_ids, mine.prefill_passes) == (report.token_ids, 1)
        assert all(torch.equal(one, other) for one, other in zip(found, logits, strict=True))
        most = len(prompt) - LEAST_ROWS
        assert prompt == prompts[0] or 0 < mine.cached_tokens <= most
    warm.main.kept.forget()
    together = answers_together(warm.main, prompts, [3] * len(prompts))
    for one, (report, logits) in zip(together, expected, strict=True):
        assert one.tokens == report.token_ids
        assert all(torch.equal(mine, other) for mine, other in zip(one.logits, logits, strict=True))


@pytest.mark.slow
def test_blocks_give_way_within_the_memory(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", kv_memory="600kB", prefill_chunk=BLOCK, **WHOLE)
    kept, most = cluster.main.kept, 600_000
    prompts = [reference("float32", number, TOKENS).prompt for number in (0, 4, 8)]
    for prompt in [*prompts, *prompts]:
        answers(cluster, prompt, 2)
        assert 0 < kept.nbytes <= most
    again, _ = answers(cluster, prompts[-1], 2)
    assert again.cached_tokens > 0


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_need_all_of_it(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", kv_memory="64MiB", prefill_chunk=BLOCK, **WHOLE)
    one = reference("float32", 4, TOKENS)
    answers(cluster, one.prompt, 2)
    steps = list(cluster.main.generate(one.prompt, 2, ignore_eos=True, prompt_logprobs=0))
    assert len(steps[0].prompt_logprobs) == len(one.prompt)
    assert steps[-1].report.cached_tokens == 0
    assert steps[0].token_id == one.tokens[0]


def test_nothing_is_found_again_that_may_be_wrong(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", kv_memory="64MiB", prefill_chunk=BLOCK, **WHOLE)
    one = reference("float32", 4, TOKENS)
    answer = cluster.main.generate(one.prompt, 3, ignore_eos=True)
    next(answer)
    assert cluster.main.kept.nbytes > 0
    answer.request.is_doubted = True  # as where a worker is found to give wrong outputs
    collect(answer)
    assert cluster.main.kept.nbytes == 0
    answers(cluster, one.prompt, 2)
    assert cluster.main.kept.nbytes > 0
    cluster.main.engine.checks.on_wrong_outputs()  # of requests that have ended, too
    assert cluster.main.kept.nbytes == 0
    assert answers(cluster, one.prompt, 2)[0].cached_tokens == 0
