"""A node's certificate and key, its roles, and failed TLS handshakes in words.

A certificate says for each role of its host that the host may have it, as a name of its own: `worker.10-0-0-3` under
`ROLE_DOMAIN`. A main node asks for the name of the role that it wants at the address that it calls, so gRPC itself
refuses any other. A server reads the roles of its callers.

Python's `ssl` reads and checks the certificates as it would a peer's; the library that makes them is not needed here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scheduler.errors import CertificateError
from wire.rpc.quiet_grpc import grpc

CA_FILE, CHAIN_FILE, KEY_FILE = "ca.pem", "node.pem", "node.key"

ROLES = ("main", "shadow", "worker")
ROLE_DOMAIN = "od-moe.internal"

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name. We check dates ourselves, to report them."""

_MAKE = "make one with `odmoe certs` and copy it to this host"
_RENEW_ROLES = "renew it: `odmoe up` does so, or `odmoe certs` and a copy to its host"
_OTHER_ROLE = "a host has the role that the cluster file gives it; change that, and run `odmoe up` again"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's certificate chain and key, and the CA that signs it and its peers, all PEM.

    The contexts are Python's, from the same files; they serve to diagnose a handshake that failed in gRPC.
    """

    ca: bytes
    chain: bytes
    key: bytes = field(repr=False)
    expires: float
    """When the certificate expires, in seconds since 1970."""
    as_client: ssl.SSLContext = field(repr=False, compare=False)
    as_server: ssl.SSLContext = field(repr=False, compare=False)
    as_reader: ssl.SSLContext = field(repr=False, compare=False)
    """A client that accepts any certificate of this CA, whatever its dates, address and roles, to read it."""
    file: Path = field(default=Path(CHAIN_FILE), compare=False)
    """The certificate's."""
    roles: frozenset[str] | None = None
    """Those of the certificate. None: neither ours nor the peer's are checked."""

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """From `ca.pem`, `node.pem` and `node.key` in `folder`. Raises CertificateError naming the file and reason."""
        ca, chain, key = (folder / name for name in (CA_FILE, CHAIN_FILE, KEY_FILE))
        texts = tuple(_read(path) for path in (ca, chain, key))
        _check_pem(chain)
        _check_pem(ca)
        as_client, as_server = (_context(kind, ca, chain, key) for kind in (_CLIENT, _SERVER))
        as_reader, as_judge = (_lenient(_context(kind, ca, chain, key)) for kind in (_CLIENT, _SERVER))
        _check_dates(ca, as_client.get_ca_certs())
        seen = _meet(chain, ca, as_reader, as_judge)
        _check_dates(chain, [seen])
        expires, roles = ssl.cert_time_to_seconds(seen["notAfter"]), roles_of(seen)
        return cls(texts[0], texts[1], texts[2], expires, as_client, as_server, as_reader, chain, roles)

    def whatever_role(self) -> Identity:
        """For a stream that belongs to no cluster: any certificate of this CA will do, at both ends."""
        return replace(self, roles=None)

    def check_role(self, role: str) -> None:
        """Raises CertificateError unless this host may be a node of that role."""
        if self.roles is not None and role not in self.roles:
            raise CertificateError(f"the certificate in {self.file} {not_for(role, self.roles)}")

    def called_name(self, role: str, host: str) -> str:
        """What the certificate of the server at `host` has to be for."""
        return host if self.roles is None else role_name(role, host)

    def channel_options(self, role: str, host: str) -> tuple[tuple[str, str], ...]:
        """With which a client asks for `called_name`."""
        name = self.called_name(role, host)
        return () if name == host else (("grpc.ssl_target_name_override", name),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client: presents this certificate, and accepts servers whose certificate is for the called name."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    def server_credentials(self, on_knock: Any) -> grpc.ServerCredentials:
        """For a server: refuses clients without a certificate of this CA. Each connection calls `on_knock()`."""
        config = grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.ca)
        return grpc.dynamic_ssl_server_credentials(config, on_knock, require_client_authentication=True)


# --- roles -----------------------------------------------------------------------------------------------------


def role_name(role: str, host: str) -> str:
    """The name for which a certificate is, if `host`, an address or a name, may have this role."""
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).exploded.replace(".", "-").replace(":", "-")
    return f"{role}.{host.lower()}.{ROLE_DOMAIN}"


def roles_in(names: Iterable[str]) -> frozenset[str]:
    """The roles in a certificate's names."""
    return frozenset(role for name in names for role in ROLES if _is_role_name(name, role))


def _is_role_name(name: str, role: str) -> bool:
    return name.lower().startswith(f"{role}.") and name.lower().endswith(f".{ROLE_DOMAIN}")


def not_for(role: str, roles: frozenset[str]) -> str:
    """Why a certificate with these roles does not do, worded to follow its name."""
    if not roles:
        return f"is for no role, as those made by older versions; {_RENEW_ROLES}"
    return f"is for the role {' and '.join(sorted(roles))}, not for {role}; {_OTHER_ROLE}"


# --- the files -------------------------------------------------------------------------------------------------

_CLIENT, _SERVER = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except FileNotFoundError:
        raise CertificateError(f"{path} is not there; {_MAKE}") from None
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}; its owner must be who runs odmoe") from None
    if path.name == KEY_FILE and mode & 0o077:
        raise CertificateError(
            f"{path} can be read by other users (mode {mode:03o}); take that from them: chmod 600 {path}"
        )
    return content


def _context(kind: int, ca: Path, chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(ca)
    if not context.get_ca_certs():
        raise CertificateError(f"{ca} holds no CA's certificate; copy ca.pem of the cluster's `odmoe certs` there")
    try:
        context.load_cert_chain(chain, key, password="")  # without a password, OpenSSL would ask the terminal for it
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                f"{key} is not the key of {chain}; copy both from one run of `odmoe certs`"
            ) from None
        raise CertificateError(f"{key} is no private key in PEM without a password; {_MAKE}") from None
    except OSError as error:
        raise CertificateError(f"{chain} or {key} cannot be read: {error.strerror}") from None
    return context


def _lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_flags |= _NO_CHECK_TIME
    return context


def _check_pem(path: Path) -> None:
    """Raises CertificateError unless the file has at least one certificate and all can be read."""
    found = _PEM.findall(path.read_text("ascii", errors="replace"))
    try:
        for text in found:
            ssl.SSLContext(_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        found = []
    if not found:
        raise CertificateError(f"{path} is no certificate in PEM, or a damaged one; {_MAKE}")


def _check_dates(path: Path, certificates: list[Any]) -> None:
    for certificate in certificates:
        reason = dates_wrong(certificate)
        if reason:
            renew = "make a new CA with `odmoe certs`" if path.name == CA_FILE else "renew it with `odmoe certs`"
            raise CertificateError(f"the certificate in {path} {reason}; {renew}, or set this host's clock")


def dates_wrong(certificate: Mapping[str, Any]) -> str:
    """Why a certificate is not valid now, with the date and this host's clock; empty if it is."""
    now = time.time()
    first, last = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    if now > last:
        return f"expired on {_format_time(last)}; this host's clock says {_format_time(now)}"
    if now < first:
        return f"is not valid before {_format_time(first)}; this host's clock says {_format_time(now)}"
    return ""


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _meet(chain: Path, ca: Path, as_client: ssl.SSLContext, as_server: ssl.SSLContext) -> dict[str, Any]:
    """Do a handshake of the node with itself, ignoring dates. Returns the fields of its certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = as_client.wrap_bio(back, there), as_server.wrap_bio(there, back, server_side=True)
    try:
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        why = f"it is not signed by the CA in {ca}" if error.verify_code in _OTHER_CA else error.verify_message
        raise CertificateError(
            f"the certificate in {chain} cannot be used: {why}; copy both from one run of `odmoe certs`"
        ) from None
    except ssl.SSLError as error:
        raise CertificateError(f"the certificate in {chain} cannot be used: {error.reason}; {_MAKE}") from None
    found: Any = client.getpeercert()
    return dict(found)


# --- failures in words -----------------------------------------------------------------------------------------

_EXPIRED, _EARLY = 10, 9
_OTHER_CA = (2, 7, 18, 19, 20, 21, 24, 30)
_OTHER_ADDRESS = (62, 64)
"""OpenSSL's X509_V_ERR numbers, as `SSLCertVerificationError.verify_code` gives them."""

_ALERTS = (
    ("ALERT_CERTIFICATE_EXPIRED", "it has expired, or is not valid yet by the other's clock"),
    ("ALERT_UNKNOWN_CA", "it is not signed by the other's CA"),
    ("ALERT_DECRYPT_ERROR", "it is not signed by the other's CA"),
    ("ALERT_CERTIFICATE_REQUIRED", "none was shown"),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "it may not be used for that"),
    ("ALERT_BAD_CERTIFICATE", "it is for another address or role, or damaged"),
    ("ALERT_CERTIFICATE_UNKNOWN", "it is for another address or role, or not what the other expects"),
    ("ALERT_HANDSHAKE_FAILURE", "none was shown, or none that the other takes"),
)
NO_TLS, NO_CERTIFICATE = "it speaks no TLS", "it shows no certificate"
_NO_TLS_REASONS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "UNKNOWN_PROTOCOL",
    "PACKET_LENGTH_TOO_LONG",
)


def theirs_wrong(error: ssl.SSLError) -> str:
    """The peer's fault, worded to follow its name; empty if the handshake does not show one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in (_EXPIRED, _EARLY):
            return f"its certificate {'has expired' if code == _EXPIRED else 'is not valid yet'} by this host's clock"
        if code in _OTHER_CA:
            return "its certificate is signed by another CA than this cluster's"
        return "its certificate is for another address or role" if code in _OTHER_ADDRESS else error.verify_message
    reason = error.reason or ""
    if "NOT_RETURN_A_CERTIFICATE" in reason:
        return NO_CERTIFICATE
    return NO_TLS if reason in _NO_TLS_REASONS else ""


def ours_wrong(error: ssl.SSLError) -> str:
    """Why the peer rejected our certificate; empty if it sent no such alert."""
    return next((reason for name, reason in _ALERTS if name in (error.reason or "")), "")


def is_for(certificate: Mapping[str, Any]) -> list[str]:
    """The addresses and names that a certificate is for, without those of its roles."""
    return [name for name in _names(certificate) if not roles_in([name])]


def roles_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    return roles_in(_names(certificate))


def _names(certificate: Mapping[str, Any]) -> list[str]:
    return [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]


def same_host(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return one.lower() == other.lower()
