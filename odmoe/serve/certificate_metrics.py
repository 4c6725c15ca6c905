"""When the certificates end that a cluster's nodes know each other by, as a metric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from odmoe.machines.certificate_ends import end_of

FILES = {"ca": "ca.pem", "node": "node.pem"}
"""The certificate authority's, and that of this host."""


class CertificateMetrics:
    """Reads the files at each scrape: they are renewed while the service runs."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: a host's keys. None: there are no certificates."""
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """A file that cannot be read has no sample."""
        family = GaugeMetricFamily(
            "odmoe_certificate_expiry_timestamp_seconds",
            "When a certificate of this host ends, in seconds since 1970.",
            labels=["certificate"],
        )
        if self._folder is not None:
            for name, file in FILES.items():
                with contextlib.suppress(OSError):
                    if (end := end_of((self._folder / file).read_text(errors="replace"))) is not None:
                        family.add_metric([name], end.timestamp())
        yield family
