"""When certificates end, beside what openssl says."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry

from odmoe.serve.certificate_metrics import CertificateMetrics

NAME = "odmoe_certificate_expiry_timestamp_seconds"


def test_when_they_end(tmp_path: Path) -> None:
    node = tmp_path / "node.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made, "-subj", "/CN=n", "-days", "9", "-keyout", tmp_path / "k", "-out", node], check=True)
    asked = ["openssl", "x509", "-in", node, "-noout", "-enddate", "-dateopt", "iso_8601"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().partition("=")[2]
    registry = CollectorRegistry()
    registry.register(CertificateMetrics(tmp_path))
    assert registry.get_sample_value(NAME, {"certificate": "node"}) == datetime.fromisoformat(said).timestamp()
    (tmp_path / "ca.pem").write_text("no certificate")
    assert registry.get_sample_value(NAME, {"certificate": "ca"}) is None
