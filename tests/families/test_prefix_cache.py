"""Every family with a prefix cache: what is kept of a prompt's KV cache gives the bits that reading it again gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from checkpoint.kv_blocks import why_not_kept
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.nodes.exact import answers, answers_together
from support.shadows.scripted_drafts import ScriptedDrafts

BLOCK, TOKENS = 8, 6
DRAW = random.Random(1)
TURNS = [DRAW.randrange(1, 96) for _ in range(43)]
"""A conversation. Its prompts are longer than the windows of these models."""
PROMPTS = [TURNS[:19], TURNS[:30], TURNS]
NOT_KEPT = {
    *("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "minimax_m3_vl_text"),
    *("mistral_large4", "qwen4_exp_text", "jamba", "minimax"),
}


def made(tiny: Any, **more: Any) -> EmbeddedCluster:
    fields = {"shadow": "none", "workers": 2, "threads": 1, "mini_batch": 4096, "kv_memory": "1GB"} | more
    return EmbeddedCluster(Settings(model=tiny.family, prefill_chunk=BLOCK, **fields), tiny.store)


def cold_answers(tiny: Any) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Tokens and logits of each prompt's answer, of a main node that has read no other."""
    found = []
    for prompt in PROMPTS:
        cluster = made(tiny)
        try:
            report, logits = answers(cluster, prompt, TOKENS)
        finally:
            cluster.close()
        assert report.cached_tokens == 0
        found.append((report.token_ids, logits))
    return found


def test_a_warm_answer_is_the_cold_one(family: str, tiny: Any, tmp_path: Path) -> None:
    cold = cold_answers(tiny)
    kept = not why_not_kept(tiny.model.config)
    assert kept is (family not in NOT_KEPT)
    cluster = made(tiny, kv_disk=str(tmp_path))
    try:
        for prompt, before, (tokens, logits) in zip(PROMPTS, (0, 16, 24), cold, strict=True):
            report, found = answers(cluster, prompt, TOKENS)
            assert (report.token_ids, report.cached_tokens) == (tokens, before if kept else 0)
            assert all(torch.equal(mine, one) for mine, one in zip(found, logits, strict=True))
        cluster.main.drafting = ScriptedDrafts(
            {tuple(prompt): answer for prompt, (answer, _) in zip(PROMPTS, cold, strict=True)}
        )
        together = answers_together(cluster.main, PROMPTS, [TOKENS] * len(PROMPTS))
        for mine, (tokens, logits) in zip(together, cold, strict=True):
            assert (mine.tokens, mine.report.cached_tokens > 0) == (tokens, kept)
            assert all(torch.equal(one, other) for one, other in zip(mine.logits, logits, strict=True))
    finally:
        cluster.close()
    again = made(tiny, kv_disk=str(tmp_path))
    try:
        report, found = answers(again, PROMPTS[-1], TOKENS)
        assert (report.token_ids, report.cached_tokens) == (cold[-1][0], 40 if kept else 0)
        assert all(torch.equal(mine, one) for mine, one in zip(found, cold[-1][1], strict=True))
    finally:
        again.close()
