"""Nodes that go on when whoever started them has gone: found again, made anew, and ended, whoever was killed.

Takes about 60 s on two idle cores: one start of Ray, and what the tests look at happens once, in lasting.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("lasting.py")


@pytest.fixture(scope="module")
def wanted(reference: Callable[[str, int, int], Any]) -> Any:
    return reference("float32", 0, 6)


@pytest.fixture(scope="module")
def told(head: str, environment: dict[str, str], demo_store: Callable[[str], Any], wanted: Any) -> dict[str, Any]:
    command = [sys.executable, SCRIPT, head, str(demo_store("float32").path), json.dumps(wanted.prompt)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert found, f"{done.stdout}\n{done.stderr}"
    answer: dict[str, Any] = json.loads(found[0].removeprefix("told "))
    return answer


def test_the_next_one_finds_the_nodes_that_run(told: dict[str, Any], wanted: Any) -> None:
    assert told["first"] == told["second"] == wanted.tokens
    assert told["pids"] == told["pids again"]


def test_the_dtype_that_is_served_may_be_asked_for_by_its_name(told: dict[str, Any]) -> None:
    same, other = told["dtype"]
    assert same == ""
    assert "serves with --dtype float32, not bfloat16" in other


def test_a_main_node_that_was_killed_starts_by_itself_and_keeps_its_workers(told: dict[str, Any], wanted: Any) -> None:
    assert told["states"]
    assert told["third"] == wanted.tokens
    assert told["pids after"][0] != told["pids"][0]
    assert told["pids after"][1:] == told["pids"][1:]


def test_workers_of_a_main_node_that_is_gone_do_not_serve_the_next(told: dict[str, Any], wanted: Any) -> None:
    assert len(told["orphans"]) == 2
    assert told["slots"] == [2, 2]
    assert told["fourth"] == wanted.tokens


def test_a_worker_that_is_gone_for_good_is_made_anew(told: dict[str, Any], wanted: Any) -> None:
    assert told["made anew"] == wanted.tokens


def test_ending_ends_all_even_those_that_the_main_node_does_not_know(told: dict[str, Any]) -> None:
    assert told["left"] == []


def test_a_start_that_is_refused_leaves_nothing(told: dict[str, Any]) -> None:
    assert told["refused"].startswith("ConfigError: ctx-size is 1073741824")
    assert told["left of refused"] == []
