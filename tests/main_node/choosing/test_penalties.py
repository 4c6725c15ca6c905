"""OpenAI's penalties and biases: the tokens that Transformers' `generate` chooses with the definition written out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from main_node.answer import collect
from main_node.choosing.chooser import Chooser
from main_node.sampling import GREEDY, Sampling
from odmoe.clusters.embedded import EmbeddedCluster
from scheduler.errors import ConfigError
from support.cases import slow_except
from support.nodes.exact import answers_together
from support.shadows.scripted_drafts import ScriptedDrafts

COUNT = 16
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 3}
CASES = {
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=0.75),
    "negative": Sampling(presence_penalty=-2.0, frequency_penalty=-0.5, **DRAWN),
    "bias": Sampling(logit_bias=((13, 4.0), (222, -100.0), (13, 1.0))),
    "all, drawn": Sampling(presence_penalty=0.5, frequency_penalty=1.25, logit_bias=((300, 6.0), (17, -3.0)), **DRAWN),
    "beside the repetition penalty": Sampling(frequency_penalty=0.5, repetition_penalty=1.2),
}


class Definition(LogitsProcessor):  # type: ignore[misc]
    """mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence + bias[j], token by token."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self._sampling, self._prompt = sampling, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed = scores.clone()
        for token, count in Counter(input_ids[0, self._prompt :].tolist()).items():
            changed[0, token] -= count * self._sampling.frequency_penalty
            changed[0, token] -= self._sampling.presence_penalty
        for token, bias in self._sampling.logit_bias:
            changed[0, token] += bias
        return changed


def theirs(whole: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    torch.manual_seed(sampling.seed or 0)
    own = LogitsProcessorList([Definition(sampling, len(prompt))])
    settings = sampling.overrides() | {"eos_token_id": None, "pad_token_id": 1}
    with torch.inference_mode():
        out = whole.generate(torch.tensor([prompt]), max_new_tokens=COUNT, logits_processor=own, **settings)
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("name", slow_except(("all, drawn",), CASES))
def test_as_defined(name: str, cluster: EmbeddedCluster, whole: Any, reference: Any) -> None:
    sampling, one = CASES[name], reference("float32", 0, COUNT)
    tokens, report = collect(cluster.generate(one.prompt, COUNT, ignore_eos=True, sampling=sampling))
    assert tokens == theirs(whole, one.prompt, sampling)
    assert tokens != one.tokens
    assert report.exact


@pytest.mark.slow
def test_with_drafts_and_several_at_once(cluster: EmbeddedCluster, reference: Any) -> None:
    sampling, prompts = CASES["all, drawn"], [reference("float32", number, COUNT).prompt for number in range(2)]
    alone = [collect(cluster.generate(prompt, COUNT, ignore_eos=True, sampling=sampling))[0] for prompt in prompts]
    scripted = ScriptedDrafts({tuple(prompt): tokens for prompt, tokens in zip(prompts, alone, strict=True)})
    cluster.main.drafting = scripted
    got = answers_together(cluster.main, prompts, [COUNT] * 2, sampling=sampling)
    assert [one.tokens for one in got] == alone
    assert scripted.wrong
    assert sum(one.report.accepted for one in got) > 0


def test_a_bias_forces_and_bans(cluster: EmbeddedCluster, reference: Any) -> None:
    one = reference("float32", 0, 8)
    forced, _ = collect(cluster.generate(one.prompt, 4, sampling=Sampling(logit_bias=((99, 1000.0),))))
    assert forced == [99] * 4
    banned = tuple((token, -1000.0) for token in one.tokens)
    tokens, _ = collect(cluster.generate(one.prompt, 8, sampling=Sampling(logit_bias=banned)))
    assert not {*tokens} & {*one.tokens}


def test_where_none_is_given_the_processors_are_transformers_alone(cluster: EmbeddedCluster) -> None:
    plain = Chooser(cluster.main.model, Sampling(**DRAWN), [5, 6], 4)
    assert {type(one).__module__ for one in plain._processors} == {"transformers.generation.logits_process"}
    assert not Chooser(cluster.main.model, GREEDY, [5, 6], 4)._processors


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(presence_penalty=math.nan), "presence_penalty is nan"),
        (Sampling(frequency_penalty=math.inf), "frequency_penalty is inf"),
        (Sampling(frequency_penalty=1e39), r"frequency_penalty is 1e\+39"),
        (Sampling(logit_bias=((2048, 1.0),)), "token 2048; allowed: 0 to 2047, the model has 2048 tokens"),
        (Sampling(logit_bias=((-1, 1.0),)), "token -1; allowed: 0 to 2047"),
        (Sampling(logit_bias=((3, 1.0), (4, math.nan))), "adds nan to token 4"),
    ],
)
def test_what_is_refused(sampling: Sampling, message: str, cluster: EmbeddedCluster) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster.generate([5, 6], 4, sampling=sampling)
