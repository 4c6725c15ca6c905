"""Systems on the command line: what cannot be is told before a node is started, reports name what was chosen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from scheduler.policies.registry import PREDICTORS
from scheduler.policies.systems import SYSTEMS
from scheduler.trace import read_trace
from support.machines.cli import CommandLine

QUICK = ("--threads", "1", "-n", "3")


WRONG: list[tuple[list[str], str]] = [
    (["--system", "fats"], f"--system is 'fats'; did you mean fate? odmoe systems lists all {len(SYSTEMS)} names"),
    (["--alpha", "0.3"], "--alpha is 0.3, which neither --predictor sep nor --router top-k reads; next-layer, "),
    (["--system", "fate", "--token-predictor", "f"], "--token-predictor is f, which --predictor cross-layer does not"),
    (["--placement", "balance"], "--placement balance needs a host that computes beside the device"),
    (["--placement", "host", "--profile", "rtx3090-1gbe"], "--placement host needs a host that computes"),
    (["--placement", "host", "--loader", "cuda", "--profile", "rtx3090-1gbe"], "--placement host needs a host"),
    (["--system", "ktransformers"], "--system ktransformers needs a host that computes beside the device"),
    (["--system", "ktransformers", "--cluster", "local"], "--system is 'ktransformers' with --cluster local; only an"),
    (["--predictor", "xyz"], f"--predictor is 'xyz'; odmoe systems lists all {len(PREDICTORS)} names"),
    (["--system", "fully-cached", "--slots", "7"], "64 slots are needed, 56 are there; give more"),
    (["--system", "fate", "--align-token", "2"], "--align-token is 2, which --predictor cross-layer does not read"),
    (["--system", "fully-cached", "--device-memory", "30%"], "64 slots are needed, 16 are there; give more"),
    (
        ["--system", "eap", "--device-memory", "0.1%"],
        "--device-memory 0.1% is 21233 bytes for 1 worker, but a worker",
    ),
    (["--system", "eap", "--device-memory", "40"], "give at least 978944 bytes, or did you mean 40%?"),
    (["--workers", "64", "--device-memory", "10%"], "give at least 100% (21.2 MB)\n"),
    (["--workers", "65", "--device-memory", "10%"], "give at least 21565440 bytes\n"),
    (
        ["--system", "eap", "--precision", "int4", "--device-memory", "1%"],
        "is 212336 bytes for 1 worker, but a worker with one expert needs 978944, 884736 of them to restore it; "
        "give at least 5% (1.0 MB)\n",
    ),
    (
        ["--system", "smoe", "--token-predictor", "/none"],
        "--predictor token-wise needs trained weights, and /none does",
    ),
]


@pytest.mark.slow
@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("flags", "says"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_what_is_wrong_is_said_before_nodes_are_started(
    flags: list[str], says: str, cli: CommandLine, demo: Path
) -> None:
    answer = cli("generate", "-m", str(demo), *flags, "hello")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    assert says in answer.err


@pytest.mark.usefixtures("no_nodes")
def test_a_model_without_a_token_predictor(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(demo, tmp_path / "bare", ignore=shutil.ignore_patterns("token_predictor*", "SHA256SUMS"))
    answer = cli("generate", "-m", str(bare), "--system", "smoe", "hello")
    assert answer.code == 2
    command = f"odmoe train-predictor {bare}"
    assert f"{bare}/token_predictor.safetensors does not exist; make them with {command}" in answer.err


@pytest.mark.slow
def test_reports_name_what_was_chosen_otherwise(cli: CommandLine, demo: Path) -> None:
    flags = ("--system", "importance", "--alpha", "0.1", "--residency", "lru", "--device-memory", "30%", *QUICK)
    answer = cli("generate", "-m", str(demo), *flags, "hello")
    assert answer.code == 0, answer.err
    assert "importance + residency lru + alpha 0.1 (embedded)\n" in answer.err
    assert "approximate, because of --router expert-cache\n" in answer.err
    assert re.search(r"each worker +6\.3 MB and ", answer.err)
    assert "experts in layers without a prediction" in answer.err
    facts = json.loads(cli("generate", "--json", "-m", str(demo), *flags, "hello").out)
    assert (facts["alpha"], facts["prefetch"], facts["residency"], facts["exact"]) == (0.1, None, "lru", False)
    assert sum(facts["memory_bytes"]["workers"]) <= 0.3 * 64 * 331776


def test_the_host_is_no_worker(cli: CommandLine, demo: Path) -> None:
    flags = ("--system", "static", "--device-memory", "30%", "--profile", "rtx3090-pcie3")
    answer = cli("generate", "-m", str(demo), *flags, *QUICK, "hello")
    assert answer.code == 0, answer.err
    assert re.search(r"each worker +6\.3 MB and ", answer.err)
    assert re.search(r"on the host +\d+ of \d+ experts computed there", answer.err)


@pytest.mark.parametrize(
    ("flags", "slots"),
    [(["--system", "fully-cached", "--workers", "8"], 8), (["--device-memory", "50%", "--workers", "4"], 8)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_trace_has_the_slots_of_each_worker(
    flags: list[str], slots: int, cli: CommandLine, demo: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    answer = cli("generate", "-m", str(demo), *flags, *QUICK, "--shadow", "none", "--trace", str(file), "hello")
    assert answer.code == 0, answer.err
    assert read_trace(file)[1]["slots"] == slots


@pytest.mark.slow
def test_the_advised_share_of_memory_suffices(cli: CommandLine, demo: Path) -> None:
    flags = ("--system", "eap", "--precision", "int4", "--device-memory", "5%")
    answer = cli("generate", "-m", str(demo), *flags, *QUICK, "hello")
    assert answer.code == 0, answer.err
