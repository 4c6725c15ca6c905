"""Drawn and penalised answers of the whole engine, beside Transformers' own `generate` with the same seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from main_node.choosing.chooser import Chooser, check_settings
from main_node.sampling import GREEDY, Sampling, ignored_settings
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, NonFiniteError, RequestFailedError

COUNT = 10
PROMPT_TOKENS = 24
CASES: list[tuple[Sampling, dict[str, Any]]] = [
    (Sampling(temperature=0.8, seed=1), {"do_sample": True, "temperature": 0.8}),
    (Sampling(temperature=1.4, top_k=7, seed=2), {"do_sample": True, "temperature": 1.4, "top_k": 7}),
    (Sampling(top_p=0.6, seed=3), {"do_sample": True, "top_p": 0.6}),
    (Sampling(min_p=0.2, top_k=0, seed=3), {"do_sample": True, "min_p": 0.2, "top_k": 0}),
    (Sampling(top_k=0, temperature=2.0, seed=4), {"do_sample": True, "top_k": 0, "temperature": 2.0}),
    (Sampling(draw=True, seed=5), {"do_sample": True}),
    (Sampling(repetition_penalty=1.6), {"do_sample": False, "repetition_penalty": 1.6}),
    (
        Sampling(temperature=0.9, top_p=0.8, repetition_penalty=1.3, seed=6),
        {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3},
    ),
]


@pytest.fixture(scope="module")
def cluster(demo_store: Callable[[str], Any]) -> Iterator[EmbeddedCluster]:
    settings = Settings(model="demo", shadow="none", workers=2, threads=1, loader="memory")
    made = EmbeddedCluster(settings, demo_store("float32"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(demo: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, experts_implementation="eager")


@pytest.fixture(scope="module")
def prompt(demo: Any, gsm8k: list[str]) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(demo)(gsm8k[0])["input_ids"]
    return ids[:PROMPT_TOKENS]


def theirs(model: Any, prompt: list[int], seed: int | None, **settings: Any) -> list[int]:
    torch.manual_seed(seed or 0)
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, pad_token_id=1, **settings)
    return [int(token) for token in out[0, len(prompt) :]]


def ours(cluster: EmbeddedCluster, prompt: list[int], sampling: Sampling = GREEDY) -> Any:
    *_, last = cluster.generate(prompt, COUNT, sampling=sampling)
    return last.report


@pytest.fixture(scope="module")
def greedy(cluster: EmbeddedCluster, prompt: list[int]) -> list[int]:
    """The tokens that are not drawn."""
    tokens: list[int] = ours(cluster, prompt).token_ids
    return tokens


@pytest.mark.parametrize(("sampling", "settings"), CASES, ids=[str(settings) for _, settings in CASES])
def test_as_generate(
    cluster: Any, model: Any, prompt: list[int], greedy: list[int], sampling: Sampling, settings: dict[str, Any]
) -> None:
    report = ours(cluster, prompt, sampling)
    assert report.token_ids == theirs(model, prompt, sampling.seed, **settings)
    assert report.exact
    assert report.seed == sampling.seed
    assert report.token_ids != greedy


def test_the_models_own_settings(
    cluster: EmbeddedCluster, model: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What generation_config.json says is heeded, drawing only where it is asked for."""
    own = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "suppress_tokens": [10, 11]}
    for one in (model, cluster.main.model):
        for name, value in (own | {"temperature": 0.7, "top_k": 20}).items():
            monkeypatch.setattr(one.generation_config, name, value)
    assert ours(cluster, prompt).token_ids == theirs(model, prompt, 0, do_sample=False)
    drawn = ours(cluster, prompt, Sampling(draw=True, seed=8))
    assert drawn.token_ids == theirs(model, prompt, 8, do_sample=True)


def test_several_ends(
    cluster: EmbeddedCluster, model: Any, prompt: list[int], greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [greedy[4], greedy[8], 1]
    for one in (model, cluster.main.model):
        monkeypatch.setattr(one.generation_config, "eos_token_id", ends)
    report = ours(cluster, prompt)
    assert report.token_ids == theirs(model, prompt, 0, do_sample=False)
    assert report.finish == "stop"
    assert len(report.token_ids) == 1 + min(greedy.index(end) for end in ends if end in greedy)


def test_without_a_seed_one_is_chosen_and_told(cluster: EmbeddedCluster, prompt: list[int]) -> None:
    first = ours(cluster, prompt, Sampling(temperature=1.5))
    assert ours(cluster, prompt, Sampling(temperature=1.5, seed=first.seed)).token_ids == first.token_ids
    assert ours(cluster, prompt).seed is None


def test_what_needs_more_than_a_pass_a_token_is_named(
    cluster: EmbeddedCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.main.model.generation_config, "num_beams", 4)
    assert ignored_settings(cluster.main.model) == ["num_beams=4"]
    report = ours(cluster, prompt)
    assert (report.ignored, report.exact) == (["num_beams=4"], False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", "2"),
        ("eos_token_id", [1, None]),
        ("repetition_penalty", "a"),
        ("suppress_tokens", "a"),
        ("bad_words_ids", []),
        ("no_repeat_ngram_size", "3"),
        ("min_new_tokens", "3"),
        ("forced_eos_token_id", "x"),
        ("exponential_decay_length_penalty", 5),
        ("sequence_bias", 5),
    ],
)
def test_settings_of_the_model_that_cannot_be_used(
    cluster: EmbeddedCluster, model: Any, prompt: list[int], name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Transformers' own `generate` fails, with whatever error, the setting is named, at the start too."""
    for one in (model, cluster.main.model):
        monkeypatch.setattr(one.generation_config, name, value)
        monkeypatch.setattr(one.generation_config, "temperature", 0.9)
    with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind: that is the point
        model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False)
    named = re.escape(f"generation_config.json: {name} is {value!r}; correct that file")
    for asked in (lambda: check_settings(cluster.main.model), lambda: cluster.generate(prompt, 4)):
        with pytest.raises(ConfigError, match=named):
            asked()


@pytest.mark.parametrize(("name", "value"), [("temperature", 0), ("temperature", "1.0"), ("top_k", -1)])
def test_settings_of_draws_matter_where_tokens_are_drawn(
    cluster: EmbeddedCluster, prompt: list[int], greedy: list[int], name: str, value: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cluster.main.model.generation_config, name, value)
    check_settings(cluster.main.model)
    assert ours(cluster, prompt).token_ids == greedy
    with pytest.raises(ConfigError, match=re.escape(f"generation_config.json: {name} is {value!r}; correct")):
        cluster.generate(prompt, 4, sampling=Sampling(draw=True))


def test_settings_that_transformers_refuses(cluster: EmbeddedCluster, prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match="penalty"):
        cluster.generate(prompt, 4, sampling=Sampling(repetition_penalty=-1.0))


def test_probabilities_that_are_no_numbers(cluster: EmbeddedCluster, prompt: list[int]) -> None:
    with pytest.raises(RequestFailedError, match="temperature"):
        list(cluster.generate(prompt, 4, sampling=Sampling(temperature=1e-45, seed=1)))
    assert ours(cluster, prompt).finish in ("length", "stop")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=1)], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_choose_no_token(
    sampling: Sampling, value: float, cluster: EmbeddedCluster, prompt: list[int]
) -> None:
    """They may be one of many, and the last norm may have them from a worker or from the weights."""
    chooser = Chooser(cluster.main.model, sampling, prompt, 4)
    logits = torch.zeros(cluster.main.model.config.vocab_size)
    assert chooser.choose(logits) >= 0
    logits[17] = value
    with pytest.raises(NonFiniteError, match=r"the logits of token 2 are not finite numbers"):
        chooser.choose(logits)


def test_a_model_that_computes_infinity_fails_by_name_and_blames_no_worker(
    cluster: EmbeddedCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same infinite weight wherever the expert is computed."""
    bind = ExpertArithmetic.bind

    def infinite(arithmetic: ExpertArithmetic, layer: int, views: Any) -> Any:
        compute = bind(arithmetic, layer, views)
        return lambda hidden, weights: compute(hidden, weights) + float("inf")

    monkeypatch.setattr(ExpertArithmetic, "bind", infinite)
    for node in cluster._nodes:
        node._modules.clear()  # type: ignore[attr-defined]
    try:
        with pytest.raises(NonFiniteError):
            list(cluster.generate(prompt, 4))
    finally:
        for node in cluster._nodes:
            node._modules.clear()  # type: ignore[attr-defined]
    assert cluster.main.engine.peers.suspects.facts() == {}
    assert sorted(cluster.main.engine.peers.workers) == [0, 1]


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (GREEDY, False),
        (Sampling(temperature=0.0), False),
        (Sampling(draw=True, temperature=0.0), False),
        (Sampling(temperature=0.0, top_k=5), False),
        (Sampling(top_k=5), True),
        (Sampling(top_p=0.5), True),
        (Sampling(repetition_penalty=2.0, seed=3), False),
    ],
)
def test_when_tokens_are_drawn(sampling: Sampling, drawn: bool) -> None:
    assert sampling.is_random is drawn
