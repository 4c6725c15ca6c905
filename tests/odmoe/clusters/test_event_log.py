"""The log of a real run, replayed through the simulator's heap into a fresh scheduler: the same commands, in order."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.commands.generate import Job
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording, read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.simulation.recorded_routes import recorded_workloads
from scheduler.trace import read_trace
from scheduler.types import WorkerLost
from support.machines.cli import CommandLine

COUNT = 8


def log_of(cluster: EmbeddedCluster, file: Path) -> Recording:
    write_whole(file, cluster.recording())
    return read_recording(file)


def same(recording: Recording) -> bool:
    done = replay(recording)
    assert done.events == len(recording.events) > 300
    return done.difference is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"shadow": "nf4"},
        {"shadow": "none", "prefill": "in-turn", "mini_batch": 2},
        {"predictor": "random", "slots": 2, "workers": 3},
        {"predictor": "none", "residency": "all", "slots": 8},
        {"shadow": "nf4", "align_token": 0, "align_kv": 0, "profile": "rtx3090-1gbe"},
    ],
    ids=str,
)
def test_a_real_run_replays_to_the_same_commands(
    settings: dict[str, Any], embedded: Callable[..., EmbeddedCluster], reference: Any, tmp_path: Path
) -> None:
    """And its log says what the run's report does."""
    expected = reference("float32", 0, COUNT)
    cluster = embedded(record="kept", **settings)
    *_, last = cluster.generate(expected.prompt, COUNT, ignore_eos=True)
    recording = log_of(cluster, tmp_path / "log")
    report = last.report
    assert same(recording)
    (workload,) = recorded_workloads(recording)
    assert (workload.prompt_tokens, workload.tokens) == (len(expected.prompt), COUNT)
    assert all(sum(rows for _, rows in workload.prompt(layer)) == 2 * len(expected.prompt) for layer in range(8))
    if workload.predictions:
        pairs = [(n, layer) for n in range(COUNT - 1) for layer in range(8)]
        right = sum(len(set(workload.predict(*pair) or ()) & set(workload.routes(*pair))) for pair in pairs)
        assert report.recall == pytest.approx(right / (2 * len(pairs)))
    assert (report.recall is None) == (recording.core_config.system.predictor == "none")


@pytest.mark.slow
def test_blocks_of_a_real_run_are_read_by_token(
    demo_store: Callable[[str], Any], reference: Any, tmp_path: Path
) -> None:
    """What each token's pass needs is what it needs without drafts."""
    expected = reference("float32", 0, COUNT)
    common: dict[str, Any] = {"model": "demo", "threads": 1, "record": "kept", "profile": "rtx3090-1gbe"}
    found = []
    for drafts in ({}, {"draft": 3}):
        cluster = EmbeddedCluster(Settings(**common, **drafts, shadow="int8"), demo_store("float32"))
        try:
            *_, last = cluster.generate(expected.prompt, COUNT, ignore_eos=True)
            recording = log_of(cluster, tmp_path / "log")
        finally:
            cluster.close()
        assert same(recording)
        found += recorded_workloads(recording)
    without, one = ([[set(experts) for experts in layers] for layers in workload.passes] for workload in found)
    assert one == without
    assert len(one) == COUNT - 1
    assert found[0].accepted_share is None
    assert last.report.drafted > 0
    assert sum(found[1].drafts.values()) >= last.report.accepted


@pytest.mark.slow
def test_answers_at_once_and_one_given_up(
    embedded: Callable[..., EmbeddedCluster], reference: Any, tmp_path: Path
) -> None:
    prompts = [reference("float32", number, COUNT).prompt for number in (0, 4, 8)]
    cluster = embedded(shadow="nf4", record="kept", workers=3)
    runs = [cluster.generate(prompt, COUNT, ignore_eos=True) for prompt in prompts]

    def give_up() -> None:
        next(runs[2])
        runs[2].close()

    threads = [threading.Thread(target=act) for act in (lambda: list(runs[0]), lambda: list(runs[1]), give_up)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = log_of(cluster, tmp_path / "log")
    assert same(recording)
    tokens = [one.tokens for one in recorded_workloads(recording)]  # in the order in which the threads came
    assert sorted(tokens)[-2:] == [COUNT, COUNT]
    assert all(count < COUNT for count in sorted(tokens)[:-2])


def test_a_cluster_that_keeps_no_record_says_so(demo_store: Callable[[str], Any]) -> None:
    cluster = EmbeddedCluster(Settings(model="demo", threads=1, shadow="none", workers=1), demo_store("bfloat16"))
    with pytest.raises(ConfigError, match="no record for --record"):
        cluster.recording()
    cluster.close()


def test_generate_records_and_simulate_replays(demo: Path, tmp_path: Path, cli: CommandLine) -> None:
    """As a person does it, a wrong name of the file being found out at once."""
    log = tmp_path / "log"
    flags = ["-q", "-m", str(demo), "-n", "5", "--shadow", "fp16", "--threads", "1", "--record", str(log), "HAMLET"]
    assert cli("generate", *flags).code == 0
    answer = cli("simulate", "--replay", str(log))
    assert answer.code == 0
    assert answer.out.endswith("identical, in order\n")
    facts = json.loads(cli("simulate", "--routes", str(log), "--json").out)
    assert facts["tokens"] == [5]
    assert facts["requests"][0]["recorded_ttft_s"] > 0
    wrong = cli("generate", "-m", str(demo), "--record", str(tmp_path / "none" / "log"), "HAMLET")
    assert wrong.code == 2
    assert "--record is" in wrong.err


def test_what_would_destroy_another_file_is_refused(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    """A record is renamed to its place: not to that of a device, nor to that of the trace."""
    os.mkfifo(tmp_path / "fifo")
    one, other = str(tmp_path / "one"), f"{tmp_path}/../{tmp_path.name}/one"
    for flags, says in (
        (["--record", str(tmp_path / "fifo")], "--record is"),
        (["--record", one, "--trace", other], "--trace and --record are both"),
    ):
        answer = cli("generate", "-m", str(demo), *flags, "HAMLET")
        assert (answer.code, answer.out) == (2, "")
        assert says in answer.err


def test_a_shadow_that_does_not_run_is_not_reported(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    """Though the settings have a precision for it."""
    log, trace = tmp_path / "log", tmp_path / "trace"
    flags = ["--predictor", "random", "--record", str(log), "--trace", str(trace)]
    answer = cli("generate", "-q", "--json", "-m", str(demo), "-n", "3", "--threads", "1", *flags, "HAMLET")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert (found["shadow"], found["predictor"], found["memory_bytes"]["shadow"]) == ("none", "random", 0)
    assert read_recording(log).about["shadow"] == "none"
    assert read_trace(trace)[1]["shadow"] == "none"


def test_the_record_of_an_answer_that_fails_is_written(
    demo: Path, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of it, every worker is gone: the error is told, and the log ends with it."""
    answer = Job.answer

    def doomed(job: Any, ids: list[int], show: Any) -> Any:
        engine = job.model.cluster.main.engine

        def lose(piece: str) -> None:
            for peer in list(engine.peers.workers.values()):
                peer.close()

        return answer(job, ids, lose)

    monkeypatch.setattr(Job, "answer", doomed)
    log = tmp_path / "log"
    flags = ["-q", "-m", str(demo), "-n", "5", "--shadow", "none", "--threads", "1", "--record", str(log), "HAMLET"]
    answer = cli("generate", "--worker-wait", "0", *flags)
    assert answer.code == 1
    assert "the last worker is gone" in answer.err or "no worker is connected" in answer.err
    recording = read_recording(log)
    assert replay(recording).difference is None
    assert any(isinstance(event, WorkerLost) for _, event in recording.events)
