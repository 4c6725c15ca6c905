"""Certificates of every kind, right or wrong, made without the product's own `odmoe certs`."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """A CA that writes folders of certificates under `folder`. `days`: first and last of its validity, from today."""

    def __init__(self, folder: Path, name: str = "a CA", days: tuple[float, float] = (-9, 9)) -> None:
        self._folder = folder
        self._name = name
        self.key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(name, name, self.key, days).add_extension(constraints, critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())

    def folder(
        self,
        address: str = "127.0.0.1",
        days: tuple[float, float] = (-1, 9),
        ca: Authority | None = None,
        roles: tuple[str, ...] = ("main", "shadow", "worker"),
    ) -> Path:
        """`ca.pem` (of `ca`, or this one), `node.pem` (of this one) and `node.key`."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        host = ipaddress.ip_address(address)
        spelled = host.exploded.replace(".", "-").replace(":", "-")
        of_roles = [x509.DNSName(f"{role}.{spelled}.od-moe.internal") for role in roles]
        names = x509.SubjectAlternativeName([x509.IPAddress(host), *of_roles])
        builder = _builder("a node", self._name, key, days).add_extension(usage, False).add_extension(names, False)
        folder = self._folder / str(len(list(self._folder.iterdir())))
        folder.mkdir()
        (folder / "ca.pem").write_bytes(_pem(ca.certificate if ca else self.certificate))
        (folder / "node.pem").write_bytes(_pem(builder.sign(self.key, hashes.SHA256())))
        (folder / "node.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (folder / "node.key").chmod(0o600)
        return folder


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: tuple[float, float]
) -> x509.CertificateBuilder:
    today = datetime.datetime.now(datetime.UTC)
    first, last = (today + datetime.timedelta(days=count) for count in days)
    subject, issued = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    return x509.CertificateBuilder(issued, subject, key.public_key(), x509.random_serial_number(), first, last)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
