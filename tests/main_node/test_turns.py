"""Passes take turns in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from main_node.turns import Turns
from scheduler.errors import DeadlineError

WAIT_S = 30.0


def test_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everyone always waiting for the next turn, nobody is ever two turns ahead of anyone."""
    turns, taken, people, rounds = Turns(WAIT_S), [], 5, 40
    together, changed = threading.Barrier(people), threading.Condition()
    in_line = finished = 0

    class Turn(threading.Event):
        """Counts those who wait for one."""

        def wait(self, timeout: float | None = None) -> bool:
            step(line=1)
            try:
                return super().wait(timeout)
            finally:
                step(line=-1)

    def step(line: int = 0, done: int = 0) -> None:
        nonlocal in_line, finished
        with changed:
            in_line, finished = in_line + line, finished + done
            changed.notify_all()

    monkeypatch.setattr("main_node.turns.threading", SimpleNamespace(Event=Turn))

    def take(who: int) -> None:
        together.wait(WAIT_S)
        for _ in range(rounds):
            with turns:
                taken.append(who)
                with changed:  # until all others have come back
                    assert changed.wait_for(lambda: in_line >= people - 1 - finished, WAIT_S)
        step(done=1)

    threads = [threading.Thread(target=take, args=(who,)) for who in range(people)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(taken) == people * rounds
    for stop in range(1, len(taken)):
        counts = Counter(taken[:stop])
        assert max(counts.values()) - min(counts[who] for who in range(people)) <= 1


def test_one_at_a_time() -> None:
    turns, inside, most = Turns(WAIT_S), 0, 0

    def take() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turns:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == 1


def test_a_wait_has_an_end_and_leaves_no_place_behind() -> None:
    turns = Turns(0.05)
    with turns, pytest.raises(DeadlineError, match=r"0\.05 s"), turns:
        pass
    with turns:
        pass


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns(WAIT_S)
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass


@pytest.mark.parametrize("came", [False, True])
def test_who_is_interrupted_leaves_the_line(came: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its turn has come, or just then: the next is served."""
    turns = Turns(0.5)

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        if came:
            turns.__exit__()
        raise KeyboardInterrupt

    turns.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    if not came:
        turns.__exit__()
    for _ in range(2):
        with turns:  # at once: no place was left in the line
            pass
