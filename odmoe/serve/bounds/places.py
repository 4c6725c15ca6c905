"""How many connections may be open: all together, and from one address.

A newcomer gets the place of whichever client has owed something longest: a request, the rest of one, or a look at its
answer. So clients that only keep a connection open cost nobody a place, however many there are.
"""

from __future__ import annotations

import ipaddress
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

SPARE = 16
"""Places beyond the others. Only what watches the service is answered there."""
NOTIFY_S = 60.0
"""Least time between two lines of the log about connections that were closed or refused."""
IPV6_NETWORK = 64
"""Bits of an IPv6 address that tell one customer from another."""


class Occupant(Protocol):
    """A connection."""

    spare: bool

    def abort(self) -> None:
        """Close it now."""


@dataclass(slots=True, eq=False)
class _Crowd:
    """The connections of one address, or those on spare places."""

    name: str
    open: int = 0
    owing: dict[Occupant, int] = field(default_factory=dict)
    """Those whose client owes something, in the order in which they began to, and their numbers in that order of
    all."""

    @property
    def first(self) -> int:
        """The number of the first. 0: there is none."""
        return next(iter(self.owing.values()), 0)


class Places:
    """Of connections. Used on the event loop alone."""

    def __init__(
        self,
        most: int,
        most_of_address: int,
        notify: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """`notify`: gets a line now and then. `on_refused`: called with the error's code for each connection that is
        closed or refused."""
        self.most, self.most_of_address = most, most_of_address
        self._notify, self._on_refused = notify, on_refused
        self._crowds: dict[str, _Crowd] = {}
        self._spare = _Crowd("")
        self._of: dict[Occupant, _Crowd] = {}
        self._numbers = itertools.count(1)
        self._turned_away, self._notify_at = 0, 0.0

    def enter(self, one: Occupant, address: str) -> bool:
        """Give a connection a place. False: there is none, not even a spare one."""
        name = network_of(address)
        crowd = self._crowds.get(name) or _Crowd(name)
        if crowd.open >= self.most_of_address:
            has_place = self._has_given_way(crowd)
        else:
            has_place = len(self._of) - self._spare.open < self.most or self._has_given_way(self._largest())
        if not has_place:
            crowd = self._spare
            if crowd.open >= SPARE and not self._has_given_way(crowd):
                self._turn_away()
                return False
        one.spare = crowd is self._spare
        if not one.spare:
            self._crowds[name] = crowd
        crowd.open += 1
        self._of[one] = crowd
        return True

    def leave(self, one: Occupant) -> None:
        """It is closed. Without effect the second time."""
        crowd = self._of.pop(one, None)
        if crowd is None:
            return
        crowd.open -= 1
        crowd.owing.pop(one, None)
        if not crowd.open:
            self._crowds.pop(crowd.name, None)

    def mark(self, one: Occupant, owes: bool) -> None:
        """Whether its client owes something now."""
        crowd = self._of.get(one)
        if crowd is None:
            return
        if owes:
            if one not in crowd.owing:
                crowd.owing[one] = next(self._numbers)
        else:
            crowd.owing.pop(one, None)

    def shed(self) -> None:
        """The process has no file left for another connection: close one, if any client owes something."""
        self._has_given_way(self._largest())
        self._notify_seldom("no file is left for another connection; raise the limit of open files (ulimit -n)")

    def _largest(self) -> _Crowd:
        """Of which most owe something. Of several, the one that has owed it longest."""
        return max(self._crowds.values(), key=lambda crowd: (len(crowd.owing), -crowd.first), default=self._spare)

    def _has_given_way(self, crowd: _Crowd) -> bool:
        first = next(iter(crowd.owing), None)
        if first is None:
            return False
        self._turn_away()
        self.leave(first)
        first.abort()
        return True

    def _turn_away(self) -> None:
        self._on_refused("too_many_connections")
        self._turned_away += 1
        self._notify_seldom(
            f"{len(self._of)} connections are open, of at most {self.most}, {self.most_of_address} an address"
        )

    def _notify_seldom(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._notify_at:
            self._notify(f"{text}: closed or refused {self._turned_away} since the last such line")
            self._turned_away, self._notify_at = 0, now + NOTIFY_S


def network_of(address: str) -> str:
    """What addresses of one client have in common: an IPv4 address, or the first half of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a socket without addresses
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, IPV6_NETWORK), strict=False))
