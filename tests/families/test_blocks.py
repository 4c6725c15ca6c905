"""Every family with drafts: blocks of several rows, drafts right and wrong, and the tokens of Transformers `eager`."""

from __future__ import annotations

import random
from typing import Any

import torch

from main_node.drafting import Drafting
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.nodes.exact import answers


class Scripted(Drafting):
    """Drafts of an answer that is known: the next 1 to 5 tokens, with a wrong one among them now and then."""

    def __init__(self, answer: list[int], vocabulary: int) -> None:
        super().__init__(None)
        self.on = True
        self.wrong = 0
        self._answer, self._vocabulary = answer, vocabulary
        self._random = random.Random(3)
        self._count = 0

    def decoded(self, request: int, tokens: Any) -> int:
        self._count += len(tokens)
        return 0

    def take(self, request: int, most: int) -> tuple[int, ...]:
        drafts = self._answer[self._count : self._count + self._random.randint(0, 5)]
        if drafts and self._random.random() < 0.5:
            at = self._random.randrange(len(drafts))
            drafts[at] = (drafts[at] + 1) % self._vocabulary
            self.wrong += 1
        return tuple(drafts[: most - 1])


def test_tokens_and_logits_are_those_without_drafts(tiny: Any) -> None:
    settings = Settings(model=tiny.family, shadow="none", workers=2, threads=1, mini_batch=4096)
    cluster = EmbeddedCluster(settings, tiny.store)
    try:
        _, alone = answers(cluster, tiny.prompt, len(tiny.answer))
        vocabulary = cluster.main.model.get_input_embeddings().num_embeddings
        drafting = cluster.main.drafting = Scripted(tiny.answer, vocabulary)
        report, logits = answers(cluster, tiny.prompt, len(tiny.answer))
        assert report.token_ids == tiny.answer
        assert all(torch.equal(mine, one) for mine, one in zip(logits, alone, strict=True))
        assert drafting.wrong > 1
        assert cluster.main.engine.idle()
    finally:
        cluster.close()
