"""Whose a host is, and which other Ray runs there: read from its facts."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from scheduler.one_line import one_line

Facts = dict[str, Any]


def other_owner(facts: Facts, cluster_id: str | None) -> Facts | None:
    """The claim of another cluster on the host. None if it is nobody's or this cluster's, or if all that is left of
    the other is a token."""
    owner = facts.get("owner") or {}
    if not owner or owner["id"] == cluster_id:
        return None
    return owner if owner["held"] or "cluster" in owner else None


def describe_owner(owner: Facts) -> str:
    """Its cluster, who launched it, from which file and when."""
    if "cluster" not in owner:
        return "a cluster that has left no name, only a token of Ray that is not this cluster's"
    said = f"the cluster {owner['cluster']} of {owner['launcher']} ({owner['file']}), since {moment(owner['since'])}"
    return one_line(said)


def moment(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def occupied_fault(owner: Facts) -> tuple[str, str]:
    """(cause, advice) of a host that another cluster holds."""
    held = f" ({owner['held']})" if owner["held"] else ""
    return (
        f"it belongs to {describe_owner(owner)}{held}",
        "odmoe down of that cluster frees it; odmoe up --take-over ends what that cluster runs on it",
    )


def faults(facts: Facts, cluster_id: str, take_over: bool) -> Iterator[tuple[str, str]]:
    """(cause, advice) of another cluster or another Ray on the host."""
    owner = other_owner(facts, cluster_id)
    if owner and owner["held"] and not take_over:
        yield occupied_fault(owner)
        return
    if facts["processes"]:  # they run beside each other already
        return
    for ray in facts.get("other_rays", [])[:1]:
        port = f", port {ray['port']}" if ray["port"] else ""
        yield (
            f"another Ray runs there: {ray['name']}, process {ray['pid']} of {ray['user']}{port}, since "
            f"{moment(ray['since'])}",
            "end it there, or give that host up: two Rays would share ports and /tmp/ray",
        )


def same_machine(facts: dict[str, Facts]) -> Iterator[tuple[str, str]]:
    """Pairs of addresses at which one machine answers."""
    first: dict[str, str] = {}
    for address, found in facts.items():
        other = first.setdefault(found.get("home_id") or address, address)
        if other != address:
            yield other, address
