"""Waits are decided by the monotonic clock: the wall clock jumps."""

from __future__ import annotations

import pytest

from support.paths import ROOT

PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")

DATES = {
    "checkpoint/kv_files.py",  # when files were used
    "checkpoint/sharding/partial_store.py",  # the age of what another process has left
    "odmoe/doctor/secrets.py",  # dates of certificates
    "odmoe/machines/certs.py",
    "odmoe/machines/preflight.py",  # clocks of two machines, compared
    "odmoe/machines/probe.py",
    "odmoe/machines/status.py",  # days until certificates end
    "odmoe/serve/openai/chat.py",  # when an answer was made
    "odmoe/serve/openai/completions.py",
    "odmoe/serve/ollama/events.py",
    "odmoe/serve/responses/events.py",
    "odmoe/serve/service.py",
    "wire/rpc/tls.py",  # dates of certificates
}
"""Files that ask for the date."""
WALL = ("time.time(", "time_ns(", "datetime.now(", "datetime.utcnow(", "datetime.today(")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wall_clock_is_read_for_dates_only(package: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if any(call in path.read_text(encoding="utf-8") for call in WALL)
    }
    assert found - DATES == set()


def test_waits_of_the_probe_are_not_among_them() -> None:
    text = (ROOT / "odmoe/machines/probe.py").read_text(encoding="utf-8")
    assert text.count("time.time()") == 1, "its one use is the fact `time`"
