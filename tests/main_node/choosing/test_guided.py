"""Answers that follow a JSON schema: every one that ended by itself is JSON that the schema's own validator accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from main_node.answer import collect
from main_node.sampling import Sampling
from main_node.sources import TextRules
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.json_schema import JsonGuide, make_guides
from odmoe.text import load_tokenizer
from scheduler.errors import ConfigError, RequestCancelledError, RequestFailedError
from support.nodes.engine_world import Later, becomes_idle
from support.paths import DEMO
from support.shadows.scripted_drafts import ScriptedDrafts

ROOM = 80
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "maxItems": 2},
        "kind": {"enum": ["a", "b\n", "ä€", None, 3.5]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WILD: dict[str, Any] = {"temperature": 3.0, "top_k": 0}
"""The tokens are nearly those of a model with random weights."""

scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 900),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,5}$"}, {"type": "string", "format": "date"}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["x", "yy", 7, None, True]), min_size=1)),
)


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
    )
    objects = st.builds(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:1],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "key", "ü"]), inner, max_size=3),
    )
    return st.one_of(arrays, objects, st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner))


schemas = st.recursive(scalars, _wider, max_leaves=5)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer("Answer as JSON: ")["input_ids"]
    return ids


@pytest.fixture(scope="module")
def greedy(shared: EmbeddedCluster, prompt: list[int]) -> Any:
    """The report of an answer whose tokens are not drawn."""
    return answered(shared, prompt, OBJECT)


def answered(cluster: EmbeddedCluster, prompt: list[int], schema: Any, room: int = ROOM, **how: Any) -> Any:
    """The report."""
    return collect(cluster.generate(prompt, room, schema=json.dumps(schema), **how))[1]


def text_of(tokenizer: Any, report: Any) -> str:
    text: str = tokenizer.decode(report.token_ids, skip_special_tokens=True)
    return text


@pytest.mark.slow
@examples(max_examples=5)
@given(schema=schemas, seed=st.integers(0, 1 << 30))
def test_whatever_ended_is_valid(
    schema: Any, seed: int, shared: EmbeddedCluster, tokenizer: Any, prompt: list[int]
) -> None:
    """And what was cut can be completed: a guide takes all of its tokens."""
    report = answered(shared, prompt, schema, 40, sampling=Sampling(seed=seed, **WILD))
    text = text_of(tokenizer, report)
    assert report.finish in ("stop", "length")
    if report.finish == "stop":
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        return
    guide = make_guides(DEMO)(json.dumps(schema), frozenset([1]), 2048)
    for token in report.token_ids:
        assert guide.allowed_tokens()[token]
        guide.take(token)
    assert not guide.complete


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), pytest.param(Sampling(seed=1, **WILD), marks=pytest.mark.slow)],
    ids=["greedy", "drawn"],
)
def test_the_tokens_are_those_of_generate_with_the_mask(
    sampling: Sampling, cluster: EmbeddedCluster, whole: Any, tokenizer: Any, prompt: list[int]
) -> None:
    """Greedy is the most probable token that is allowed. The answer is over with its last token of text."""
    guide = make_guides(DEMO)(json.dumps(OBJECT), frozenset([1]), 2048)

    class Mask(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > len(prompt):
                guide.take(int(input_ids[0, -1]))
            return scores.masked_fill(~guide.allowed_tokens(), -math.inf)

    report = answered(cluster, prompt, OBJECT, sampling=sampling)
    torch.manual_seed(sampling.seed or 0)
    own = LogitsProcessorList([Mask()])
    with torch.inference_mode():
        out = whole.generate(
            torch.tensor([prompt]), max_new_tokens=ROOM, logits_processor=own, pad_token_id=1, **sampling.overrides()
        )
    assert out[0, len(prompt) :].tolist() == [*report.token_ids, 1]
    jsonschema.validate(json.loads(text_of(tokenizer, report)), OBJECT)
    assert report.finish == "stop"


def test_any_object(cluster: EmbeddedCluster, tokenizer: Any, prompt: list[int]) -> None:
    """As OpenAI's `json_object` has it."""
    wanted = tuple((tokenizer.convert_tokens_to_ids(one), 12.0) for one in '"}')
    report = answered(
        cluster, prompt, {"type": "object"}, sampling=Sampling(logit_bias=wanted, seed=2, temperature=2.0)
    )
    assert report.finish == "stop"
    assert isinstance(json.loads(text_of(tokenizer, report)), dict)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_number_may_end_or_go_on(
    ignore_eos: bool, cluster: EmbeddedCluster, tokenizer: Any, prompt: list[int]
) -> None:
    """It ends with the end-of-sequence token, or where no digit may follow. Without such a token only there."""
    sampling = Sampling(logit_bias=((1, 100.0),))
    schema = {"type": "integer", "minimum": 1, "maximum": 99999}
    report = answered(cluster, prompt, schema, sampling=sampling, ignore_eos=ignore_eos)
    assert report.finish == "stop"
    assert (report.token_ids[-1] == 1) is not ignore_eos
    assert 1 <= json.loads(text_of(tokenizer, report)) <= 99999
    if ignore_eos:
        assert json.loads(text_of(tokenizer, report)) >= 10000


def test_a_model_without_an_end_of_sequence_token(
    cluster: EmbeddedCluster, tokenizer: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.main.model.generation_config, "eos_token_id", None)
    report = answered(cluster, prompt, OBJECT)
    assert report.finish == "stop"
    jsonschema.validate(json.loads(text_of(tokenizer, report)), OBJECT)


@pytest.mark.slow
def test_with_drafts_and_several_at_once(
    cluster: EmbeddedCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts right and wrong, and drafts past the end of the JSON, where no token is allowed: the same tokens, and the
    same end."""
    prompts = [prompt, prompt[2:]]
    how: dict[str, Any] = {"schema": json.dumps(OBJECT), "logprobs": 2}
    alone = [list(cluster.generate(one, ROOM, sampling=Sampling(seed=3, **WILD), **how)) for one in prompts]
    assert {steps[-2].finish for steps in alone} == {"stop"}
    tokens = [[step.token_id for step in steps if step.token_id is not None] for steps in alone]
    cluster.main.drafting = scripted = ScriptedDrafts(
        {tuple(one): [*answer, *[5] * 8] for one, answer in zip(prompts, tokens, strict=True)}
    )
    monkeypatch.setattr(cluster.main.model.generation_config, "eos_token_id", None)
    runs = [cluster.generate(one, ROOM, sampling=Sampling(seed=3, **WILD), **how) for one in prompts]
    together = [one.result() for one in [Later(lambda run=run: list(run)) for run in runs]]
    for mine, wanted in zip(together, alone, strict=True):
        assert mine[:-1] == wanted[:-1]
        assert mine[-1].report.finish == "stop"
    assert scripted.wrong
    assert sum(mine[-1].report.accepted for mine in together) > 0
    assert becomes_idle(cluster.main.engine)


@pytest.mark.slow
def test_cut_by_its_length_and_by_a_stop_text(cluster: EmbeddedCluster, prompt: list[int], greedy: Any) -> None:
    cut = answered(cluster, prompt, OBJECT, 5)
    assert (cut.token_ids, cut.finish) == (greedy.token_ids[:5], "length")
    stopped = answered(cluster, prompt, OBJECT, stop=('"ages',))
    assert stopped.finish == "stop_text"
    assert stopped.token_ids == greedy.token_ids[: len(stopped.token_ids)]


@pytest.mark.slow
def test_given_up_and_asked_again(cluster: EmbeddedCluster, prompt: list[int], greedy: Any) -> None:
    """A guide is its answer's own."""
    first = cluster.generate(prompt, ROOM, schema=json.dumps(OBJECT))
    assert [next(first).token_id for _ in range(3)] == greedy.token_ids[:3]
    other = cluster.generate(prompt, ROOM, schema=json.dumps(OBJECT))
    first.cancel()
    with pytest.raises(RequestCancelledError):
        next(first)
    assert collect(other)[0] == greedy.token_ids


def test_settings_that_leave_no_token(
    cluster: EmbeddedCluster, tokenizer: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    brace = tokenizer.convert_tokens_to_ids("{")
    monkeypatch.setattr(cluster.main.model.generation_config, "suppress_tokens", [brace])
    for sampling in (Sampling(), Sampling(seed=1, **WILD)):
        with pytest.raises(RequestFailedError, match="no token is left for place 1 of the answer"):
            answered(cluster, prompt, OBJECT, sampling=sampling)


def test_a_schema_that_cannot_be_followed_any_further(
    cluster: EmbeddedCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's limits are those of one request."""
    allowed, calls = JsonGuide.allowed_tokens, iter(range(100))

    def broken(self: JsonGuide) -> torch.Tensor:
        if next(calls) == 3:
            self._matcher.consume_token(5)  # no token of this text
        return allowed(self)

    monkeypatch.setattr(JsonGuide, "allowed_tokens", broken)
    with pytest.raises(RequestFailedError, match="the schema cannot be followed any further: "):
        answered(cluster, prompt, OBJECT)
    monkeypatch.undo()
    assert answered(cluster, prompt, OBJECT).finish == "stop"


def test_refused_before_anything_is_computed(
    cluster: EmbeddedCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r'the schema is refused: Unimplemented keys: \["not"\]'):
        cluster.generate(prompt, 4, schema='{"not": {}}')
    monkeypatch.setattr(cluster.main, "text", TextRules())
    with pytest.raises(ConfigError, match="made without a tokenizer to follow it"):
        cluster.generate(prompt, 4, schema="{}")
    assert becomes_idle(cluster.main.engine)
