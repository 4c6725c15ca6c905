"""Answers with drafts: the tokens and logits are those without, whatever is drafted, lost or given up on the way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from main_node.answer import collect
from main_node.sampling import Sampling
from main_node.sources import TextRules
from scheduler.errors import ClusterError, ConfigError, RequestCancelledError
from support.cases import slow_except
from support.nodes.engine_world import Later, becomes_idle
from support.nodes.exact import WHOLE, answers, answers_together, check_together
from support.shadows.scripted_drafts import ScriptedDrafts

pytestmark = pytest.mark.timeout(180)
TOKENS = 12
DRAW = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=7)
LISTED = [5, 6, 7, 8, 9, 10, 11, 12] * 3


@pytest.fixture
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report waits a moment for predictions: with drafts that are not its own, a shadow is overtaken by whole passes,
    which it never predicts."""
    monkeypatch.setattr("main_node.node.LAST_PREDICTIONS_S", 0.2)


def scripted(cluster: Any, expected: list[Any], taken: Any = lambda count: None) -> ScriptedDrafts:
    drafts = cluster.main.drafting = ScriptedDrafts({tuple(one.prompt): one.tokens for one in expected}, taken)
    return drafts


@pytest.mark.usefixtures("short_drain")
@pytest.mark.parametrize(
    ("count", "shadow", "slots"), slow_except([(1, "fp16", 1)], [(1, "fp16", 1), (3, "none", 1), (2, "nf4", 2)])
)
def test_drafts_right_and_wrong(count: int, shadow: str, slots: int, embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow=shadow, slots=slots, **WHOLE)
    expected = [reference("float32", number, 2 * TOKENS) for number in range(count)]
    drafts = scripted(cluster, expected)
    reports = [one.report for one in check_together(cluster.main, expected)]
    assert drafts.wrong > count
    assert 0 < sum(report.accepted for report in reports) < sum(report.drafted for report in reports)
    assert all(report.exact for report in reports)


@pytest.mark.parametrize(
    ("count", "shadow", "draft", "departure"),
    slow_except([(1, "nf4", 4, "at-once")], [(1, "nf4", 4, "at-once"), (2, "int8", 8, "late")]),
)
def test_drafts_of_the_shadow(
    count: int, shadow: str, draft: int, departure: str, embedded: Any, reference: Any
) -> None:
    cluster = embedded(shadow=shadow, draft=draft, departure=departure, **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in range(count)]
    for report in [one.report for one in check_together(cluster.main, expected)]:
        assert report.recall > 0.9
        assert report.drafted <= draft * TOKENS
    assert cluster.main.engine.peers.lost == []


@pytest.mark.slow
def test_drafts_by_the_live_rule(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="nf4", draft="auto", **WHOLE)
    check_together(cluster.main, [reference("float32", number, TOKENS) for number in range(2)])


@pytest.mark.slow
def test_bfloat16(embedded: Any, reference: Any) -> None:
    cluster = embedded("bfloat16", shadow="none", slots=2, **WHOLE)
    expected = [reference("bfloat16", number, TOKENS) for number in (0, 4)]
    scripted(cluster, expected)
    check_together(cluster.main, expected)


@pytest.mark.slow
def test_drafts_from_the_prompt(embedded: Any, reference: Any) -> None:
    """Transformers' own prompt lookup; with the answer that repeats itself, most are right."""
    plain = embedded(shadow="none", **WHOLE)
    expected, _ = answers(plain, LISTED, TOKENS)
    cluster = embedded(shadow="none", draft=4, draft_from="prompt", **WHOLE)
    report, _ = answers(cluster, LISTED, TOKENS)
    assert report.token_ids == expected.token_ids
    assert report.drafted > 0
    assert becomes_idle(cluster.main.engine)


@pytest.mark.slow
@pytest.mark.usefixtures("short_drain")
def test_drawn_tokens_are_those_of_the_same_seed(embedded: Any, reference: Any) -> None:
    prompt = reference("float32", 0, TOKENS).prompt
    cluster = embedded(shadow="fp16", **WHOLE)
    tokens, _ = collect(cluster.main.generate(prompt, TOKENS, ignore_eos=True, sampling=DRAW))
    drafts = cluster.main.drafting = ScriptedDrafts({tuple(prompt): tokens})
    again, report = collect(cluster.main.generate(prompt, TOKENS, ignore_eos=True, sampling=DRAW))
    assert again == tokens
    assert 0 < report.accepted
    assert drafts.wrong


@pytest.mark.parametrize("count", slow_except([7], [2, 7]))
def test_an_answer_ends_within_a_block(count: int, embedded: Any, reference: Any) -> None:
    """By its length, and by a text in it; no draft is read beyond its last token."""
    cluster = embedded(shadow="none", **WHOLE)
    expected = reference("float32", 0, TOKENS)
    drafts = scripted(cluster, [expected])
    assert collect(cluster.main.generate(expected.prompt, count, ignore_eos=True))[0] == expected.tokens[:count]
    seen = itertools.count(1)
    cluster.main.text = TextRules(lambda texts, prompt: lambda token: next(seen) == count)
    tokens, report = collect(cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True, stop=("a text",)))
    assert (tokens, report.finish) == (expected.tokens[:count], "stop_text")
    assert drafts.blocks
    assert becomes_idle(cluster.main.engine)


@pytest.mark.slow
@pytest.mark.usefixtures("short_drain")
def test_a_request_is_cancelled_within_a_block(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="fp16", **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4)]
    scripted(cluster, expected)
    first, second = (cluster.main.generate(one.prompt, TOKENS, ignore_eos=True) for one in expected)
    begun = next(first).token_id
    fired, layers = cluster.main.engine.on_gate_fired, itertools.count()

    def cancelling(visit: Any, layer: Any) -> None:
        fired(visit, layer)
        if visit.request == second.number and layer.is_block and next(layers) == 1:
            second.cancel()

    cluster.main.engine.on_gate_fired = cancelling
    other = Later(lambda: collect(second))
    assert [begun, *collect(first)[0]] == list(expected[0].tokens)
    with pytest.raises(RequestCancelledError):
        other.result()
    assert next(layers) > 1


@pytest.mark.usefixtures("short_drain")
@pytest.mark.parametrize("role", ["worker", "shadow"])
def test_a_node_is_lost_within_a_block(role: str, embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="fp16", workers=4, **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4)]
    scripted(cluster, expected)
    engine, layers = cluster.main.engine, itertools.count()
    fired = engine.on_gate_fired

    def losing(visit: Any, layer: Any) -> None:
        fired(visit, layer)
        if layer.is_block and next(layers) == 1:
            lost = engine.peers.workers[2] if role == "worker" else engine.peers.shadow
            lost.on_close(ClusterError("its cable was cut"))

    engine.on_gate_fired = losing
    check_together(cluster.main, expected)
    assert engine.peers.lost == (["worker 2"] if role == "worker" else ["shadow"])


@pytest.mark.slow
def test_a_lone_request_stays_exact_in_a_batched_cluster(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", batch_dense=True, **WHOLE)
    expected = reference("float32", 0, TOKENS)
    scripted(cluster, [expected])
    report, logits = answers(cluster, expected.prompt, TOKENS)
    assert (report.token_ids, report.exact) == (list(expected.tokens), True)
    assert all(torch.equal(row, other) for row, other in zip(logits, expected.logits, strict=True))


def test_blocks_in_a_batched_step(embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow="none", batch_dense=True, **WHOLE)
    expected = [reference("float32", number, TOKENS) for number in (0, 4)]
    scripted(cluster, expected)
    got = answers_together(cluster.main, [one.prompt for one in expected], [TOKENS] * 2)
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.tokens == wanted.tokens
        for row, other in zip(mine.logits, wanted.logits, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"shadow": "none", "draft": 2}, "there is no shadow to draft"),
        ({"shadow": "int8", "draft": 2, "draft_from": "prompt"}, "give --shadow none"),
        ({"shadow": "int8", "draft": 2, "draft_from": "mtp"}, "give --shadow none"),
        ({"shadow": "none", "draft": 2, "draft_from": "mtp"}, "model_type 'mixtral', of which none can be read"),
        ({"draft": 2, "align_token": 4}, "need its token aligned after each block"),
        ({"draft_from": "prompt"}, "give --draft auto or a number, too"),
        ({"system": "fate", "draft": "auto", "draft_from": "prompt"}, "policies that read the scores of gates"),
        ({"draft": 64}, "allowed: auto, 0"),
        ({"draft": "many"}, "allowed: auto, 0"),
    ],
)
def test_drafts_that_cannot_be(settings: dict[str, Any], wrong: str, embedded: Any) -> None:
    with pytest.raises(ConfigError, match=wrong):
        embedded(**settings)
