"""Profiles that are slowed down for a machine that cannot keep up."""

from __future__ import annotations


def slowdown(profile: str | None) -> int:
    """How many times as long everything takes as on the profile's own hardware: of rtx3090-pcie3@10 it is 10. 1 if
    nothing is emulated."""
    name, _, times = (profile or "").rpartition("@")
    return int(times) if name and times.isdecimal() else 1
