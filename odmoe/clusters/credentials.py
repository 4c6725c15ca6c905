"""The secret and the certificate that a node needs beyond loopback. Each host reads its own files, because secrets and
keys do not travel with settings."""

from __future__ import annotations

import os
from pathlib import Path

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from wire.rpc.tls import Identity

SECRET = "secret"


def credentials(settings: Settings) -> tuple[str | None, Identity | None]:
    """The cluster's secret and this host's identity: from the directory `settings.tls`, if there is one.

    Raises ConfigError if the secret cannot be read, CertificateError if the certificate cannot be used.
    """
    if settings.tls is None:
        return settings.secret, None
    folder = Path(os.path.expanduser(settings.tls))
    return settings.secret or _secret(folder / SECRET), Identity.read(folder)


def _secret(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the cluster's secret {file} cannot be read: {why}") from error
