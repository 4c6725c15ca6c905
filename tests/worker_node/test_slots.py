"""Slots: counted as a plain list of what happened counts them."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ConfigError, DeadlineError, LaunchError
from scheduler.types import ExpertId
from worker_node.slots import Slots


@settings(deadline=None, max_examples=200)
@given(count=st.integers(1, 5), turns=st.lists(st.integers(0, 4), max_size=40))
def test_high_water_mark_is_the_most_ever_held(count: int, turns: list[int]) -> None:
    """Each turn takes the slot if it is free and frees it otherwise."""
    slots = Slots(count, 100)
    held: set[int] = set()
    history = [0]
    for turn in turns:
        slot = turn % count
        if slot in held:
            slots.release(slot)
        else:
            assert slots.occupy(slot, ExpertId(0, slot), 0.0) is slots.buffers[slot]
        held ^= {slot}
        history.append(len(held))
        assert slots.resident_max == max(history) <= count


@given(count=st.integers(1, 4), nbytes=st.integers(1, 20_000))
@settings(deadline=None, max_examples=30)
def test_allocated_bytes_are_those_of_the_buffers(count: int, nbytes: int) -> None:
    slots = Slots(count, nbytes)
    assert [buffer.shape for buffer in slots.buffers] == [(nbytes,)] * count
    assert slots.allocated_bytes == count * -(-nbytes // 4096) * 4096
    assert len({buffer.data_ptr() for buffer in slots.buffers}) == count
    assert all(buffer.data_ptr() % 4096 == 0 for buffer in slots.buffers)


def test_slots_lie_in_one_area() -> None:
    """Otherwise those below 2 MiB get no huge pages, and a disk fills scattered pages half as fast."""
    nbytes = 3 * 4096
    places = [buffer.data_ptr() for buffer in Slots(700, nbytes).buffers]
    assert [later - before for before, later in itertools.pairwise(places)] == [nbytes] * 699


@pytest.mark.parametrize("count", [0, -1])
def test_no_slots(count: int) -> None:
    with pytest.raises(ConfigError, match=f"slots is {count}"):
        Slots(count, 100)


def test_slots_that_the_kernel_has_no_room_for() -> None:
    with pytest.raises(LaunchError, match=f"cpu has no room for {1 << 20} slots of {1 << 40} bytes; take fewer"):
        Slots(1 << 20, 1 << 40)


def test_releasing_what_is_free_changes_nothing() -> None:
    slots = Slots(1, 10)
    slots.release(0)
    slots.occupy(0, ExpertId(1, 2), 0.0)
    slots.release(0)
    slots.release(0)
    assert slots.resident_max == 1


def test_occupied_slot_times_out_and_says_who_holds_it() -> None:
    slots = Slots(2, 10)
    slots.occupy(1, ExpertId(4, 7), 0.0)
    with pytest.raises(DeadlineError, match=r"slot 1 .*layer=4, expert=7.*0\.05 s"):
        slots.occupy(1, ExpertId(4, 8), 0.05)
    assert slots.resident_max == 1
    slots.occupy(0, ExpertId(4, 8), 0.0)
    assert slots.resident_max == 2


def test_occupy_waits_until_the_slot_is_released() -> None:
    slots = Slots(1, 10)
    slots.occupy(0, ExpertId(0, 0), 0.0)
    started, taken = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        slots.occupy(0, ExpertId(0, 1), 20.0)
        taken.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert started.wait(20)
    assert not taken.is_set()
    slots.release(0)
    assert taken.wait(20)
    thread.join(20)
    assert slots.resident_max == 1
    with pytest.raises(DeadlineError, match="expert=1"):
        slots.occupy(0, ExpertId(0, 2), 0.0)


def test_of_many_that_wait_each_gets_its_turn_and_none_twice() -> None:
    slots = Slots(1, 10)
    inside, most, turns = [0], [0], []
    lock = threading.Lock()

    def take(number: int) -> None:
        for _ in range(20):
            slots.occupy(0, ExpertId(0, number), 20.0)
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                turns.append(number)
            with lock:
                inside[0] -= 1
            slots.release(0)

    threads = [threading.Thread(target=take, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert most == [1]
    assert sorted(turns) == sorted(list(range(4)) * 20)
    assert slots.resident_max == 1
