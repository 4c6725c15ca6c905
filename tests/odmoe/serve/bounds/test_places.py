"""Who gets a place for a connection, and who gives way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odmoe.serve.bounds.places import SPARE, Places, network_of


@dataclass(eq=False)
class Connection:
    spare: bool = False
    closed: bool = False

    def abort(self) -> None:
        self.closed = True


@dataclass
class Hall:
    """Places, and what is told of them."""

    most: int = 4
    most_of_address: int = 3
    lines: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = Places(self.most, self.most_of_address, self.lines.append, self.codes.append)

    def come(self, address: str, owes: bool = True) -> Connection:
        one = Connection()
        if self.places.enter(one, address):
            self.places.mark(one, owes)
        else:
            one.closed = True
        return one


def test_whoever_owes_something_longest_gives_way() -> None:
    hall = Hall()
    first, second, third, fourth = (hall.come(f"10.0.0.{number}") for number in range(4))
    hall.places.mark(first, False)
    hall.places.mark(first, True)  # it has asked something, and was answered
    newcomer = hall.come("10.0.0.9")
    assert (first.closed, second.closed, third.closed, fourth.closed) == (False, True, False, False)
    assert not newcomer.spare
    assert hall.codes == ["too_many_connections"]


def test_an_address_gives_way_to_itself_and_then_the_fullest_one() -> None:
    hall = Hall()
    other = hall.come("10.0.0.1")
    crowd = [hall.come("10.0.0.2") for _ in range(4)]
    assert [one.closed for one in crowd] == [True, False, False, False]
    newcomer = hall.come("10.0.0.3")
    assert crowd[1].closed
    assert [other.closed, newcomer.closed, newcomer.spare] == [False, False, False]


def test_none_that_is_answered_gives_way_and_spare_places_are_few() -> None:
    hall = Hall()
    busy = [hall.come(f"10.0.0.{number}", owes=False) for number in range(4)]
    spare = [hall.come("10.0.1.1", owes=False) for _ in range(SPARE)]
    assert all(one.spare for one in spare)
    assert hall.come("10.0.1.2").closed
    hall.places.mark(spare[3], True)
    assert hall.come("10.0.1.2").spare
    assert spare[3].closed
    hall.places.leave(busy[0])
    hall.places.leave(busy[0])
    assert not hall.come("10.0.1.2").spare


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_never_more_than_there_are_places_for(steps: list[tuple[int, int]]) -> None:
    hall, here = Hall(), list[Connection]()
    for what, number in steps:
        if what < 2 or not here:
            here.append(hall.come(f"10.0.0.{number % 3}", owes=bool(what)))
        elif what == 2:
            hall.places.mark(here[number % len(here)], bool(number % 2))
        else:
            hall.places.leave(here.pop(number % len(here)))
        here = [one for one in here if not one.closed]
        assert sum(not one.spare for one in here) <= hall.most
        assert sum(one.spare for one in here) <= SPARE


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("odmoe.serve.bounds.places.time.monotonic", lambda: now[0])
    hall = Hall()
    for _ in range(500):
        hall.come("10.0.0.1")
    hall.places.shed()
    assert len(hall.lines) == 1
    now[0] += 61
    for _ in range(2):  # the first has the place of the one that was closed for want of a file
        hall.come("10.0.0.1")
    assert len(hall.lines) == 2
    assert "498 since" in hall.lines[1]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:3:4:5:6", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_networks(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same
