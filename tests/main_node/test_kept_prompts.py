"""Prompts that are kept on a main node: beside Transformers, beside other requests, within the memory for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

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


def test_a_prompt_within_a_block_stays_exact(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", kv_memory="64MiB", **WHOLE)
    one = reference("float32", 0, TOKENS)
    report, logits = answers(cluster, one.prompt, TOKENS)
    assert (report.exact, report.token_ids) == (True, one.tokens)
    assert all(torch.equal(mine, row) for mine, row in zip(logits, one.logits, strict=True))


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


def test_a_start_that_fails_leaves_the_directory_to_the_next(
    embedded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"shadow": "none", "kv_memory": "64MiB", "kv_disk": str(tmp_path), "workers": 1}
    with monkeypatch.context() as patch:
        patch.setattr("main_node.node.OutputLayer", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            embedded(**how)
    assert embedded(**how).main.kept.is_on
