"""What `odmoe status` says of certificates' ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from odmoe.machines.certificate_ends import end_of, ends_text

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_hosts_days_and_a_warning() -> None:
    """The first to end comes first; the days are whole ones that are left."""
    ends = {
        "main": NOW + timedelta(days=400),
        "worker-0": NOW + timedelta(days=1, hours=23),
        "worker-1": NOW - timedelta(seconds=1),
        "worker-2": NOW + timedelta(days=30),
        "worker-3": NOW + timedelta(days=400, hours=2),
        "worker-4": NOW + timedelta(days=29, hours=23),
    }
    assert ends_text(ends, 6, "c.yaml", NOW).splitlines() == [
        "certificate: worker-1: expired on 2026-03-01; warning: odmoe up c.yaml renews it",
        "certificate: worker-0: until 2026-03-03, 1 day left; warning: odmoe up c.yaml renews it",
        "certificate: worker-4: until 2026-03-31, 29 days left; warning: odmoe up c.yaml renews it",
        "certificate: worker-2: until 2026-03-31, 30 days left",
        "certificate: main, worker-3: until 2027-04-05, 400 days left",
    ]
    assert ends_text({}, 6, "c.yaml", NOW) == ""


@pytest.mark.parametrize(("count", "hosts"), [(3, "all 3 hosts"), (4, "3 of 4 hosts gave theirs")])
def test_a_host_without_an_answer_is_not_among_all(count: int, hosts: str) -> None:
    ends = dict.fromkeys(("main", "worker-0", "worker-1"), NOW + timedelta(days=400))
    assert ends_text(ends, count, "c.yaml", NOW) == f"certificate: {hosts}: until 2027-04-05, 400 days left\n"


def test_what_is_no_certificate_has_no_end() -> None:
    assert end_of("") is None
    assert end_of("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n") is None
