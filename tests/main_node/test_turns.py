"""Passes take turns in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from main_node.turns import Turns
from scheduler.errors import DeadlineError

WAIT_S = 30.0


def test_round_robin() -> None:
    """With everyone always waiting for the next turn, nobody is ever two turns ahead of anyone."""
    turns, taken, people, rounds = Turns(WAIT_S), [], 5, 40
    together = threading.Barrier(people)

    def take(who: int) -> None:
        together.wait(WAIT_S)
        for _ in range(rounds):
            with turns:
                taken.append(who)
                while len(turns._waiting) < people - 1 - finished[0]:
                    pass  # until all others have come back
        finished[0] += 1

    finished = [0]
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
    turns = Turns(WAIT_S)

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
    with turns:
        assert not turns._waiting
