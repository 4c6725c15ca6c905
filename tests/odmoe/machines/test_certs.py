"""`odmoe certs`, checked by openssl, by gRPC's own reader of identities, and by what is on disk."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from odmoe.machines import certs
from odmoe.machines.certs import default_folder, ensure_certs, give_secret, run_certs, write_cluster_secret
from odmoe.terminal import Terminal
from scheduler.errors import CertificateError, ConfigError
from wire.rpc.tls import Identity

HOSTS = [("main", "10.77.0.11"), ("worker-0", "10.77.0.13")]
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

CLUSTER = """
cluster_name: ten
provider: {hosts: {main_node: 10.77.0.11, shadow_node: 10.77.0.12, worker_node: [10.77.0.13, 10.77.0.14]}}
auth: {ssh_user: root}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "clusters" / "ten"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def openssl(*arguments: object) -> str:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_days(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """From now on it is so many days later, as far as certificates are made."""
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(certs, "_now", lambda: later)


# --- what is made ----------------------------------------------------------------------------------------------------


def test_what_lies_in_the_folder(folder):
    done = ensure_certs(folder, HOSTS)
    assert [line.partition(":")[0].partition(" until")[0] for line in done] == [
        "a CA",
        "main (10.77.0.11)",
        "worker-0 (10.77.0.13)",
    ]
    host_files = {f"{address}/{name}" for _, address in HOSTS for name in ("ca.pem", "node.pem", "node.key")}
    assert set(contents(folder)) == {"ca.pem", "ca.key"} | host_files
    assert mode(folder) == mode(folder / "10.77.0.11") == 0o700
    assert mode(folder / "ca.key") == mode(folder / "10.77.0.11/node.key") == 0o600


@needs_openssl
@pytest.mark.parametrize(("name", "address"), HOSTS)
def test_openssl_takes_them(folder, name, address):
    ensure_certs(folder, HOSTS)
    chain = folder / address / "node.pem"
    for purpose in ("sslserver", "sslclient"):
        answer = openssl(
            "verify",
            "-x509_strict",
            "-CAfile",
            folder / address / "ca.pem",
            "-purpose",
            purpose,
            "-verify_ip",
            address,
            "-verify_hostname",
            name,
            chain,
        )
        assert answer.strip() == f"{chain}: OK"
    assert "error 64" in openssl("verify", "-CAfile", folder / "ca.pem", "-verify_ip", "10.77.0.99", chain)
    of_key, of_certificate = (
        openssl("pkey", "-pubout", "-in", folder / address / "node.key"),
        openssl("x509", "-pubkey", "-noout", "-in", chain),
    )
    assert of_key == of_certificate
    assert "PUBLIC KEY" in of_key


@needs_openssl
def test_what_openssl_reads_in_them(folder):
    ensure_certs(folder, HOSTS, days=40)
    ca = openssl("x509", "-text", "-noout", "-in", folder / "ca.pem")
    assert re.search(r"Basic Constraints: critical\s+CA:TRUE, pathlen:0\n", ca)
    assert re.search(r"Key Usage: critical\s+Certificate Sign\n", ca)
    node = openssl("x509", "-text", "-noout", "-in", folder / "10.77.0.11/node.pem")
    assert re.search(r"Basic Constraints: critical\s+CA:FALSE\n", node)
    assert re.search(
        r"Alternative Name:\s+IP Address:10\.77\.0\.11, DNS:main, DNS:main[a-z0-9.-]+, DNS:main[a-z0-9.-]+\n", node
    )
    assert re.search(r"Extended Key Usage:\s+TLS Web Server Authentication, TLS Web Client Authentication\n", node)
    assert "ASN1 OID: prime256v1" in node
    assert "ASN1 OID: prime256v1" in ca
    day = 24 * 3600
    assert "will not expire" in openssl("x509", "-checkend", 39 * day, "-noout", "-in", folder / "10.77.0.11/node.pem")
    assert "will expire" in openssl("x509", "-checkend", 41 * day, "-noout", "-in", folder / "10.77.0.11/node.pem")


@needs_openssl
def test_a_host_cannot_sign_others(folder, tmp_path):
    """What a stolen host key could be used for."""
    ensure_certs(folder, HOSTS)
    host = folder / "10.77.0.13"
    openssl(
        "req",
        "-new",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=evil",
        "-keyout",
        tmp_path / "k",
        "-out",
        tmp_path / "r",
    )
    openssl(
        "x509",
        "-req",
        "-in",
        tmp_path / "r",
        "-CA",
        host / "node.pem",
        "-CAkey",
        host / "node.key",
        "-out",
        tmp_path / "evil.pem",
    )
    assert "CERTIFICATE" in (tmp_path / "evil.pem").read_text()
    answer = openssl("verify", "-CAfile", folder / "ca.pem", "-untrusted", host / "node.pem", tmp_path / "evil.pem")
    assert "invalid CA certificate" in answer


def test_a_node_reads_its_folder(folder):
    ensure_certs(folder, [("n", "127.0.0.1"), ("six", "::1")], days=50)
    identity = Identity.read(folder / "127.0.0.1")
    left = identity.expires - datetime.datetime.now(datetime.UTC).timestamp()
    assert 49 < left / 86400 <= 50
    Identity.read(folder / "::1")


def test_never_longer_than_the_ca(folder):
    ensure_certs(folder, HOSTS, days=825, ca_days=60)
    left = Identity.read(folder / "10.77.0.11").expires - datetime.datetime.now(datetime.UTC).timestamp()
    assert left / 86400 <= 60


# --- what is there already -------------------------------------------------------------------------------------------


def test_twice_does_nothing(folder):
    ensure_certs(folder, HOSTS)
    before = contents(folder)
    assert ensure_certs(folder, HOSTS) == []
    assert contents(folder) == before


def test_a_host_more(folder):
    ensure_certs(folder, HOSTS)
    before = contents(folder)
    (line,) = ensure_certs(folder, [*HOSTS, ("worker-1", "10.77.0.14")])
    assert line.startswith("worker-1 (10.77.0.14): a certificate until 20")
    assert contents(folder).items() > before.items()


def test_renewed_when_asked(folder):
    ensure_certs(folder, HOSTS)
    before = contents(folder)
    assert len(ensure_certs(folder, HOSTS[:1], renew=True)) == 1
    after = contents(folder)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"10.77.0.11/node.pem", "10.77.0.11/node.key"}


@pytest.mark.parametrize(("days_later", "renewed"), [(69, False), (71, True), (101, True)])
def test_renewed_before_it_ends(folder, monkeypatch, days_later, renewed):
    ensure_certs(folder, HOSTS[:1], days=100)
    in_days(monkeypatch, days_later)
    done = ensure_certs(folder, HOSTS[:1], days=100)
    assert bool(done) == renewed
    assert not done or "ended on" in done[0]


def test_made_anew_where_it_does_not_fit(folder):
    def why() -> str:
        done = ensure_certs(folder, HOSTS)
        assert ensure_certs(folder, HOSTS) == []
        return "".join(done)

    why()
    one, other = folder / "10.77.0.11", folder / "10.77.0.13"
    shutil.copy(other / "node.key", one / "node.key")
    assert "was not for the key beside it" in why()
    for name in ("node.pem", "node.key"):
        shutil.copy(other / name, one / name)
    assert "was for another address" in why()
    (one / "node.pem").write_bytes(b"garbage")
    assert "could not be read" in why()
    (one / "node.key").chmod(0o644)
    assert "could not be read" in why()
    (one / "node.key").unlink()
    assert "there was none" in why()
    (one / "ca.pem").write_bytes(b"garbage")
    assert "was another's, or damaged" in why()
    shutil.rmtree(folder / "10.77.0.13")
    assert "there was none" in why()
    assert "another name" in "".join(ensure_certs(folder, [("head", "10.77.0.11")]))


def test_roles(folder, monkeypatch):
    """Of names and of `--host`; a certificate of other roles, or without any as before there were any, is replaced."""
    monkeypatch.setattr(certs, "_dns_names", lambda name, address, roles: [name])
    ensure_certs(folder, HOSTS)
    assert Identity.read(folder / HOSTS[0][1]).roles == set()
    monkeypatch.undo()
    done = ensure_certs(folder, HOSTS)
    assert sum("was for no role, as those made by older versions" in line for line in done) == len(HOSTS)
    for name, address in HOSTS:
        assert Identity.read(folder / address).roles == {name.partition("-")[0]}
    hosts = ["main=10.77.0.11=main+worker", "box=10.77.0.30=worker", "laptop=10.77.0.31", "worker-9=10.77.0.32"]
    run_certs(None, hosts, folder, 825, False, Terminal(quiet=True))
    roles = [Identity.read(folder / f"10.77.0.{last}").roles for last in (11, 30, 31, 32)]
    assert roles == [{"main", "worker"}, {"worker"}, set(), {"worker"}]
    assert "for no role" in "".join(ensure_certs(folder, HOSTS[:1])), "the cluster file's role is less"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a=10.0.0.1=boss"], "NAME=ADDRESS=ROLE.*with the role main, shadow, worker"),
        (["a=10.0.0.1="], "NAME=ADDRESS=ROLE"),
        (["main=10.0.0.1", "worker-0=10.0.0.1"], "given 2 times.*NAME=10.0.0.1=main.worker"),
        (["main.1.od-moe.internal=10.0.0.1"], "names under od-moe.internal"),
    ],
)
def test_roles_that_cannot_be(folder, hosts, message):
    with pytest.raises(ConfigError, match=message):
        run_certs(None, hosts, folder, 825, False, Terminal())
    assert not folder.exists()


def test_another_ca(folder, tmp_path):
    ensure_certs(folder, HOSTS)
    ensure_certs(tmp_path / "other", HOSTS)
    shutil.copytree(tmp_path / "other" / "10.77.0.11", folder / "10.77.0.11", dirs_exist_ok=True)
    assert "signed by another CA" in "".join(ensure_certs(folder, HOSTS))
    Identity.read(folder / "10.77.0.11")


def test_a_ca_is_never_replaced(folder, monkeypatch):
    ensure_certs(folder, HOSTS)
    before = contents(folder)
    (folder / "ca.key").rename(folder / "elsewhere")
    with pytest.raises(CertificateError, match=r"ca\.pem is there, but not its key"):
        ensure_certs(folder, HOSTS)
    (folder / "elsewhere").rename(folder / "ca.key")
    (folder / "ca.key").chmod(0o640)
    with pytest.raises(CertificateError, match="chmod 600"):
        ensure_certs(folder, HOSTS)
    shutil.copy(folder / "10.77.0.11/node.key", folder / "ca.key")
    (folder / "ca.key").chmod(0o600)
    with pytest.raises(CertificateError, match="is not the key of"):
        ensure_certs(folder, HOSTS)
    (folder / "ca.key").write_bytes(before["ca.key"])
    in_days(monkeypatch, 3640)
    with pytest.raises(CertificateError, match=r"the CA in .* ends on"):
        ensure_certs(folder, HOSTS)
    assert contents(folder) == before


@pytest.mark.parametrize("at", range(1, 9))
def test_stopped_anywhere_and_run_again(folder, monkeypatch, at):
    """Whatever was there when it was stopped is whole, and the next run makes the rest."""
    replaced, replace = [], os.replace

    def stop(partial, file):
        replaced.append(file)
        if len(replaced) == at:
            raise KeyboardInterrupt
        replace(partial, file)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        ensure_certs(folder, HOSTS)
    monkeypatch.undo()
    assert not [path for path in folder.rglob(".*")]
    ca = (folder / "ca.key").read_bytes() if (folder / "ca.key").exists() else None
    ensure_certs(folder, HOSTS)
    assert ca in (None, (folder / "ca.key").read_bytes())
    for _, address in HOSTS:
        Identity.read(folder / address)


def test_one_at_a_time(folder, monkeypatch):
    refused, replace = [], os.replace

    def meanwhile(partial, file):
        with pytest.raises(ConfigError, match="another `odmoe certs` works in"):
            ensure_certs(folder, HOSTS)
        refused.append(file)
        replace(partial, file)

    monkeypatch.setattr(os, "replace", meanwhile)
    assert len(ensure_certs(folder, HOSTS)) == 1 + len(HOSTS)
    assert len(refused) == 8


def test_a_folder_of_others_keeps_its_mode(tmp_path):
    (tmp_path / "a file").touch()
    tmp_path.chmod(0o755)
    ensure_certs(tmp_path, HOSTS)
    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "ca.key") == 0o600


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold certificates"):
        ensure_certs(tmp_path / "file", HOSTS)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (("main", "10.77.0"), "address '10.77.0' is invalid"),
        (("main", "../../etc"), "is invalid"),
        (("a b", "10.77.0.11"), "host name 'a b' is invalid"),
        (("", "10.77.0.11"), "host name '' is invalid"),
        (("x" * 65, "10.77.0.11"), "is invalid"),
    ],
)
def test_hosts_that_cannot_be(folder, host, message):
    with pytest.raises(ConfigError, match=message):
        ensure_certs(folder, [HOSTS[0], host])
    assert not folder.exists()


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_days_that_cannot_be(folder, days):
    with pytest.raises(ConfigError, match=rf"--days is {days}; allowed: 1 to 3650"):
        ensure_certs(folder, HOSTS, days)


# --- the secret, and the command -------------------------------------------------------------------------------------


def test_secret(folder):
    file = write_cluster_secret(folder)
    assert file == folder / "secret"
    assert mode(file) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    before = file.read_bytes()
    assert write_cluster_secret(folder).read_bytes() == before
    assert write_cluster_secret(folder.with_name("other")).read_bytes() != before
    give_secret(folder, ["10.77.0.11"])
    assert (folder / "10.77.0.11/secret").read_bytes() == before
    assert mode(folder / "10.77.0.11/secret") == 0o600


def test_command(folder, tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    for told in ("a CA until", "nothing to do"):
        assert run_certs(file, ["laptop=192.168.1.9"], folder, 825, False, Terminal()) == folder
        assert told in capsys.readouterr().err
    for address in ("10.77.0.11", "10.77.0.12", "10.77.0.13", "10.77.0.14", "192.168.1.9"):
        Identity.read(folder / address)
        assert (folder / address / "secret").read_bytes() == (folder / "secret").read_bytes()
    secret = (folder / "secret").read_text().strip()
    run_certs(file, [], folder, 825, True, Terminal())
    err = capsys.readouterr().err
    assert err.count("renewed (--renew)") == 4
    assert secret not in err


@pytest.mark.parametrize(
    ("hosts", "message"),
    [([], "no hosts are given"), (["10.77.0.11"], "--host is '10.77.0.11'; allowed: NAME=ADDRESS")],
)
def test_command_without_hosts(folder, hosts, message):
    with pytest.raises(ConfigError, match=message):
        run_certs(None, hosts, folder, 825, False, Terminal())
    assert not folder.exists()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_folder("ten") == tmp_path / "odmoe/clusters/ten"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder("ten") == tmp_path / ".config/odmoe/clusters/ten"
    for name in ("../ten", "", ".", "a/b"):
        with pytest.raises(ConfigError, match="cannot name a directory"):
            default_folder(name)
