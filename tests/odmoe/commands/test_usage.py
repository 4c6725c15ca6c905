"""What cannot be is answered by one line, before a node is started: flags, prompts, addresses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from odmoe.clusters.process import prepare_ray
from support.machines.cli import CommandLine, check_one_line

USAGE: list[tuple[list[str], list[str]]] = [
    (["-n", "0"], ["--max-new-tokens", "0", "allowed: 1"]),
    (["-n", "many"], ["--max-new-tokens", "'many'", "allowed: 1, 2, ..."]),
    (["-n", "99999999999"], ["--max-new-tokens", "99999999999", "allowed: 1, 2, ... 4194304"]),
    (["--workers", "1000000000"], ["--workers", "1000000000", "allowed: 1, 2, ... 1024"]),
    (["--workers", "257"], ["--workers is 257 with --cluster embedded", "one machine", "allowed: 1 to 256"]),
    (["--workers", "65", "--cluster", "local"], ["--workers is 65 with --cluster local", "allowed: 1 to 64"]),
    (["--workers", "1025", "--cluster", "auto"], ["--workers is 1025", "allowed: 1, 2, ... 1024"]),
    (["--slots", "1000000000"], ["--slots", "1000000000", "allowed: 1, 2, ... 65536, or auto"]),
    (["--slots", "9" * 5000], ["--slots", "allowed: 1, 2, ... 65536, or auto"]),
    (["--slots", "65536"], ["--slots is 65536 with 8 workers, 524,288 together", "allowed: 1 to 16384"]),
    (["--group-size", "9"], ["--group-size", "9", "1 to --workers (8)"]),
    (["--align-token", "-1"], ["align-token", "-1", "0 (never)"]),
    (["--shadow", "int3"], ["--shadow", "'int3'", "nf4"]),
    (["--loader", "tape"], ["--loader", "'tape'", "disk"]),
    (["--dtype", "int4"], ["--dtype", "'int4'", "bfloat16"]),
    (["--cluster", "somewhere"], ["--cluster", "'somewhere'", "embedded", "local", "host:port"]),
    (["--nonsense"], ["--nonsense", "see odmoe generate --help"]),
    (["-n"], ["-n", "argument", "see odmoe --help"]),
    (["one", "two"], ["extra argument", "two", "see odmoe generate --help"]),
]


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("flags", "words"), USAGE, ids=[" ".join(flags) for flags, _ in USAGE])
def test_usage(
    flags: list[str], words: list[str], cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers before anything of the model is read."""
    monkeypatch.setattr("odmoe.stores.prepare_store", lambda *args: pytest.fail("a store was prepared"))
    check_one_line(cli("generate", "-m", str(demo), *flags, stdin=b"hello"), 2, "ConfigError", words)


def test_numbers_of_other_commands(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    check_one_line(cli("up", str(tmp_path / "c.yaml"), "--timeout", "nan"), 2, "ConfigError", ["--timeout"])
    for text in ("inf", "1e7"):
        words = [f"--timeout is {float(text):g}; allowed: 1 to 1e+06"]
        check_one_line(cli("up", str(tmp_path / "c.yaml"), "--timeout", text), 2, "ConfigError", words)
    words = ["--steps is 1000000000; allowed: 1, 2, ... 4194304"]
    check_one_line(cli("train-predictor", str(demo), "--steps", "1000000000"), 2, "ConfigError", words)
    words = ["--expert-bytes is '1e30GB'; allowed: 4KiB to 1GiB"]
    check_one_line(cli("bench", "--expert-bytes", "1e30GB"), 2, "ConfigError", words)


@pytest.mark.usefixtures("no_nodes")
def test_more_slots_than_experts(cli: CommandLine, demo: Path) -> None:
    answer = cli("generate", "-m", str(demo), "--slots", "65", "hello")
    check_one_line(answer, 2, "ConfigError", ["--slots is 65; allowed: 1 to 64, the experts of the model"])


def test_usage_of_the_rest(cli: CommandLine, tmp_path: Path) -> None:
    check_one_line(cli("generate", "hello"), 2, "ConfigError", ["--model", "models/demo-moe"])
    check_one_line(cli("nonsense"), 2, "ConfigError", ["nonsense", "odmoe --help"])
    check_one_line(cli("shard", "here"), 2, "ConfigError", ["'store'", "see odmoe shard --help"])
    check_one_line(cli("serve", "--port", "8000"), 2, "ConfigError", ["--port; give --bind HOST:PORT; see odmoe serve"])
    check_one_line(cli("generate", "to", "be"), 2, "ConfigError", ["(be); quote a prompt of several words; see"])
    check_one_line(
        cli("shard", "here", str(tmp_path / "s"), "--dtype", "int4"), 2, "ConfigError", ["'int4'", "bfloat16"]
    )


# --- what is wrong: prompts -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (None, ["no prompt", "standard input"]),
        (b"", ["empty", "standard input"]),
        (b"caf\xe9", ["not utf-8 text", "convert"]),
        (b"word " * 1100, ["the model's context is 1024", "shorten"]),
    ],
    ids=["none", "empty", "not text", "too long"],
)
def test_prompts(stdin: bytes | None, words: list[str], cli: CommandLine, demo: Path) -> None:
    kind = "PromptTooLongError" if "shorten" in words else "PromptError"
    check_one_line(cli("generate", "-m", str(demo), stdin=stdin), 2, kind, words)


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("prompt", "words"), [("", ["empty"]), ("caf\udce9", ["not UTF-8 text", "character 3"])])
def test_prompts_as_arguments(prompt: str, words: list[str], cli: CommandLine, demo: Path) -> None:
    check_one_line(cli("generate", "-m", str(demo), prompt), 2, "PromptError", words)


@pytest.mark.usefixtures("no_nodes")
def test_many_prompts_that_cannot_be(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    missing = cli("generate", "-m", str(demo), "--prompts", str(file))
    check_one_line(missing, 2, "PromptError", [str(file), "cannot be read"])
    file.write_text("\n \n")
    check_one_line(
        cli("generate", "-m", str(demo), "--prompts", str(file)), 2, "PromptError", [f"--prompts {file} is empty"]
    )
    file.write_text("one\n" + "word " * 1100)
    check_one_line(cli("generate", "-m", str(demo), "--prompts", str(file)), 2, "PromptError", ["context is 1024"])
    check_one_line(cli("generate", "-m", str(demo), "--prompts", str(file), "two"), 2, "ConfigError", ["both"])
    check_one_line(
        cli("generate", "-m", str(demo), "--prompts", str(file), "--parallel", "0"), 2, "ConfigError", ["--parallel"]
    )


# --- what is wrong: clusters ------------------------------------------------------------------------------------------


def test_nothing_answers_at_the_address(cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    prepare_ray("local")  # before Ray is imported
    monkeypatch.setattr("odmoe.on_ray.host.REACH_S", 0.2)
    words = ["no Ray cluster answers at 127.0.0.1:1 within"]
    check_one_line(cli("generate", "-m", str(demo), "--cluster", "127.0.0.1:1", "hello"), 1, "LaunchError", words)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["127.0.0.1:1", None, "no address"])
def test_no_ray_runs_here(left: str | None, cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try the address that an ended Ray has left for 40 s, twice, and say so in lines of its own."""
    prepare_ray("local")  # before Ray is imported
    from odmoe.on_ray import cluster

    if left is None:

        def nothing(address: str) -> str:
            raise ConnectionError("Could not find any running Ray instance.")

        monkeypatch.setattr(cluster, "canonicalize_bootstrap_address", nothing)
    else:
        monkeypatch.setenv("RAY_ADDRESS", left)
    monkeypatch.setattr(cluster.ray, "init", lambda **how: pytest.fail("Ray was asked"))
    words = ["start one (odmoe up FILE, or ray start)", "--cluster host:port", "--cluster local"]
    words += ["no Ray runs on this host"] if left is None else [f"no Ray answers at {left}, which", "RAY_ADDRESS"]
    for asked in (["-m", str(demo)], []):
        check_one_line(cli("generate", *asked, "--cluster", "auto", "hello"), 1, "LaunchError", words)


# --- errors of commands with --json -----------------------------------------------------------------------------------

JSON_ERRORS = [
    (["generate", "-m", "nowhere", "--json", "hello"], 1, "CheckpointError", "nowhere"),
    (["generate", "-m", "nowhere", "--json", "--nonsense"], 2, "ConfigError", "--nonsense"),
    (["generate", "-m", "nowhere", "--json", "--prompts", "missing"], 2, "PromptError", "missing"),
    (["plan", "-m", "nowhere", "--json"], 1, "MissingShardError", "nowhere"),
    (["simulate", "--json", "--profile", "nowhere"], 2, "ConfigError", "nowhere"),
]


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("args", "code", "kind", "word"), JSON_ERRORS, ids=[" ".join(one[0]) for one in JSON_ERRORS])
def test_an_error_is_an_object_too(args: list[str], code: int, kind: str, word: str, cli: CommandLine) -> None:
    """The same error as on standard error, and the same exit code as without --json."""
    found = cli(*args)
    error = json.loads(found.out)["error"]
    assert (found.code, error["type"]) == (code, kind)
    assert word in error["message"]
    assert found.err == f"odmoe: {kind}: {error['message']}\n"
    plain = cli(*(word for word in args if word != "--json"))
    assert (plain.code, plain.out, plain.err) == (code, "", found.err)


def test_a_prompt_is_no_flag(cli: CommandLine) -> None:
    """What stands after -- asks for no object."""
    assert cli("generate", "-m", "nowhere", "--", "--json").out == ""


# --- what --debug adds ------------------------------------------------------------------------------------------------


@pytest.fixture
def log_levels() -> Iterator[None]:
    """--debug changes them for the whole process."""
    ours = [logging.getLogger(name) for name in ("main_node", "shadow_node", "worker_node", "wire", "odmoe")]
    before = [logger.level for logger in ours]
    yield
    for logger, level in zip(ours, before, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("log_levels")
def test_debug_shows_where_it_came_from(cli: CommandLine) -> None:
    answer = cli("generate", "--debug", "-m", "nowhere", "hello")
    assert (answer.code, answer.out) == (1, "")
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("odmoe: CheckpointError: ")
