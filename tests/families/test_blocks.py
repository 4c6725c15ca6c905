"""Every family with drafts: blocks of several rows, drafts right and wrong, and the tokens of Transformers `eager`."""

from __future__ import annotations

from typing import Any

import torch

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.nodes.engine_world import becomes_idle
from support.nodes.exact import answers
from support.shadows.scripted_drafts import ScriptedDrafts


def test_tokens_and_logits_are_those_without_drafts(tiny: Any) -> None:
    settings = Settings(model=tiny.family, shadow="none", workers=2, threads=1, mini_batch=4096)
    cluster = EmbeddedCluster(settings, tiny.store)
    try:
        drafts = cluster.main.drafting = ScriptedDrafts({tuple(tiny.prompt): tiny.answer})
        report, logits = answers(cluster, tiny.prompt, len(tiny.answer))
        assert report.token_ids == tiny.answer
        assert all(torch.equal(mine, one) for mine, one in zip(logits, tiny.logits, strict=True))
        assert 0 < report.accepted < report.drafted
        assert drafts.wrong > 1
        assert becomes_idle(cluster.main.engine)
    finally:
        cluster.close()
