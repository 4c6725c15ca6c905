"""`odmoe certs`: a cluster's CA, a certificate for each of its hosts, and its secret.

The folder afterwards (directories 700, keys and secrets 600):

    ca.pem, ca.key      the CA; the key admits hosts to the cluster and never leaves this machine
    secret              the cluster's
    <address>/          all that this host needs: ca.pem, node.pem, node.key, secret

A host's certificate is for its address, its name, and the roles that the host may have (`wire.rpc.tls`).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from odmoe.machines.certificate_ends import SOON
from odmoe.machines.cluster_file import read_cluster_file
from odmoe.machines.home import cluster_dir
from scheduler.errors import CertificateError, ConfigError
from wire.rpc.tls import CA_FILE, CHAIN_FILE, KEY_FILE, ROLE_DOMAIN, ROLES, role_name

if TYPE_CHECKING:
    from odmoe.terminal import Terminal

CA_KEY_FILE, SECRET_FILE = "ca.key", "secret"

BACKDATED = datetime.timedelta(days=1)
"""Certificates are valid from this long ago, since the clocks of a LAN differ."""

MAX_DAYS = 3650

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_HOST = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern})*")


# --- the command -----------------------------------------------------------------------------------------------------


def run_certs(
    cluster_file: Path | None,
    hosts: Iterable[str],
    folder: Path | None,
    days: int,
    renew: bool,
    terminal: Terminal,
) -> Path:
    """Make certificates for the hosts of a cluster file and those given as "NAME=ADDRESS" or "NAME=ADDRESS=ROLE",
    ROLE being one or several with + between them. Returns the folder.

    Raises ConfigError for invalid hosts, days or folder, CertificateError for an unusable CA.
    """
    cluster = read_cluster_file(cluster_file) if cluster_file else None
    hosts_named = [(host.name, host.address) for host in cluster.hosts] if cluster else []
    parsed = [_parse_host(text) for text in hosts]
    hosts_named += [(name, address) for name, address, _ in parsed]
    if not hosts_named:
        raise ConfigError("no hosts are given; give a cluster file, or --host NAME=ADDRESS for each")
    folder = folder or default_folder(cluster.name if cluster else "default")
    done = ensure_certs(
        folder, hosts_named, days, renew=renew, roles={name: given for name, _, given in parsed if given}
    )
    give_secret(folder, [address for _, address in hosts_named])
    for line in done or ["nothing to do: every certificate is good"]:
        terminal.console.print(line, markup=False, soft_wrap=True)
    terminal.facts(
        f"the certificates of {cluster.name if cluster else 'these hosts'}",
        {
            "in": str(folder),
            "each host gets": f"{folder}/<its address>, mode 700; settings: tls",
            "keep private": f"{folder}/{CA_KEY_FILE}: it can admit hosts to the cluster",
        },
    )
    return folder


def default_folder(cluster: str) -> Path:
    """`$XDG_CONFIG_HOME/odmoe/clusters/<cluster>`, or below `~/.config`. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", cluster):
        raise ConfigError(f"the cluster's name {cluster!r} cannot name a directory; allowed: letters, digits, _ . -")
    return cluster_dir(cluster)


def _parse_host(text: str) -> tuple[str, str, frozenset[str]]:
    """Name, address and roles, which may be none."""
    name, equals, rest = text.partition("=")
    address, given, roles = rest.partition("=")
    found = frozenset(roles.split("+")) if given else frozenset()
    if not equals or not found <= set(ROLES):
        raise ConfigError(
            f"--host is {text!r}; allowed: NAME=ADDRESS, such as worker-0=192.168.1.13, or NAME=ADDRESS=ROLE, such as "
            f"box=192.168.1.13=worker, with the role {', '.join(ROLES)}, or several with + between them"
        )
    return name, address, found


# --- what is there, and what has to be made --------------------------------------------------------------------------


def ensure_certs(
    folder: Path,
    hosts: Iterable[tuple[str, str]],
    days: int = 825,
    ca_days: int = 3650,
    renew: bool = False,
    roles: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> list[str]:
    """Make a CA if there is none, and a good certificate for each (name, address). Returns what was done, in words.

    A host may have the role that its name says, as in a cluster file (main, shadow, worker-0, ...), or those that
    `roles` has for its name. A certificate is replaced if it ends within 30 days, is of another CA, for another
    address, or other roles, or does not match its key; with `renew` always. A CA is never replaced. Each file is
    written whole or not at all. Raises ConfigError for invalid arguments, CertificateError for an unusable CA.
    """
    wanted = [
        (_checked_name(name), _checked_address(address), roles.get(name) or _role_of(name)) for name, address in hosts
    ]
    for address, count in Counter(address for _, address, _ in wanted).items():
        if count > 1:
            raise ConfigError(
                f"{address} is given {count} times, and a host has one certificate; name it once, with all its roles: "
                f"NAME={address}=main+worker"
            )
    for what, count in (("--days", days), ("ca_days", ca_days)):
        if not 1 <= count <= MAX_DAYS:
            raise ConfigError(f"{what} is {count}; allowed: 1 to {MAX_DAYS}")
    done: list[str] = []
    with _one_at_a_time(folder):
        key, certificate = _authority(folder, ca_days, done)
        for name, address, allowed in wanted:
            host, names = folder / address, _dns_names(name, address, allowed)
            why = "renewed (--renew)" if renew else _why_anew(host, names, address, certificate)
            if why:
                _make(host, names, address, days, key, certificate)
                role = " and ".join(sorted(allowed)) or "none, so it can be no node (give NAME=ADDRESS=ROLE)"
                until = _until(host / CHAIN_FILE)
                done.append(f"{name} ({address}): a certificate until {until}; role: {role}; {why}")
            _write(host / CA_FILE, _pem(certificate), 0o644, done)
    return done


def write_cluster_secret(folder: Path) -> Path:
    """Make a random secret if there is none. Returns its file."""
    file = folder / SECRET_FILE
    with _one_at_a_time(folder):
        if not file.exists():
            _write(file, secrets.token_hex(32).encode() + b"\n", 0o600)
    return file


def give_secret(folder: Path, addresses: Iterable[str]) -> None:
    """Copy the secret into each host's directory, beside its certificate."""
    secret = write_cluster_secret(folder).read_bytes()
    for address in addresses:
        _write(folder / _checked_address(address) / SECRET_FILE, secret, 0o600)


def _authority(folder: Path, days: int, done: list[str]) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The CA in `folder`, made there if there is none."""
    key_file, file = folder / CA_KEY_FILE, folder / CA_FILE
    if not key_file.exists():
        if file.exists():
            raise CertificateError(
                f"{file} is there, but not its key {key_file.name}; bring it back, or move {folder} away and make "
                "all certificates again"
            )
        _write(key_file, _pem(ec.generate_private_key(ec.SECP256R1())), 0o600)
    key = _read_key(key_file)
    if not file.exists():
        certificate = _sign_authority(key, days)
        _write(file, _pem(certificate), 0o644)
        done.append(f"a CA until {_until(file)}, in {file}")
    certificate = _read_certificate(file)
    if certificate.public_key() != key.public_key():
        raise CertificateError(f"{key_file} is not the key of {file}; bring the right one back")
    if certificate.not_valid_after_utc < _now() + SOON:
        raise CertificateError(
            f"the CA in {file} ends on {_until(file)}; move {folder} away and make all certificates again"
        )
    return key, certificate


def _why_anew(host: Path, dns_names: list[str], address: str, authority: x509.Certificate) -> str:
    """Why the certificate in `host` must be replaced; empty if it is good."""
    if not (host / CHAIN_FILE).exists() or not (host / KEY_FILE).exists():
        return "there was none"
    try:
        certificate = _read_certificate(host / CHAIN_FILE)
        fits = certificate.public_key() == _read_key(host / KEY_FILE).public_key()
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except CertificateError:
        return "the one there could not be read"
    except (InvalidSignature, ValueError, TypeError):
        return "the one there was signed by another CA"
    except x509.ExtensionNotFound:
        return "the one there was for no address"
    if not fits:
        return "the one there was not for the key beside it"
    if names.get_values_for_type(x509.IPAddress) != [ipaddress.ip_address(address)]:
        return "the one there was for another address"
    found = names.get_values_for_type(x509.DNSName)
    if found[:1] != dns_names[:1]:
        return "the one there was for another name"
    if found != dns_names:
        return "the one there was for no role, as those made by older versions, or for another one"
    if certificate.not_valid_after_utc < _now() + SOON:
        return f"the one there ended on {_until(host / CHAIN_FILE)}"
    return ""


# --- making ----------------------------------------------------------------------------------------------------------


def _sign_authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """A CA that may sign hosts only. Its name is unique, to distinguish the CAs of two clusters."""
    name = _common_name(f"odmoe cluster {secrets.token_hex(4)}")
    end = _now() + datetime.timedelta(days=days)
    return (
        _begin_certificate(name, name, key.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _make(
    host: Path, dns_names: list[str], address: str, days: int, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(_now() + datetime.timedelta(days=days), ca.not_valid_after_utc)
    address_name = x509.IPAddress(ipaddress.ip_address(address))
    names = x509.SubjectAlternativeName([address_name, *map(x509.DNSName, dns_names)])
    certificate = (
        _begin_certificate(_common_name(dns_names[0]), ca.subject, key.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False)
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    # Between the two writes the certificate does not match its key: a run interrupted here is repaired by the next.
    _write(host / KEY_FILE, _pem(key), 0o600)
    _write(host / CHAIN_FILE, _pem(certificate), 0o644)


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    begin = _now() - BACKDATED
    number = x509.random_serial_number()
    return x509.CertificateBuilder(issuer, subject, key, number, begin, end).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key), critical=False
    )


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# --- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock `folder` against other runs of `odmoe certs`. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(folder.iterdir()):  # an existing folder with content keeps its mode: others may use it
            folder.chmod(0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold certificates: {error.strerror}; give another --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another `odmoe certs` works in {folder}; try again when it has ended") from None
    finally:
        os.close(lock)


def _write(file: Path, content: bytes, mode: int, done: list[str] | None = None) -> None:
    """Write a file, whole or not at all, in a directory of this user alone. Does nothing if it is right already."""
    try:
        file.parent.mkdir(exist_ok=True, mode=0o700)
        if file.exists() and file.read_bytes() == content and file.stat().st_mode & 0o777 == mode:
            return
        if done is not None and file.exists():
            done.append(f"{file} was another's, or damaged: written again")
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as partial:
            try:
                os.fchmod(partial.fileno(), mode)
                partial.write(content)
                partial.flush()
                os.fsync(partial.fileno())
                os.replace(partial.name, file)
            except BaseException:
                os.unlink(partial.name)
                raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; give another --out") from None


def _pem(thing: ec.EllipticCurvePrivateKey | x509.Certificate) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    return thing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        if file.stat().st_mode & 0o077:
            raise CertificateError(f"{file} can be read by other users; take that from them: chmod 600 {file}")
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(f"{file} cannot be read as a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{file} is a {type(key).__name__}; allowed: an elliptic curve's, as made here")
    return key


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} cannot be read as a certificate: {error}") from None


def _role_of(name: str) -> frozenset[str]:
    """The role of a host with such a name in a cluster file. Others have none, and may only measure their links."""
    role = name.partition("-")[0]
    return frozenset((role,)) if role in ("worker", "shadow") or name in ROLES else frozenset()


def _dns_names(name: str, address: str, roles: frozenset[str]) -> list[str]:
    """Of a certificate: the host's own name first."""
    return [name, *(role_name(role, host) for role in sorted(roles) for host in (address, name))]


def _until(file: Path) -> str:
    return f"{_read_certificate(file).not_valid_after_utc:%Y-%m-%d}"


def _checked_name(name: str) -> str:
    if not _HOST.fullmatch(name) or len(name) > 64:  # the limit of a certificate's common name
        raise ConfigError(f"the host name {name!r} is invalid; allowed: up to 64 letters, digits, - and .")
    if name.lower().endswith(f".{ROLE_DOMAIN}"):
        raise ConfigError(f"the host name {name!r} is invalid: names under {ROLE_DOMAIN} are those of roles")
    return name


def _checked_address(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ConfigError(f"the address {address!r} is invalid; allowed: an IP address, such as 192.168.1.13") from None
