"""When the certificates end by which a cluster's hosts know each other, as text."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from odmoe.terminal import count_text

SOON = datetime.timedelta(days=30)
"""With less time left it is a warning, and `odmoe up` renews the certificate."""


def end_of(pem: str) -> datetime.datetime | None:
    """The last moment of a certificate; None if there is none that can be read."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc
    except ValueError:
        return None


def ends_text(ends: Mapping[str, datetime.datetime], count: int, file: str, now: datetime.datetime) -> str:
    """Lines with the hosts, the day and the days left, the first to end first. `ends`: by a host's name, of those that
    gave theirs. `count`: of all hosts of the cluster. `file`: the cluster's."""
    days: dict[str, list[str]] = {}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        days.setdefault(_until(end, file, now), []).append(name)
    if len(days) == 1 and len(ends) > 1:
        hosts = f"all {count} hosts" if len(ends) == count else f"{len(ends)} of {count} hosts gave theirs"
        days = {day: [hosts] for day in days}
    return "".join(f"certificate: {', '.join(names)}: {day}\n" for day, names in days.items())


def _until(end: datetime.datetime, file: str, now: datetime.datetime) -> str:
    days = (end - now) // datetime.timedelta(days=1)
    if end <= now:
        return f"expired on {end:%Y-%m-%d}; warning: odmoe up {file} renews it"
    text = f"until {end:%Y-%m-%d}, {count_text(days, 'day')} left"
    return f"{text}; warning: odmoe up {file} renews it" if end - now < SOON else text
