"""`odmoe generate --retry`: the main node dies after some tokens, once or several times, and the answer is the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from main_node.answer import Step
from main_node.sampling import GenerateOptions, Sampling
from odmoe.clusters import retries
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.clusters.retries import RetriedAnswer, Retrying
from odmoe.settings.settings import Settings
from scheduler.errors import (
    AnswerChangedError,
    LaunchError,
    LinkError,
    MainNodeLostError,
    RequestCancelledError,
    RequestError,
)
from support.cases import slow_except
from support.machines.cli import CommandLine

TOKENS = [5, 3, 8, 8, 1, 2]


class Answering(Iterator[Step]):
    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self.closed = self.cancelled = False

    def __next__(self) -> Step:
        return next(self._steps)

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        self.closed = True


class DyingCluster:
    """Its main node dies after each of these numbers of tokens in turn, then lives. `tokens`: of each answer."""

    def __init__(self, deaths: list[int], tokens: list[list[int]] | None = None, absences: int = 0) -> None:
        self.deaths, self.tokens = deaths, tokens or [TOKENS] * (len(deaths) + 1)
        self.absences = absences
        """How often it is not back yet."""
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Answering] = []

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Any) -> Answering:
        self.requests.append({"prompt": prompt, "max_new_tokens": max_new_tokens, **how})
        self.answers.append(Answering(self._steps(len(self.answers))))
        return self.answers[-1]

    def _steps(self, number: int) -> Iterator[Step]:
        for position, token in enumerate(self.tokens[number]):
            if number < len(self.deaths) and position == self.deaths[number]:
                raise MainNodeLostError("the main node died: SIGKILL")
            yield Step(token)
        yield Step(None)

    def rejoin(self, within_s: float, given_up: threading.Event) -> None:
        assert within_s > 0
        self.absences -= 1
        if self.absences >= 0:
            raise LinkError("the main node is not there just now")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "AGAIN_S", 0.001)


def answered(cluster: Any, retry: int, sampling: Sampling | None = None, wait_s: float = 5.0) -> tuple[Any, list[str]]:
    """The tokens, or the error; and the lines about retries."""
    lines: list[str] = []
    retried = RetriedAnswer(cluster, Retrying(retry, wait_s, lines.append), threading.Event(), set())
    return [
        step.token_id for step in retried.steps([1, 2], 6, {"sampling": sampling or Sampling()}) if step.token_id
    ], lines


@pytest.mark.parametrize("deaths", [[], [0], [3], [5], [4, 4], [3, 0, 5], [2, 5, 1]])
def test_every_token_once(deaths: list[int]) -> None:
    cluster = DyingCluster(deaths)
    tokens, lines = answered(cluster, 3)
    assert tokens == TOKENS
    seen = [max(deaths[: n + 1]) for n in range(len(deaths))]
    nouns = ["1 token" if count == 1 else f"{count} tokens" for count in seen]
    assert lines == [f"main node lost after {noun}; retry {n} of 3" for n, noun in enumerate(nouns, 1)]
    assert all(answer.closed for answer in cluster.answers)
    assert all(request == cluster.requests[0] for request in cluster.requests)


def test_without_a_retry_left_it_is_the_error_of_before() -> None:
    for retry in range(3):
        cluster = DyingCluster([2] * (retry + 1))
        with pytest.raises(MainNodeLostError, match="the main node died: SIGKILL"):
            answered(cluster, retry)
        assert len(cluster.requests) == retry + 1


def test_another_token_than_before_is_named() -> None:
    cluster = DyingCluster([4], [TOKENS, [5, 3, 9, 8, 1, 2]])
    with pytest.raises(AnswerChangedError, match="token 3 of the answer is 9 now, and was 8 before"):
        answered(cluster, 3)
    assert len(cluster.requests) == 2


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.0, draw=True), False),
        (Sampling(temperature=0.8), True),
        (Sampling(draw=True), True),
        (Sampling(temperature=0.8, seed=7), False),
    ],
)
def test_a_seed_is_drawn_where_there_is_none(sampling: Sampling, drawn: bool) -> None:
    seeds = []
    for retry in (0, 1):
        cluster = DyingCluster([3] if retry else [])
        answered(cluster, retry, sampling)
        seeds.append([request["sampling"].seed for request in cluster.requests])
    assert seeds[0] == [sampling.seed]
    assert len(set(seeds[1])) == 1
    assert (seeds[1][0] != sampling.seed) == drawn


def test_a_main_node_that_is_not_back_yet_is_waited_for() -> None:
    assert answered(DyingCluster([3], absences=4), 1)[0] == TOKENS
    with pytest.raises(MainNodeLostError, match=r"died: SIGKILL; it was not back after 0\.05 s"):
        answered(DyingCluster([3], absences=10**9), 1, wait_s=0.05)


def test_a_main_node_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = DyingCluster([3])

    def rejoin(within_s: float, given_up: threading.Event) -> None:
        raise LaunchError("the cluster serves another model now")

    monkeypatch.setattr(cluster, "rejoin", rejoin)
    with pytest.raises(LaunchError, match="another model"):
        answered(cluster, 1)


def test_given_up_while_it_waits() -> None:
    given_up = threading.Event()
    given_up.set()
    retried = RetriedAnswer(DyingCluster([3], absences=10**9), Retrying(1, 600), given_up, set())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="interrupted"):
        list(retried.steps([1, 2], 6, {"sampling": Sampling()}))


def test_given_up_while_the_main_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for it, of minutes, knows of the end."""
    given_up, cluster = threading.Event(), DyingCluster([3])

    def rejoin(within_s: float, gone: threading.Event) -> None:
        given_up.set()
        assert gone.is_set()
        raise RequestCancelledError("given up")

    monkeypatch.setattr(cluster, "rejoin", rejoin)
    retried = RetriedAnswer(cluster, Retrying(1, 600), given_up, set())  # type: ignore[arg-type]
    with pytest.raises(RequestCancelledError):
        list(retried.steps([1, 2], 6, {"sampling": Sampling()}))
    assert len(cluster.requests) == 1


def test_given_up_before_it_begins() -> None:
    """There was no answer to cancel then: it is cancelled before its first step."""
    given_up, cluster = threading.Event(), DyingCluster([])
    steps = RetriedAnswer(cluster, Retrying(0, 600), given_up, set()).steps([1], 6, {"sampling": Sampling()})  # type: ignore[arg-type]
    given_up.set()
    next(steps)
    assert cluster.answers[0].cancelled
    steps.close()


class Dying(EmbeddedCluster):
    """The demo model's own cluster. Its first answer ends with its main node."""

    died = 0

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Any) -> Any:
        steps = super().generate(prompt, max_new_tokens, **how)
        return Answering(self._some(steps)) if not self.died else steps

    def _some(self, steps: Iterator[Step]) -> Iterator[Step]:
        for _ in range(7):
            yield next(steps)
        type(self).died += 1
        raise MainNodeLostError("the main node died: SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("schema", [None, '{"type": "string", "maxLength": 30}'], ids=["", "schema"])
def test_every_step_once_with_all_that_was_asked_for(schema: str | None, demo_store: Any) -> None:
    """The prompt's log-probabilities, too: with the first token, and not again with the first of the second answer."""
    Dying.died = 0
    sampling = Sampling(temperature=1.2, seed=3, frequency_penalty=0.5, logit_bias=((40, 2.0),))
    how: GenerateOptions = {"sampling": sampling, "logprobs": 3, "prompt_logprobs": 2, "schema": schema}
    prompt = [5, 17, 300, 88, 41]
    settings = Settings(model="demo", shadow="none", workers=1, threads=1, loader="memory")
    with closing(Dying(settings, demo_store("float32"))) as cluster:
        retried = RetriedAnswer(cluster, Retrying(2, 5.0), threading.Event(), set())
        *steps, _ = retried.steps(prompt, 16, {**how})
        assert Dying.died == 1
        *wanted, _ = cluster.generate(prompt, 16, **how)
    assert len(wanted) > 7
    assert steps == wanted
    assert len(steps[0].prompt_logprobs or ()) == len(prompt)


@pytest.mark.parametrize("flags", slow_except([["--temperature", "0.9"]], [[], ["--temperature", "0.9"]]))
def test_the_text_is_shown_once(
    flags: list[str], cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dying.died = 0

    def start(settings: Settings, store: Any, say: Any) -> Any:
        return Dying(settings.replace(cluster="embedded", retry=0), store, say)

    monkeypatch.setattr("odmoe.api.model.start_cluster", start)
    common = ["generate", "-m", str(demo), "-n", "16", "--shadow", "none", "--workers", "1", "--threads", "1", *flags]
    answer = cli(*common, "--cluster", "auto", "--retry", "3", "HAMLET", "--json")
    assert (answer.code, Dying.died) == (0, 1), answer
    facts = json.loads(answer.out)
    assert answer.err == "main node lost after 7 tokens; retry 1 of 3\n"
    seed = [] if facts["seed"] is None else ["--seed", str(facts["seed"])]
    assert bool(seed) == bool(flags)
    whole = cli(*common, *seed, "HAMLET", "--json")
    assert json.loads(whole.out)["text"] == facts["text"]


def test_only_a_cluster_that_lasts(cli: CommandLine, demo: Path) -> None:
    for cluster in ("embedded", "local"):
        answer = cli("generate", "-m", str(demo), "--cluster", cluster, "--retry", "1", "HAMLET")
        assert answer.code == 2
        assert f"--retry is 1 with --cluster {cluster}" in answer.err
