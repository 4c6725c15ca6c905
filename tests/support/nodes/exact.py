"""Settings under which an answer must be Transformers', and what is compared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint.store import ExpertStore
from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings

WAIT_S = 120.0

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


def answers(cluster: Any, prompt: list[int], count: int) -> tuple[Any, list[torch.Tensor]]:
    """The report of one answer, and the logits of each of its tokens."""
    logits: list[torch.Tensor] = []
    cluster.main.on_logits = lambda _, values: logits.append(values)
    *_, last = cluster.generate(prompt, count, ignore_eos=True)
    return last.report, logits


def answer_of(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens of a model of Transformers, and their logits."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.sequences[0, len(prompt) :].tolist(), [row[0] for row in found.logits]


def check_as_transformers(model: Any, path: Path, store: ExpertStore, prompt: list[int], count: int) -> None:
    """A cluster's tokens and logits are those of `model`, bit for bit. `path`: the checkpoint of both."""
    tokens, logits = answer_of(model, prompt, count)
    assert len(set(tokens)) > 3, "the model says nothing: a comparison would prove nothing"
    cluster = EmbeddedCluster(Settings(model=str(path), workers=3, threads=1, mini_batch=4096), store)
    try:
        report, found = answers(cluster, prompt, count)
    finally:
        cluster.close()
    assert report.token_ids == tokens
    for position, (ours, theirs) in enumerate(zip(found, logits, strict=True)):
        assert torch.equal(ours.flatten().float(), theirs.float()), f"logits of token {position}"


@dataclass(frozen=True)
class Alone:
    """A request's answer when no other is open."""

    prompt: list[int]
    tokens: list[int]
    logits: list[torch.Tensor]


@dataclass
class Together:
    """One of several answers at once."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    report: Any = None


def answers_together(main: Any, prompts: list[list[int]], counts: list[int], **how: Any) -> list[Together]:
    """Answers of `counts` tokens to `prompts`, all at once, in a thread each. Raises the first error of a thread."""
    runs = [main.generate(prompt, count, ignore_eos=True, **how) for prompt, count in zip(prompts, counts, strict=True)]
    got = {run.number: Together() for run in runs}
    main.on_logits = lambda number, values: got[number].logits.append(values)

    def read(run: Any) -> None:
        mine = got[run.number]
        mine.tokens, mine.report = collect(run)

    with ThreadPoolExecutor(len(runs)) as pool:
        for ended in [pool.submit(read, run) for run in runs]:
            ended.result(WAIT_S)
    return list(got.values())


def check_together(main: Any, expected: list[Any]) -> list[Together]:
    """Tokens and logits of each request are those of `expected`, its answer alone, bit for bit."""
    got = answers_together(main, [one.prompt for one in expected], [len(one.tokens) for one in expected])
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    for mine, alone in zip(got, expected, strict=True):
        equal = [torch.equal(a, b) for a, b in zip(mine.logits, alone.logits, strict=True)]
        assert equal == [True] * len(alone.tokens)
    return got


def check_bit_for_bit(cluster: Any, name: str, expected: Any) -> None:
    """Tokens and logits are those of `expected`, with no more experts held than there are slots by setting `name`."""
    report, logits = answers(cluster, expected.prompt, len(expected.tokens))
    assert report.token_ids == expected.tokens
    equal = [torch.equal(a, b) for a, b in zip(logits, expected.logits, strict=True)]
    assert equal == [True] * len(expected.tokens)
    assert max(report.resident_experts_max) <= SETTINGS[name].get("slots", 1)


def check_split_prefill(cluster: Any, expected: Any) -> None:
    """Mini-batches change the shapes of the products, so logits agree to rounding and tokens agree."""
    report, logits = answers(cluster, expected.prompt, len(expected.tokens))
    assert report.token_ids == expected.tokens
    for got, wanted in zip(logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def mean_recall(cluster: Any, prompts: list[list[int]], count: int) -> float:
    """Equation (3) over answers of `count` tokens, each of whose passes was predicted."""
    reports = [answers(cluster, prompt, count)[0] for prompt in prompts]
    assert all(len(report.recall_by_token) == count - 1 for report in reports)
    return sum(report.recall for report in reports) / len(reports)
