"""A run on a cluster that is written beforehand: what the referee must find, and what it must let pass."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from odmoe.chaos import load, run
from odmoe.chaos.faults import Fault
from odmoe.chaos.load import Load, Outcome, Prompt
from odmoe.chaos.referee import Calm, Verdict, judge
from odmoe.chaos.run import Disturbance, Plan
from odmoe.chaos.usage import Usage, usage_of
from odmoe.commands.chaos import seconds_of
from odmoe.commands.texts.chaos_text import WIDTH, as_text
from scheduler.errors import ConfigError, LaunchError, RequestFailedError, WrongOutputError

PROMPTS = ([3, 4], [9])
TOKENS = 12
WRONG = [0] * 50
TOKEN_S = 0.002


class World:
    """Tokens that follow from the prompt. `trouble`: what happens to answers while a fault strikes, by name."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble, self.struck, self.ended = trouble, False, False
        self.clients: Any = None
        self.held = Usage(100 << 20, 10, 20)

    def workers(self) -> list[str]:
        return ["worker 0"]

    def kill(self, names: Sequence[str]) -> list[str]:
        return list(names)

    def spoil(self, names: Sequence[str], what: str, seconds: float) -> list[str]:
        return list(names)

    def leave(self) -> int:
        return int(self.clients.leave())

    def missing(self) -> list[str]:
        return ["worker 0"] if self.trouble == "gone" and self.ended else []

    def mend(self) -> None:
        pass

    def usage(self) -> dict[str, Usage]:
        return {"main node": self.held}

    def strike(self, victims: Any, rng: random.Random) -> str:
        self.struck = True
        time.sleep(0.1)
        self.struck, self.ended = False, True
        if self.trouble == "leak":
            self.held = Usage(200 << 20, 10, 90)
        return "worker 0"

    @contextlib.contextmanager
    def ask(self, prompt: Sequence[int], count: int) -> Iterator[Any]:
        if list(prompt) == WRONG and self.trouble != "answers what is wrong":
            raise RequestFailedError("too long")
        yield Answer(self, prompt, count)


class Answer:
    def __init__(self, world: World, prompt: Sequence[int], count: int) -> None:
        self._world, self._prompt, self._count, self._over = world, prompt, count, False

    def cancel(self) -> None:
        self._over = True

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            time.sleep(TOKEN_S)
            world = self._world
            if self._over:
                raise RequestFailedError("cancelled")
            if world.struck and world.trouble == "typed":
                raise RequestFailedError("no worker")
            if world.struck and world.trouble == "untyped":
                raise KeyError("slot")
            if world.struck and world.trouble == "short":
                return
            if world.trouble == "hang":
                while world.struck or world.ended:
                    time.sleep(0.01)
                    if self._over:
                        return
            lie = (world.struck and world.trouble == "lie") or (world.ended and world.trouble == "wrong for good")
            yield sum(self._prompt) * 31 + number + (random.randrange(9) if world.trouble == "unsure" else lie)


def disturb(world: World, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> Verdict:
    monkeypatch.setattr(run, "BACK_S", 0.3)
    monkeypatch.setattr(run, "REST_S", (0.02, 0.05))
    monkeypatch.setattr(run, "WAITS_S", 0.3)
    monkeypatch.setattr(run, "NOTICED_S", 0.02)
    monkeypatch.setattr(load, "PAUSE_S", 0.01)
    fault = Fault("struck", "", world.strike)
    given: dict[str, Any] = {"faults": [fault], "worker_wait_s": 5.0, "requests": 40} | plan
    return Disturbance(world, world.ask, PROMPTS, TOKENS, WRONG).run(Plan(5.0, **given))


def test_a_sound_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = disturb(World(), monkeypatch)
    assert verdict.violations == []
    assert verdict.errors == {}
    assert verdict.requests >= 30
    assert verdict.refused + verdict.requests >= 40
    [cost] = verdict.costs
    assert cost.fault == "struck"
    assert cost.count >= 1
    assert cost.worst_s is not None
    assert TOKEN_S <= cost.worst_s < 1.0
    assert verdict.usage == {"main node": {"memory": 1.0, "threads": 1.0, "descriptors": 1.0}}


def test_an_error_with_a_name_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = disturb(World("typed"), monkeypatch, requests=30)
    assert verdict.violations == []
    assert verdict.errors["RequestFailedError"] >= 1
    assert verdict.costs[0].errors >= 1


def test_clients_that_all_leave_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    leave = Fault("leave", "", lambda victims, rng: str(victims.leave()))
    verdict = disturb(world, monkeypatch, faults=[leave])
    assert verdict.violations == []
    assert verdict.errors == {}
    assert verdict.left >= 2


@pytest.mark.parametrize(
    ("trouble", "found"),
    [
        ("lie", "tokens ["),
        ("short", "tokens ["),
        ("untyped", "an error without a type: KeyError: 'slot'"),
        ("hang", "2 requests were open beyond their bound"),
        ("gone", "at the end these nodes do not serve: worker 0"),
        ("wrong for good", "2 of 2 answers were wrong after all faults"),
        ("answers what is wrong", "a wrong request was answered"),
        ("leak", "main node has 90 descriptors, 20 before"),
    ],
)
def test_what_the_referee_finds(trouble: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = disturb(World(trouble), monkeypatch, worker_wait_s=0.2)
    assert any(found in one for one in verdict.violations), verdict.violations
    text = as_text(verdict)
    assert "NOT held" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_node_that_does_not_come_back_ends_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = disturb(World("gone"), monkeypatch, requests=10_000)
    assert [cost.count for cost in verdict.costs] == [1]
    assert "struck of worker 0: worker 0 not back" in verdict.violations
    assert verdict.seconds < 4.0


@pytest.mark.parametrize("trouble", ["", "lie", "hang"])
def test_an_interrupt_gives_a_verdict_on_what_was_seen(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(trouble)
    strike = Fault("struck", "", world.strike)

    def interrupt(victims: Any, rng: random.Random) -> str:
        time.sleep(0.5)
        signal.raise_signal(signal.SIGINT)
        return ""

    interrupted = Fault("interrupted", "", interrupt)
    monkeypatch.setattr(random.Random, "choice", lambda rng, given: given[bool(world.ended) and len(given) - 1])
    verdict = disturb(world, monkeypatch, faults=[strike, interrupted], worker_wait_s=0.0, requests=10_000)
    assert "interrupted" in verdict.interrupted
    assert [cost.fault for cost in verdict.costs] == ["struck"]
    assert bool(verdict.violations) == bool(trouble)
    assert (verdict.speed, verdict.usage) == (None, {})
    assert "Interrupted: 1 faults" in as_text(verdict)


def test_who_waits_for_a_place_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two clients gets no token within the bound, since the cluster answers one at a time."""
    world, place = World(), threading.Lock()
    plain = world.ask

    @contextlib.contextmanager
    def ask(prompt: Sequence[int], count: int) -> Iterator[Any]:
        with place, plain(prompt, count) as answer:
            yield answer

    def strike(victims: Any, rng: random.Random) -> str:
        if not world.struck:
            world.struck = True
            place.acquire()
            time.sleep(0.5)
            return "worker 0"
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr(world, "ask", ask)
    how: dict[str, Any] = {"faults": [Fault("struck", "", strike)], "worker_wait_s": 0.0, "requests": 10_000}
    verdict = disturb(world, monkeypatch, places=1, **how)
    assert verdict.interrupted
    assert verdict.violations == []


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_without_an_end_has_a_verdict(interrupt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a shell has the command ignore Ctrl-C."""
    monkeypatch.setattr(run, "END_S", -4.0)
    before = signal.signal(signal.SIGINT, interrupt)

    def strike(victims: Any, rng: random.Random) -> str:
        time.sleep(10)
        return ""

    try:
        verdict = disturb(
            World(), monkeypatch, faults=[Fault("endless", "", strike)], requests=10_000, worker_wait_s=0.2
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert 2.0 <= verdict.seconds < 7  # the faults' time, END_S and twice the bound of half a second
    assert ["no end in time" in one and "endless" in one for one in verdict.violations] == [True]
    assert not verdict.interrupted


def test_a_fault_that_hit_nobody_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = disturb(World(), monkeypatch, faults=[Fault("missed", "", lambda victims, rng: "")])
    assert (verdict.costs, verdict.violations) == ([], [])


@pytest.mark.parametrize(
    ("times", "waits_for_place", "found"),
    [
        ([0.0, 9.0, 18.0, 27.0], False, 0),
        ([0.0, 1.0, 12.0, 13.0], True, 1),
        ([0.0, 1.0, 2.0, 13.0], False, 1),
        ([0.0, 11.0, 12.0, 13.0], False, 1),
        ([0.0, 11.0, 12.0, 13.0], True, 0),
    ],
)
def test_a_request_without_progress(times: list[float], waits_for_place: bool, found: int) -> None:
    calm = Calm([], 1.0, {})
    one = Outcome(Prompt([1], [2, 3]), 2, tokens=[2, 3], times=times)
    how: dict[str, Any] = {"seconds": 30.0, "hanging": 0, "missing": [], "waits_for_place": waits_for_place}
    violations = judge([one], [], calm, calm, bound_s=10.0, **how).violations
    assert violations == ["a request had no progress for 11.0 s; its bound is 10 s"] * found


def test_who_asks_wrongly_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "WRONG", 1.0)
    monkeypatch.setattr(load, "PAUSE_S", 0.01)
    asked, refuse = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def ask(prompt: Sequence[int], count: int) -> Iterator[Any]:
        asked.set()
        assert refuse.wait(10)
        raise RequestFailedError("too long")
        yield

    clients = Load(ask, [Prompt([1], [2])], 1, 0, WRONG)
    assert asked.wait(10)
    assert clients.leave() == 0
    refuse.set()
    assert clients.close(10) == 0
    assert all(one.error == "RequestFailedError: too long" for one in clients.outcomes)


def test_a_cluster_that_is_wrong_before_any_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongOutputError, match="differ without any fault"):
        disturb(World("unsure"), monkeypatch)
    world = World("gone")
    world.ended = True
    with pytest.raises(LaunchError, match="worker 0 did not serve within"):
        disturb(world, monkeypatch)
    monkeypatch.setattr(run, "START_S", 0.01)
    with pytest.raises(LaunchError, match="no answers of all nodes within"):
        disturb(World(), monkeypatch)


def test_the_same_seed_draws_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []

    def noted(name: str) -> Fault:
        def strike(victims: Any, rng: random.Random) -> str:
            drawn[-1].append(f"{name} {rng.random()}")
            return name

        return Fault(name, "", strike)

    for seed in (7, 7, 8):
        drawn.append([])
        disturb(World(), monkeypatch, faults=[noted("a"), noted("b")], seed=seed, requests=60)
    shared = min(map(len, drawn))
    assert shared >= 2
    assert drawn[0][:shared] == drawn[1][:shared] != drawn[2][:shared]


def test_what_a_process_holds() -> None:
    before = usage_of(os.getpid())
    with open(os.devnull) as one, open(os.devnull) as other:
        assert one.fileno() != other.fileno()
        held = usage_of(os.getpid())
    assert before is not None
    assert held is not None
    assert held.descriptors == before.descriptors + 2
    assert before.memory_bytes > 10 << 20
    assert usage_of(2**22 + 1) is None


def test_durations() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    for wrong in ("0", "-1s", "1d", "", "nan"):
        with pytest.raises(ConfigError, match="allowed: a time such as 90s"):
            seconds_of(wrong)
