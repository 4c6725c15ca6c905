"""`odmoe simulate`: flags in, figures out, in a process that has never heard of torch."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.alignment import Alignment
from scheduler.build import make_core
from scheduler.eventlog.recording import Recorder
from scheduler.files import write_whole
from scheduler.policies.registry import PREDICTORS, strategy_of
from scheduler.policies.system_config import CoreConfig
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate, simulate_requests
from scheduler.simulation.workload import random_workload
from scheduler.simulation.world import World
from scheduler.timing.profile import find_profile
from scheduler.trace import read_trace
from scheduler.types import ModelShape
from support.machines.cli import CommandLine

PAPER = find_profile("rtx3090-1gbe")
SCENARIO = Scenario(PAPER, prompt_tokens=5, tokens=6, alignment=Alignment(2, 1))


def facts(cli: CommandLine, *flags: str) -> dict[str, Any]:
    answer = cli("simulate", "--json", *flags)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def recorded(file: Path, scenario: Scenario, **about: Any) -> Path:
    """A recording, of a simulated run."""
    config: CoreConfig = scenario.core_config
    core, recorder = make_core(config), Recorder({"profile": PAPER.name} | about, config)
    decide = core.handle

    def handle(event: Any, now: float) -> Any:
        commands = list(decide(event, now))
        recorder.on_handled(event, now, commands)
        return commands

    core.handle = handle  # type: ignore[method-assign]
    world = World(core, scenario, random_arrivals(scenario, 0.9))
    world.start()
    assert world.run(scenario.requests * scenario.tokens)
    world.drain()
    write_whole(file, recorder.take())
    return file


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("log") / "log", SCENARIO)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests, one after the other."""
    return recorded(tmp_path_factory.mktemp("log") / "both", replace(SCENARIO, requests=2, parallel=1))


def test_no_library_of_tensors_or_clusters_is_imported() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'grpc', 'numpy', 'safetensors'): sys.modules[name] = None\n"
        "from odmoe.command_line import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "simulate", "--tokens", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == [3]


def test_the_hit_rate_of_a_cache_is_shown(cli: CommandLine) -> None:
    flags = ("--system", "sep-arc", "--workers", "1", "--slots", "64", "--tokens", "20")
    rate = facts(cli, *flags)["hit_rate"]
    assert 0 < rate < 1
    text = cli("simulate", *flags).out
    assert f"{rate:.1%} of the experts used were in a slot when the gate fired" in text
    assert facts(cli, *flags, "--slots", "256")["hit_rate"] > rate, "a larger cache"
    assert "in a slot when" not in cli("simulate", "--tokens", "5").out, "nothing is kept"
    assert facts(cli, "--tokens", "1")["hit_rate"] is None, "nothing was decoded"


def test_json_says_what_the_simulator_does(cli: CommandLine) -> None:
    found = facts(cli, "--tokens", "20", "--recall", "0.9", "--seed", "4", "--align-kv", "2")
    scenario = Scenario(PAPER, tokens=20, alignment=Alignment(1, 2))
    outcome = simulate(scenario, random_workload(scenario, 0.9, 4))
    assert found["ttft_s"] == outcome.ttft_s
    assert found["decode_tokens_per_s"] == pytest.approx(outcome.decode_tokens_per_s)
    assert found["where_ms"] == {cause: seconds * 1e3 for cause, seconds in outcome.where.items()}
    assert sum(found["where_ms"].values()) == pytest.approx(1e3 / found["decode_tokens_per_s"])
    assert (found["profile"], found["bound"]) == (PAPER.name, outcome.bottleneck)


DRAWN = [
    name
    for name, strategy in ((name, strategy_of(ModelShape((0,), 2, 1), one.config)) for name, one in SYSTEMS.items())
    if not strategy.wants_scores and strategy.predictor.foresight is None and name != "ktransformers"
]
"""What can be simulated on routes that are drawn, on workers alone: nothing in it reads what a gate thinks."""


def test_slots_auto_is_two_where_no_expert_stays(cli: CommandLine, log: Path) -> None:
    """As in a cluster that has the memory."""
    few = ("--tokens", "4", "--slots", "auto")
    assert facts(cli, *few)["slots"] == facts(cli, "--slots", "auto", "--routes", str(log))["slots"] == 2
    assert facts(cli, *few, "--residency", "lru")["slots"] == facts(cli, "--tokens", "4")["slots"] == 1
    assert facts(cli, *few, "--system", "fully-cached")["slots"] == 32


def test_the_system_is_named_with_what_is_not_its_own(cli: CommandLine, log: Path) -> None:
    def named(*flags: str) -> list[str]:
        return [line.split()[1:] for line in cli("simulate", *flags).out.splitlines() if line.startswith("  system")]

    assert named("--tokens", "4") == [["od-moe"]]
    assert named("--tokens", "4", "--departure", "late") == [["od-moe", "+", "departure", "late"]]
    assert named("--tokens", "4", "--system", "on-demand") == [["on-demand"]]
    assert named("--routes", str(log)) == [], "the log does not say which preset it is of"


@pytest.mark.parametrize("system", DRAWN)
def test_systems_choose_and_flags_choose_otherwise(cli: CommandLine, system: str) -> None:
    found = facts(cli, "--system", system, "--tokens", "4")
    chosen = SYSTEMS[system].values()
    assert {name: found[name] for name in chosen} == chosen
    assert found["slots"] == (32 if system == "fully-cached" else 1)  # 256 experts on 8 workers
    other = facts(cli, "--system", system, "--tokens", "4", "--predictor", "none", "--prefill", "in-turn")
    assert (other["predictor"], other["prefill"], other["residency"]) == ("none", "in-turn", found["residency"])


def test_all_experts_on_the_host(cli: CommandLine) -> None:
    """Each of a token's experts takes as long as the profile's host does, one after the other."""
    found = facts(
        cli, "--system", "ktransformers", "--profile", "rtx3090-pcie3", "--tokens", "4", "--prompt-tokens", "2"
    )
    assert (found["placement"], found["loads_a_token"], found["slots"]) == ("host", 0, 1)
    profile = find_profile("rtx3090-pcie3")
    least_ms = 1e3 * profile.layers * profile.top_k * profile.host_s
    assert least_ms < 1e3 / found["decode_tokens_per_s"] < 2 * least_ms


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in (*DRAWN, "ktransformers")])
def test_what_reads_scores_needs_a_recording_with_them(cli: CommandLine, system: str) -> None:
    answer = cli("simulate", "--system", system, "--tokens", "4")
    assert answer.code == 2
    advice = f"odmoe generate --system {system} --record FILE ..., then odmoe simulate --system {system} --routes FILE"
    assert f"give --routes many-moe, or record a run first: {advice}\n" in answer.err


def test_the_advice_has_the_flags_that_were_given(cli: CommandLine) -> None:
    answer = cli("simulate", "--router", "skip", "--alpha", "0.2", "--tokens", "4")
    assert answer.code == 2
    assert "--router skip reads the scores of gates, which only a recorded run has" in answer.err
    assert "odmoe simulate --router skip --alpha 0.2 --routes FILE\n" in answer.err


def test_the_models_shape_may_be_another(cli: CommandLine) -> None:
    flags = ("--layers", "5", "--experts", "32", "--top-k", "4", "--workers", "16", "--tokens", "9")
    found = facts(cli, *flags)
    assert found["model"] == {"layers": 5, "experts": 32, "top_k": 4}
    assert (found["workers"], found["group_size"]) == (16, 4)
    assert facts(cli, *flags, "--group-size", "8")["group_size"] == 8


def test_several_requests_together_and_each(cli: CommandLine) -> None:
    flags = ("--requests", "3", "--tokens", "5", "--recall", "0.9")
    found = facts(cli, *flags)
    scenario = Scenario(PAPER, tokens=5, requests=3)
    outcome = simulate_requests(scenario, random_arrivals(scenario, 0.9))
    assert (found["tokens"], found["at_once"], len(found["requests"])) == ([5] * 3, 3, 3)
    assert found["decode_tokens_per_s"] == pytest.approx(outcome.decode_tokens_per_s)
    assert found["token_gap_s"]["worst"] == max(max(answer.gaps_s) for answer in outcome.answers)
    assert found["experts_a_layer"] == outcome.union
    assert found["tokens_a_step"] == pytest.approx(3.0)
    assert sum(found["where_ms"].values()) == pytest.approx(3e3 / found["decode_tokens_per_s"], rel=0.02)
    turns = facts(cli, *flags, "--parallel", "1")
    assert turns["experts_a_layer"] == 2.0
    assert turns["decode_tokens_per_s"] < found["decode_tokens_per_s"]


def test_the_text_of_several_requests(cli: CommandLine) -> None:
    said = cli("simulate", "--requests", "2", "--tokens", "4", "--batch-dense").out
    assert "2: 32 tokens in, 8 out; all at once, dense layers together" in said
    for part in ("tokens/s, all requests together", "at worst", "a decode step: ", "of 8 experts in a layer"):
        assert part in said
    later = cli("simulate", "--requests", "3", "--tokens", "3", "--interval", "1.5", "--parallel", "2").out
    assert "; one every 1.5 s; up to 2 at once, dense layers one by one" in later
    assert "one after the other" in cli("simulate", "--requests", "2", "--tokens", "2", "--parallel", "1").out


def test_the_text_says_where_every_millisecond_goes(cli: CommandLine) -> None:
    answer = cli("simulate", "--tokens", "9")
    assert answer.code == 0
    assert answer.out.startswith("simulated: rtx3090-1gbe\n")
    whole = next(line for line in answer.out.splitlines() if line.startswith("a decode token:"))
    parts = [line.split() for line in answer.out.partition(whole)[2].strip().splitlines()]
    shown = [float(words[words.index("ms") - 1]) for words in parts]
    assert sum(shown) == pytest.approx(float(whole.split()[-2]), abs=0.1)
    shares = [float(words[words.index("ms") + 1].rstrip("%")) for words in parts]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_an_answer_of_one_token_has_no_rate(cli: CommandLine) -> None:
    found = facts(cli, "--tokens", "1")
    assert (found["decode_tokens_per_s"], found["bound"], found["loads_a_token"]) == (None, None, None)
    assert "decoding" not in cli("simulate", "--tokens", "1").out


def test_a_trace_is_that_of_a_run(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    facts(cli, "--tokens", "3", "--trace", str(file))
    spans, about = read_trace(file)
    assert about["cluster"] == "simulated: rtx3090-1gbe"
    assert sum(span.what == "token" for span in spans) == 3
    assert {span.row for span in spans} == {"main", "shadow", *(f"worker {n}" for n in range(8))}


@pytest.mark.slow
def test_recorded_routes_are_simulated_beside_what_was_measured(cli: CommandLine, log: Path) -> None:
    found = facts(cli, "--routes", str(log))
    (one,) = found["requests"]
    assert one["ttft_s"] == pytest.approx(one["recorded_ttft_s"])
    assert one["decode_tokens_per_s"] == pytest.approx(one["recorded_decode_tokens_per_s"])
    assert (found["align_token"], found["prompt_tokens"], found["tokens"]) == (2, [5], [6])
    assert facts(cli, "--routes", str(log), "--tokens", "3")["tokens"] == [3]
    assert "recorded" in cli("simulate", "--routes", str(log)).out


@pytest.mark.slow
def test_recorded_requests_can_be_answered_together(cli: CommandLine, both: Path) -> None:
    """Recorded one after the other."""
    apart, together = facts(cli, "--routes", str(both)), facts(cli, "--routes", str(both), "--parallel", "2")
    assert (apart["at_once"], apart["tokens_a_step"], apart["experts_a_layer"]) == (1, 1.0, 2.0)
    assert together["tokens_a_step"] > 1
    assert together["experts_a_layer"] > 2.0
    assert together["loads_a_token"] < apart["loads_a_token"]
    assert len(together["requests"]) == 2


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With blocks of up to four rows."""
    scenario = replace(SCENARIO, alignment=Alignment(), tokens=30, draft=3)
    return recorded(tmp_path_factory.mktemp("log") / "drafted", scenario, draft=3, draft_from="shadow")


@pytest.mark.slow
def test_recorded_drafts_are_simulated_as_they_were(cli: CommandLine, drafted: Path) -> None:
    found = facts(cli, "--routes", str(drafted))
    (one,) = found["requests"]
    assert one["decode_tokens_per_s"] == pytest.approx(one["recorded_decode_tokens_per_s"])
    assert found["draft"] == 3
    assert found["rows_a_pass"] > 2
    assert found["acceptance"] > 0.9
    said = cli("simulate", "--routes", str(drafted)).out
    assert f"{found['acceptance']:.1%} of the shadow's own tokens are right, as recorded" in said


@pytest.mark.slow
def test_other_drafts_than_the_recorded_ones(cli: CommandLine, drafted: Path) -> None:
    assert facts(cli, "--routes", str(drafted), "--draft", "0")["rows_a_pass"] is None
    assert facts(cli, "--routes", str(drafted), "--draft", "7")["rows_a_pass"] > 4
    assert facts(cli, "--routes", str(drafted), "--system", "on-demand")["draft"] == 0
    wrong = facts(cli, "--routes", str(drafted), "--acceptance", "0")
    assert (wrong["acceptance"], wrong["tokens_a_pass"]) == (0.0, 1.0)


def test_a_recording_without_drafts_does_not_say_how_many_are_right(cli: CommandLine, log: Path) -> None:
    answer = cli("simulate", "--routes", str(log), "--draft", "2")
    assert answer.code == 2
    assert f"--draft is 2, and {log} has no drafts of a shadow for request 1" in answer.err
    assert "give --acceptance, or record a run with --draft" in answer.err
    known = ("--routes", str(log), "--draft", "2", "--acceptance", "1")
    assert facts(cli, *known)["tokens_a_pass"] > 1.5
    assert "100.0% of the shadow's own tokens are right\n" in cli("simulate", *known).out


def test_recorded_routes_on_another_system(cli: CommandLine, log: Path) -> None:
    """Another alignment needs other predictions; none need none."""
    assert facts(cli, "--routes", str(log), "--system", "on-demand")["recall"] is None
    assert facts(cli, "--routes", str(log), "--align-token", "1", "--recall", "1")["recall"] == 1.0
    answer = cli("simulate", "--routes", str(log), "--align-token", "1")
    assert answer.code == 2
    assert "--align-token is 1, and the predictions in" in answer.err
    assert "aligned every 2" in answer.err


def test_recorded_routes_on_fewer_workers(cli: CommandLine, log: Path) -> None:
    """The recording's groups of two are no longer possible; nobody has asked for them."""
    found = facts(cli, "--routes", str(log), "--workers", "1")
    assert (found["workers"], found["group_size"]) == (1, 1)


@pytest.mark.slow
def test_luck_is_how_far_other_draws_are(cli: CommandLine) -> None:
    """Rates of many seeds scatter by about what one run says; what is not drawn at all has none."""
    drawn = ("--recall", "0.9", "--layers", "8", "--tokens", "32")
    seeds = [facts(cli, *drawn, "--seed", str(seed)) for seed in range(12)]
    rates = [found["decode_tokens_per_s"] for found in seeds]
    scatter = statistics.stdev(rates) / statistics.fmean(rates)
    assert scatter / 2 < statistics.fmean(found["luck"] for found in seeds) < 2 * scatter
    assert facts(cli, "--system", "fully-cached", "--tokens", "9")["luck"] == pytest.approx(0, abs=1e-6)
    assert "(standard error)" in cli("simulate", *drawn).out


def test_a_replay_of_nothing_is_no_success(cli: CommandLine, tmp_path: Path) -> None:
    """A scheduler that was told nothing decides nothing, whatever it is like."""
    write_whole(tmp_path / "empty", Recorder({}, SCENARIO.core_config).take())
    answer = cli("simulate", "--replay", str(tmp_path / "empty"))
    assert (answer.code, answer.out) == (2, "")
    assert "0 events and no command; nothing can be compared" in answer.err


def test_a_replay_that_differs_fails(cli: CommandLine, log: Path, tmp_path: Path) -> None:
    answer = cli("simulate", "--replay", str(log), "--validate")
    assert (answer.code, answer.out.endswith(" commands: identical, in order\n")) == (0, True)
    other = tmp_path / "other"
    other.write_bytes(log.read_bytes().replace(b"\xaagroup_size\x02", b"\xaagroup_size\x04"))
    answer = cli("simulate", "--replay", str(other))
    assert answer.code == 1
    assert "after event" in answer.out
    assert json.loads(cli("simulate", "--replay", str(other), "--json").out)["identical"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--profile", "none"], "no profile 'none'; allowed: pc"),
        (["--system", "odmoe"], "--system is 'odmoe'; did you mean od-moe or "),
        (["--recall", "1.5"], "--recall is 1.5; allowed: a number from 0 to 1"),
        (["--recall", "0.5", "--system", "on-demand"], "--recall is 0.5, which --predictor none does not read"),
        (["--routes", "LOG", "--requests", "2"], "--requests is given with --routes"),
        (["--tokens", "99999999999"], "--tokens is 99999999999; allowed: 1 to 4194304"),
        (["--align-kv", "2", "--system", "on-demand"], "--align-kv is 2, which --predictor none does not read"),
        (["--alpha", "0.3"], "--alpha is 0.3, which neither --predictor sep nor --router top-k reads; "),
        (["--system", "eap", "--prefetch", "2"], "--prefetch is 2, which --predictor path does not read; next-gate, "),
        (["--placement", "host"], "--placement host needs a host that computes experts, and profile rtx3090-1gbe"),
        (["--system", "ktransformers"], "--system ktransformers needs a host that computes experts, and profile"),
        (["--trace", "FIFO"], "allowed: a file in a directory"),
        (["--top-k", "9"], "--top-k is 9 with 8 experts; allowed: 1 to 8"),
        (["--slots", "65536"], "--slots is 65536 with 8 workers, 524,288 together; allowed: 1 to 16384"),
        (["--experts", "65536"], "--experts is 65536 with 32 layers, 2,097,152 together; allowed: 1 to 4096"),
        (["--workers", "4", "--group-size", "5"], "--group-size is 5; allowed: 1 to --workers (4)"),
        (["--predictor", "oracle"], f"did you mean traces? odmoe systems lists all {len(PREDICTORS)} names"),
        (["--residency", "all", "--slots", "1"], "256 slots are needed, 8 are there"),
        (["--trace", "/none/t.json"], "--trace is '/none/t.json'; allowed: a file in a directory"),
        (["--routes", "/none"], "recording /none cannot be read"),
        (["--replay", "/none"], "recording /none cannot be read"),
        (["--validate"], "--validate is given without --replay; record a run"),
        (["--replay", "/none", "--tokens", "3"], "--replay is given with --tokens"),
        (["--routes", "LOG", "--layers", "4"], "--layers is given with --routes"),
        (["--routes", "LOG", "--tokens", "7"], "--tokens is 7; allowed: 1 to 6, as request 1"),
    ],
)
def test_what_is_wrong_is_said(cli: CommandLine, log: Path, tmp_path: Path, flags: list[str], says: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    named = {"LOG": str(log), "FIFO": str(tmp_path / "fifo")}
    answer = cli("simulate", *[named.get(flag, flag) for flag in flags])
    assert answer.code == 2
    assert says in answer.err


@pytest.mark.parametrize(("workers", "says"), [("1", "1 worker in groups of 1,"), ("2", "2 workers in groups of 2,")])
def test_one_worker_is_a_worker(cli: CommandLine, workers: str, says: str) -> None:
    assert says in cli("simulate", "--tokens", "2", "--workers", workers).out
