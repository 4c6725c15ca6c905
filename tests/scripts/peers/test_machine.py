"""A cell's engines take turns with the same tokens, one that fails leaves the others, and none stays alive unasked."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from scripts.peers import machine
from scripts.peers.engine_process import EngineFailed
from scripts.peers.engines import ACCELERATE, EAGER, LLAMA, Engine, Task, Turn
from scripts.peers.figures import BASE, CACHED, CAPPED, FITS, QUARTER
from scripts.peers.groups import Groups


class FakeProcess:
    """Notes what happens to it. `fails`: the kinds whose second task fails."""

    log: list[tuple[str, str]]
    fails: frozenset[str]

    def __init__(self, engine: Engine, group: Any = None) -> None:
        self.name = engine.settings.get("system", engine.kind)
        self.group = group
        self.start_s = 1.0
        self.tasks: list[Task] = []
        self.log.append(("start", self.name))

    def answer(self, task: Task) -> Turn:
        self.tasks.append(task)
        if self.name in self.fails and len(self.tasks) == 2:
            raise EngineFailed(f"{self.name} ended")
        self.log.append((str(task.prompt[0]), self.name))
        return Turn(1.0, 1.0, [1, 2, 3], 0, 0.0)

    def peak_bytes(self) -> int:
        return 1 << 30

    def close(self) -> None:
        self.log.append(("close", self.name))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> machine.Machine:
    monkeypatch.setattr(FakeProcess, "log", [], raising=False)
    monkeypatch.setattr(FakeProcess, "fails", frozenset(), raising=False)
    monkeypatch.setattr(machine, "EngineProcess", FakeProcess)
    monkeypatch.setattr(machine, "drop_pages", lambda paths: None)

    def engine(self: Any, model: str, name: str, case: str) -> Engine:
        kind = name if name in (EAGER, ACCELERATE, LLAMA) else "ours"
        return Engine(kind, Path("model"), 1, settings={"system": name})

    monkeypatch.setattr(machine.Machine, "_engine", engine)
    return machine.Machine(Namespace(seed=0, tokens=4, without_llama=False), {}, None)


def params(case: str, engine: str, **more: Any) -> dict[str, Any]:
    return {"model": "A", "case": case, "engine": engine, "turns": 2, "tokens": 4, "seed": 0, **more}


def test_turns_alternate_with_the_same_tokens_in_each(made: machine.Machine) -> None:
    found = made.measure(params(FITS, CACHED))
    assert [len(found[name]["turns"]) for name in (EAGER, CACHED)] == [2, 2]
    log = FakeProcess.log
    assert [name for _, name in log] == [EAGER, EAGER, CACHED, CACHED, EAGER, CACHED, CACHED, EAGER]
    warm, first, second = log[1][0], log[4][0], log[6][0]
    assert log[3][0] == warm
    assert log[5][0] == first
    assert log[7][0] == second
    assert len({warm, first, second}) == 3


def test_the_reference_stays_alive_between_cells_and_the_others_do_not(made: machine.Machine) -> None:
    with made:
        made.measure(params(FITS, CACHED))
        made.measure(params(FITS, LLAMA))
        assert [name for what, name in FakeProcess.log if what == "start"] == [EAGER, CACHED, LLAMA]
        assert [name for what, name in FakeProcess.log if what == "close"] == [CACHED]
        made.measure(params(QUARTER, "static"))
        assert {name for what, name in FakeProcess.log if what == "close"} == {EAGER, CACHED, LLAMA}
    ends = [name for what, name in FakeProcess.log if what == "close"]
    assert sorted(ends) == sorted([EAGER, CACHED, LLAMA, BASE, "static"])


def test_an_engine_that_fails_leaves_the_others_to_be_measured(
    made: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "fails", frozenset([LLAMA]))
    found = made.measure(params(CAPPED, "static", cap=1 << 30))
    assert found[LLAMA] == {"failed": "llama.cpp ended"}
    assert len(found["static"]["turns"]) == len(found[ACCELERATE]["turns"]) == 2


def test_every_capped_engine_has_a_group_of_the_same_limit(
    made: machine.Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Group:
        def peak_bytes(self) -> int:
            return 7

    asked: list[int] = []
    monkeypatch.setattr(Groups, "make", lambda self, limit: asked.append(limit) or Group())
    made._groups = Groups(tmp_path, 1)
    found = made.measure(params(CAPPED, "static", cap=123))
    assert asked == [123, 123, 123]
    assert [one["group_peak_bytes"] for one in found.values()] == [7, 7, 7]
    made.measure(params(FITS, CACHED))
    assert len(asked) == 3
