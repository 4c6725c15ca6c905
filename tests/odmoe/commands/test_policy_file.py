"""--policy-file: the examples of docs/systems.md, as they are printed there, and where a file is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import odmoe
from scheduler.errors import ConfigError
from scheduler.policies.policy_file import loaded_files, remove_policies_of
from support.machines.cli import CommandLine
from support.paths import ROOT

DOCUMENT = (ROOT / "docs" / "systems.md").read_text()
OWN, HOOKS = (ROOT / "docs" / "examples" / name for name in ("own_cache.py", "print_hooks.py"))
SIZE = ("--layers", "4", "--experts", "4", "--tokens", "8", "--slots", "6")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    before = set(loaded_files())
    yield
    for file in set(loaded_files()) - before:
        remove_policies_of(file)


def block(first: str) -> list[str]:
    """The lines of the document's indented block that begins so."""
    lines = DOCUMENT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"    {first}"))
    end = next(n for n, line in enumerate(lines[start:], start) if line and not line.startswith("    "))
    return [line[4:] for line in lines[start:end]]


def test_the_document_has_the_example_as_it_is() -> None:
    assert "\n".join(block("from scheduler.policies.registry import Choice")).startswith(
        OWN.read_text().partition('"""\n\n')[2].strip()
    )


def test_the_document_has_the_calls_of_a_real_run(cli: CommandLine) -> None:
    command = " ".join(block("odmoe simulate --policy-file docs/examples/print_hooks.py")).replace("\\", "").split()
    found = cli(*[str(HOOKS) if word.endswith("print_hooks.py") else word for word in command[1:]])
    assert found.code == 0, found.err
    printed = [line for line in block("residency  warm") if line]
    assert len(printed) > 20
    assert "\n".join(printed) in found.out


def test_the_example_is_exact_in_a_run_and_its_recording_is_read(
    embedded: Callable[..., Any], reference: Callable[[str, int, int], Any], tmp_path: Path, cli: CommandLine
) -> None:
    """Tokens and logits are those of Transformers, with the example's evictions."""
    expected = reference("float32", 0, 8)
    recording = tmp_path / "own.rec"
    cluster = embedded("float32", policy_file=str(OWN), system="own", slots=9, record=str(recording))
    logits: list[Any] = []
    cluster.main.on_logits = lambda _, values: logits.append(values)
    report = [step for step in cluster.generate(expected.prompt, 8, ignore_eos=True)][-1].report
    assert list(report.token_ids) == expected.tokens
    assert all(bool((mine == theirs).all()) for mine, theirs in zip(logits, expected.logits, strict=True))
    assert report.exact
    assert 0 < report.hits < report.named
    recording.write_bytes(cluster.recording())
    assert odmoe.replay(recording).difference is None
    remove_policies_of(OWN)
    wrong = cli("simulate", "--replay", str(recording))
    assert "--residency farthest-layer, which is not here" in wrong.err
    again = cli("simulate", "--replay", str(recording), "--policy-file", str(OWN), "--validate", "--json")
    assert json.loads(again.out)["identical"], again


def test_a_simulation_names_it_and_a_flag_may_choose_another(cli: CommandLine) -> None:
    found = json.loads(cli("simulate", "--policy-file", str(OWN), "--system", "own", *SIZE, "--json").out)
    assert (found["system"], found["residency"]) == ("own", "farthest-layer")
    other = cli("simulate", "--policy-file", str(OWN), "--system", "on-demand", "--residency", "farthest-layer", *SIZE)
    assert "on-demand + residency farthest-layer" in other.out
    assert odmoe.simulate(policy_file=OWN, system="own", layers=4, experts=4, tokens=2).as_dict()["system"] == "own"


def test_lists_and_helps_show_where_it_is_from(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = cli("systems", "--policy-file", str(OWN)).out
    assert re.search(r"^  own +On demand, .* \(from own_cache.py\)$", listed, re.MULTILINE)
    assert re.search(r"^  farthest-layer +The farthest layer leaves \(from own_cache.py\)$", listed, re.MULTILINE)
    facts = json.loads(cli("systems", "--policy-file", str(OWN), "--json").out)
    assert facts["policy_files"] == {"residency": {"farthest-layer": str(OWN)}}
    assert (facts["systems"]["own"]["file"], facts["systems"]["fate"]["file"]) == (str(OWN), "")
    remove_policies_of(OWN)
    line = "--residency farthest-layer: The farthest layer leaves (from own_cache.py)"
    assert line not in cli("generate", "--help").out
    assert line in cli("generate", "--help", f"--policy-file={OWN}").out
    remove_policies_of(OWN)
    monkeypatch.setenv("ODMOE_POLICY_FILE", str(OWN))
    assert line in cli("simulate", "--help").out


@pytest.mark.parametrize("cluster", ["local", "auto", "cluster.yaml", "10.0.0.1:6379"])
def test_it_is_refused_off_this_process_before_it_is_run(
    cluster: str, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    given = ("generate", "-m", "models/demo-moe", "--cluster", cluster, "hello")
    refused = cli(*given, "--policy-file", str(tmp_path / "mine.py"))
    assert refused.code == 2
    assert f"with --cluster {cluster}; a policy file is run in this process only" in refused.err
    monkeypatch.setenv("ODMOE_POLICY_FILE", str(tmp_path / "mine.py"))
    assert "ODMOE_POLICY_FILE is " in cli(*given).err
    assert not (tmp_path / "was-run").exists()


def test_what_is_wrong_names_the_setting_as_it_was_given(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_of_the_kind")
    for command in (("simulate",), ("systems",), ("generate", "-m", "models/demo-moe", "hello")):
        answer = cli(*command, "--policy-file", str(tmp_path / "mine.py"))
        assert (answer.code, answer.out) == (2, "")
        assert (
            "mine.py cannot be run: ModuleNotFoundError: No module named 'nothing_of_the_kind' (line 1)" in answer.err
        )
    with pytest.raises(ConfigError, match=r"^policy_file .*mine.py cannot be run"):
        odmoe.simulate(policy_file=tmp_path / "mine.py")
