"""Checks of certificates and of the files that nobody else may read."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from odmoe.doctor.machine import Finding, Machine, State
from odmoe.machines.certificate_ends import SOON


def certificates(machine: Machine) -> Finding:
    """The dates of a host's certificate; here, of all that this machine keeps for the cluster."""
    texts = [text for text in machine.known("certificates") if text]
    if not texts:
        return Finding(State.OK, "none yet; odmoe up makes them")
    now = datetime.datetime.now(datetime.UTC)
    ends = []
    for subject, begin, end in _dates(texts):
        if end < now:
            return Finding(State.FAILURE, f"the certificate of {subject} expired on {end:%Y-%m-%d}")
        if begin > now:
            return Finding(
                State.FAILURE, f"the certificate of {subject} holds from {begin:%Y-%m-%d} on: is the clock right?"
            )
        ends.append((end, subject))
    if not ends:
        return Finding(State.FAILURE, "cannot be read")
    end, subject = min(ends)
    if end < now + SOON:
        return Finding(State.WARNING, f"the certificate of {subject} expires on {end:%Y-%m-%d}")
    return Finding(State.OK, f"valid until {end:%Y-%m-%d}")


def _dates(texts: list[str]) -> Iterator[tuple[str, datetime.datetime, datetime.datetime]]:
    """(subject, first moment, last moment) of those that can be read."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    for text in texts:
        try:
            found = x509.load_pem_x509_certificate(text.encode())
        except ValueError:
            continue
        names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        yield str(names[0].value) if names else "?", found.not_valid_before_utc, found.not_valid_after_utc


def secret_files(machine: Machine) -> Finding:
    """Keys and secrets that other users could read."""
    found = machine.known("secrets")
    open_files = [path for path, mode in found.items() if mode & 0o077]
    if open_files:
        return Finding(
            State.FAILURE,
            f"other users can read {', '.join(open_files)}",
            f"take that from them: chmod 600 {' '.join(open_files)}",
        )
    return Finding(State.OK, f"{len(found)} files, for this user alone" if found else "none yet")
