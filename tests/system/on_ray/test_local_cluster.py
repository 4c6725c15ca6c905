"""Nodes in processes of their own, as Ray actors on this machine: the same answers, whoever is killed.

One start of Ray, and the nodes that are killed start again.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from main_node.sampling import Sampling
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from scheduler.errors import ClusterError, ConfigError, PromptError, RequestCancelledError, RequestFailedError
from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.types import RequestClosed, RequestOpened
from support.machines.processes import MARK, marked, wait_until_gone

pytestmark = pytest.mark.system

TOKENS, LONG = 24, 96
FROZEN_S = 4.0
PROMPTS = (0, 4, 8)
WORKERS = 2
NODES = [*(f"worker {number}" for number in range(WORKERS)), "shadow", "main node"]
BACK_S = 180.0
"""Most time until a killed node answers again; on two idle cores it takes about ten seconds."""

COMMON: dict[str, Any] = {
    "workers": WORKERS,
    "shadow": "nf4",
    "threads": 1,
    "mini_batch": 4096,
    "departure": "late",  # at once, recall depends on when alignments come
}


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """What every process of the cluster carries in its environment."""
    value = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, value)
        # For Ray's memory monitor the machine is short of memory all the time, as with another program's 18 GB.
        patch.setenv("RAY_memory_usage_threshold", "0.01")
        yield value


@pytest.fixture(scope="module")
def cluster(mark: str, demo_store: Callable[[str], Any]) -> Iterator[Any]:
    """One local cluster for the whole module; the tests that break it come last."""
    settings = Settings(model="demo", cluster="local", trace="kept in memory", record="too", **COMMON)
    made = start_cluster(settings, demo_store("float32"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def embedded(demo_store: Callable[[str], Any]) -> Iterator[Any]:
    """The same in one process."""
    made = EmbeddedCluster(Settings(model="demo", **COMMON), demo_store("float32"))
    yield made
    made.close()


def answer(cluster: Any, prompt: list[int], count: int = TOKENS) -> Any:
    """The report of one answer, of exactly `count` tokens."""
    *_, last = cluster.generate(prompt, count, ignore_eos=True)
    return last.report


def test_tokens_and_recall_as_in_one_process(cluster: Any, embedded: Any, reference: Any) -> None:
    for number in PROMPTS:
        expected = reference("float32", number, TOKENS)
        *steps, closing = cluster.generate(expected.prompt, TOKENS, ignore_eos=True)
        assert [step.token_id for step in steps] == expected.tokens
        assert [step.report for step in [*steps, closing]] == [None] * TOKENS + [closing.report]
        report, near = closing.report, answer(embedded, expected.prompt)
        assert report.token_ids == near.token_ids == expected.tokens
        assert report.recall_by_token == near.recall_by_token
        assert report.recall == near.recall > 0.9
        one_expert = embedded.main.store.manifest.blob_bytes
        assert report.memory_bytes["workers"] == [one_expert] * WORKERS
        assert report.memory_bytes["main"] == near.memory_bytes["main"]
        # How many tokens ahead the shadow's cache ends is a matter of time.
        assert report.memory_bytes["shadow"] == pytest.approx(near.memory_bytes["shadow"], rel=0.01)
        assert report.memory_bytes["shadow"] > 1 << 20
        assert report.resident_experts_max == [1] * WORKERS
        assert report.emulated is None
        assert report.bytes_loaded >= (report.loads - report.unused_loads) * one_expert


def test_every_node_is_a_process(cluster: Any) -> None:
    pids = [cluster.pid(name) for name in NODES]
    assert len(set(pids)) == len(NODES)
    assert os.getpid() not in pids
    for pid in pids:
        os.kill(pid, 0)


def test_the_kernel_prefers_the_shadow_and_the_workers_as_victims(cluster: Any) -> None:
    def score(name: str) -> int:
        return int(Path(f"/proc/{cluster.pid(name)}/oom_score_adj").read_text())

    assert score("shadow") > max(score(f"worker {number}") for number in range(WORKERS))
    assert min(score(f"worker {number}") for number in range(WORKERS)) > score("main node")


def test_ray_has_no_agents_for_which_it_could_be_too_slow(cluster: Any, mark: str) -> None:
    names = "\n".join(marked(mark))
    assert "raylet" in names
    assert not any(word in names for word in ("DashboardAgent", "RuntimeEnvAgent", "agent.py"))


def test_errors_come_out_as_themselves(cluster: Any) -> None:
    for prompt in ([], [5] * 1024):
        with pytest.raises(PromptError):
            next(cluster.generate(prompt, 4))


def test_figures_come_over_ray(cluster: Any, reference: Any) -> None:
    before = cluster.figures()
    reports = [answer(cluster, reference("float32", number, TOKENS).prompt) for number in PROMPTS[:2]]
    after = cluster.figures()
    for name in ("prompt_tokens", "named", "hits"):
        gained = getattr(after.totals, name) - getattr(before.totals, name)
        assert gained == sum(getattr(report, name) for report in reports), name
    assert after.totals.answer_tokens - before.totals.answer_tokens == 2 * TOKENS
    assert (after.totals.predicted - before.totals.predicted) / (
        after.totals.activated - before.totals.activated
    ) == pytest.approx(sum(report.recall for report in reports) / 2)
    nodes = {node.name: node for node in after.nodes}
    assert list(nodes) == ["main", *NODES[:-1]]
    assert all(node.up for node in after.nodes)
    assert nodes["worker 1"].memory_bytes == reports[-1].memory_bytes["workers"][1]
    assert nodes["worker 1"].bytes_loaded > 0
    assert dict(nodes["shadow"].stream_bytes)["from_shadow"] > 0


def test_an_answer_given_up_makes_room(cluster: Any, reference: Any, tmp_path: Path) -> None:
    """It ends while the next one is answered, which would have ended first if 800 tokens had been gone on with."""
    expected = reference("float32", PROMPTS[0], TOKENS)
    steps = cluster.generate(expected.prompt, 800, ignore_eos=True)
    assert [next(steps).token_id for _ in range(3)] == expected.tokens[:3]
    steps.close()
    assert answer(cluster, expected.prompt).token_ids == expected.tokens
    opened, closed, end = [1], [], time.monotonic() + 60.0
    while opened[-1] not in closed and time.monotonic() < end:  # the last answer is closed after its last token
        write_whole(tmp_path / "log", cluster.recording())
        events = [event for _, event in read_recording(tmp_path / "log").events]
        opened = [event.request for event in events if isinstance(event, RequestOpened)]
        closed = list(dict.fromkeys(event.request for event in events if isinstance(event, RequestClosed)))
    assert closed[-2:] == opened[-2:]


def test_two_answers_at_once(cluster: Any, reference: Any) -> None:
    wanted = [reference("float32", number, TOKENS) for number in PROMPTS[:2]]
    runs = [cluster.generate(one.prompt, TOKENS, ignore_eos=True) for one in wanted]
    got = [[next(run).token_id for run in runs] for _ in range(TOKENS)]
    assert [list(tokens) for tokens in zip(*got, strict=True)] == [one.tokens for one in wanted]


def test_drawn_stopped_and_cancelled_as_in_one_process(cluster: Any, embedded: Any, reference: Any) -> None:
    prompt = reference("float32", PROMPTS[0], TOKENS).prompt
    asked: dict[str, Any] = {"sampling": Sampling(temperature=1.2, seed=7), "stop": ("e", "a")}
    *_, near = embedded.generate(prompt, TOKENS, **asked)
    *_, last = cluster.generate(prompt, TOKENS, **asked)
    assert last.report.token_ids == near.report.token_ids
    assert (last.report.finish, last.report.seed) == ("stop_text", 7)
    steps = cluster.generate(prompt, 800, ignore_eos=True)
    next(steps)
    steps.cancel()
    with pytest.raises(RequestCancelledError):
        list(steps)


@pytest.mark.parametrize("schema", [None, '{"type": "string", "maxLength": 9}'], ids=["", "schema"])
def test_log_probabilities_penalties_and_schemas_as_in_one_process(
    schema: str | None, cluster: Any, embedded: Any, reference: Any
) -> None:
    prompt = reference("float32", PROMPTS[0], TOKENS).prompt
    sampling = Sampling(temperature=1.2, seed=7, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((40, 2.0),))
    asked: dict[str, Any] = {"sampling": sampling, "logprobs": 4, "prompt_logprobs": 3, "schema": schema}
    *near, _ = embedded.generate(prompt, TOKENS, **asked)
    *steps, last = cluster.generate(prompt, TOKENS, **asked)
    assert steps == near
    assert len(steps[0].prompt_logprobs) == len(prompt)
    assert last.report.finish == ("stop" if schema else "length")
    with pytest.raises(ConfigError, match="the schema is refused: Invalid type: objec"):
        next(cluster.generate(prompt, TOKENS, schema='{"type": "objec"}'))


def test_every_process_is_in_the_trace_on_one_clock(cluster: Any, reference: Any) -> None:
    cluster.trace()
    answer(cluster, reference("float32", PROMPTS[0], TOKENS).prompt)
    spans = cluster.trace()
    assert {span.row for span in spans} == {"main", *NODES[:-1]}
    begin = min(span.start for span in spans if span.what == "token")
    end = max(span.end for span in spans if span.what == "token")
    computed = [span for span in spans if span.what == "compute"]
    assert len(computed) >= 8 * 2 * (TOKENS - 1)
    audits = 0.02 * len(computed)
    outside = [span for span in computed if not begin <= span.start <= span.end <= end]
    assert len(outside) <= audits, "an audit may belong to the answer before, or end after the last token"
    travelled = [span.end - span.start for span in spans if span.what == "transfer" and " to #" in span.label]
    # An audit that is under way at the answer's end was sent, and is in the next trace.
    assert len(computed) - audits <= len(travelled) <= len(computed) + audits
    assert min(travelled) > 0


def signalled(cluster: Any, expected: Any, count: int, points: dict[int, tuple[int, int]]) -> Any:
    """The report of an answer; `points`: after which token which process (its id) gets which signal."""
    for number, step in enumerate(cluster.generate(expected.prompt, count, ignore_eos=True)):
        if number in points:
            os.kill(*points[number])
        assert step.token_id == [*expected.tokens, None][number]
    assert step.report.token_ids == expected.tokens
    return step.report


def wait_until_back(cluster: Any, expected: Any, missing: int = 0) -> Any:
    """Short answers until every lost node has come back and every worker has loaded an expert; the last one's report.

    A worker's process counts its experts from its own start: one that came back and is not used has had none.
    `missing`: how many more may be lost than have been heard of.
    """
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        try:
            report = answer(cluster, expected.prompt, 4)
        except RequestFailedError as error:
            assert "worker" in str(error)  # noqa: PT017 - while all are gone, that is what it must say
            continue
        assert report.token_ids == expected.tokens[:4]
        whole = sorted(report.cluster.lost) == sorted(report.cluster.rejoined) and len(report.cluster.lost) >= missing
        if whole and report.resident_experts_max == [1] * WORKERS and report.memory_bytes["shadow"] > 0:
            return report
        time.sleep(0.5)
    raise AssertionError(f"after {BACK_S:g} s lost: {report.cluster.lost}, rejoined: {report.cluster.rejoined}")


def test_workers_and_shadow_are_killed_and_come_back(cluster: Any, reference: Any, capsys: Any) -> None:
    """All workers but one, and the shadow, at random points of one answer."""
    rng = random.Random(20)
    victims = [*rng.sample(NODES[:WORKERS], WORKERS - 1), "shadow"]
    before = {name: cluster.pid(name) for name in NODES}
    points = zip(rng.sample(range(2, 60), len(victims)), victims, strict=True)
    report = signalled(
        cluster, reference("float32", 1, 96), 96, {at: (before[name], signal.SIGKILL) for at, name in points}
    )
    assert sorted(report.cluster.lost) == sorted(victims)
    assert report.reloads > 0  # without predictions an expert is loaded after its gate
    short = reference("float32", PROMPTS[0], TOKENS)
    wait_until_back(cluster, short)
    after = {name: cluster.pid(name) for name in NODES}
    assert {name for name in NODES if before[name] != after[name]} == set(victims)
    report = answer(cluster, short.prompt)
    assert report.token_ids == short.tokens
    assert report.recall > 0.9
    assert report.resident_experts_max == [1] * WORKERS
    assert "raylet" not in capsys.readouterr().out  # where the answer goes


def test_a_worker_is_frozen_and_thaws(cluster: Any, reference: Any) -> None:
    """Counted as lost, then heard again: the same process serves on a new stream."""
    pid = cluster.pid("worker 1")
    try:
        report = signalled(cluster, reference("float32", 2, 48), 48, {5: (pid, signal.SIGSTOP)})
        assert report.cluster.lost.count("worker 1") == report.cluster.rejoined.count("worker 1") + 1
        lost = len(report.cluster.lost)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until_back(cluster, reference("float32", PROMPTS[0], TOKENS), lost)
    assert cluster.pid("worker 1") == pid


def test_the_main_node_is_frozen_and_thaws(cluster: Any, reference: Any, capsys: Any) -> None:
    """Every worker and the shadow have given it up meanwhile. The open answers wait for them and go on."""
    pid = cluster.pid("main node")
    wanted = [reference("float32", number, LONG) for number in PROMPTS[:2]]
    answers = [cluster.generate(one.prompt, LONG, ignore_eos=True) for one in wanted]
    got = [[next(answer).token_id for _ in range(4)] for answer in answers]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    os.kill(pid, signal.SIGCONT)
    thawed = time.monotonic()
    came: list[float] = []

    def read(number: int) -> Any:
        for step in answers[number]:
            if step.token_id is not None:
                got[number].append(step.token_id)
                came.append(time.monotonic())
        return step.report

    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(read, range(2)))
    assert got == [one.tokens for one in wanted]
    assert set(NODES[:WORKERS]) <= set(reports[-1].cluster.rejoined)
    with capsys.disabled():
        print(f"\nafter {FROZEN_S:g} s: longest pause {longest_pause([thawed, *came]):.2f} s")
    wait_until_back(cluster, reference("float32", PROMPTS[0], TOKENS))
    assert cluster.pid("main node") == pid


def longest_pause(times: list[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(sorted(times)))


def test_every_worker_is_killed_at_once(cluster: Any, reference: Any) -> None:
    """The answer under way waits until Ray has started them again, and goes on."""
    pids = [cluster.pid(name) for name in NODES[:WORKERS]]
    long, short = reference("float32", PROMPTS[0], LONG), reference("float32", PROMPTS[0], TOKENS)
    signalled(cluster, long, LONG, {3 + number: (pid, signal.SIGKILL) for number, pid in enumerate(pids)})
    wait_until_back(cluster, short)
    assert not {cluster.pid(name) for name in NODES[:WORKERS]} & set(pids)


def test_the_log_of_all_this_replays_to_the_same_commands(cluster: Any, tmp_path: Path) -> None:
    """Every answer so far, those at once, given up, cancelled and failed, and every loss of a node."""
    write_whole(tmp_path / "log", cluster.recording())
    recording = read_recording(tmp_path / "log")
    kinds = {type(event).__name__ for _, event in recording.events}
    assert {"WorkerJoined", "ShadowJoined", "RequestOpened", "Predicted", "GateFired", "RequestClosed"} <= kinds
    done = replay(recording)
    assert str(done) == f"{len(recording.events)} events, {done.commands} commands: identical, in order"


def test_the_main_node_is_killed(cluster: Any, reference: Any) -> None:
    """Whoever waits for a token, and whoever asks later, hears of it."""
    pid = cluster.pid("main node")
    steps = cluster.generate(reference("float32", PROMPTS[0], TOKENS).prompt, 800, ignore_eos=True)
    next(steps)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"the main node died: .*; the cluster must be started again"):
        list(steps)
    with pytest.raises(ClusterError, match="died"):
        next(cluster.generate([5], 4))


def test_after_close_nothing_is_left(cluster: Any, mark: str) -> None:
    assert any("raylet" in line for line in marked(mark))
    cluster.close()
    wait_until_gone(mark)
    cluster.close()
