"""The launching machine's directory of a cluster: certificates, secrets and known hosts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from scheduler.errors import ConfigError, LaunchError, StoreWriteError


def cluster_dir(name: str) -> Path:
    """`$XDG_CONFIG_HOME/odmoe/clusters/<name>`; without that variable below `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odmoe" / "clusters" / name


def token_file(folder: Path) -> Path:
    """The file of Ray's token in a cluster's directory, or in a host's directory of keys."""
    return folder / "ray_token"


def write_token(folder: Path) -> Path:
    """Make Ray's token if there is none. Returns its file. Raises StoreWriteError."""
    token = token_file(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not token.exists():
            with open(token, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(secrets.token_hex(32))
    except OSError as error:
        raise StoreWriteError(f"{token} cannot be written ({error.strerror}); see XDG_CONFIG_HOME") from error
    return token


def cluster_id(folder: Path) -> str | None:
    """What a host knows the cluster by: a digest of Ray's token. None if there is no token. A copy of the directory on
    another machine launches the same cluster. `folder`: as for `token_file`."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(token_file(folder).read_text().strip().encode()).hexdigest()[:16]
    return None


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a cluster against another `odmoe up` or `down` of this machine. Raises LaunchError, ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); see XDG_CONFIG_HOME") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another odmoe up or down of the cluster {folder.name} is at work; wait until it has ended"
            ) from None
        yield
    finally:
        os.close(lock)
