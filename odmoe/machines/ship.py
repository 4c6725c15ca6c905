"""Copies the code (one archive), each host's keys and the expert store to the hosts."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.held import HELD
from odmoe.bundled import BUNDLED
from odmoe.machines.ssh import size_of
from scheduler.errors import ConfigError, HostError, StoreWriteError

if TYPE_CHECKING:
    from odmoe.machines.cluster_file import Host
    from odmoe.machines.ssh import Ssh

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
FILES = ("pyproject.toml", "requirements.lock", "Makefile", "LICENSE")
"""What a host's environment is made from. Its lock file is requirements.runtime.lock here: it tests nothing."""
RUNTIME_LOCK = "requirements.runtime.lock"
ENVIRONMENT = "deploy/env.sh"
SHIPPED = "SHIPPED"
KEYS = "~/odmoe/keys"
STORES = "~/odmoe/stores"
NODE_KEYS = ("ca.pem", "node.pem", "node.key")
CLUSTER_KEYS = ("secret", "ray_token")
LEFTOVERS = (".pyc", ".pyo", "~", ".swp", ".orig")
TRACE = ".npz"
"""Routing traces: no host simulates."""
COPIES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    data: bytes
    mtime: int
    executable: bool


def code_archive(path: Path) -> str:
    """Write the project's code to `path` as tar.gz, unless it is there. Returns its digest, which is also in the
    archive's file SHIPPED. The same sources make the same bytes. Raises ConfigError, StoreWriteError."""
    files = _files()
    digest = _digest(files)
    newest = max(file.mtime for file in files)
    data = _pack([*files, _File(SHIPPED, f"{digest}\n".encode(), newest, False)])
    try:
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _replace(path, data)
    except OSError as error:
        raise StoreWriteError(f"{path} cannot be written ({error.strerror}); see XDG_CONFIG_HOME") from error
    return digest


def code_digest() -> str:
    """The content of SHIPPED on a host that has this code. Raises ConfigError."""
    return _digest(_files())


def digest_in(archive: Path) -> str:
    """The digest of the code in an archive that `code_archive` wrote. Raises ConfigError."""
    try:
        with tarfile.open(archive) as files, files.extractfile(SHIPPED) or io.BytesIO() as digest_file:
            return digest_file.read().decode().strip()
    except (OSError, KeyError, tarfile.TarError) as error:
        raise ConfigError(f"{archive} is no archive of the code ({error}); ray up writes it") from error


def push_keys(ssh: Ssh, host: Host, folder: Path) -> None:
    """Copy a host's certificate and key, the cluster's secret and Ray's token, nothing else of `folder`. They replace
    the former ones when all have come. Raises HostError, or ConfigError if one of them is missing."""
    sources = [folder / host.address / name for name in NODE_KEYS] + [folder / name for name in CLUSTER_KEYS]
    missing = [source for source in sources if not source.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]} is not there, to be copied to {host.name}; make it with odmoe certs")
    ssh.run(host, f"umask 077 && mkdir -p {KEYS} && chmod 700 {KEYS}", 20)
    ssh.push(host, sources, KEYS, modes="D700,F600", together=True)


def push_store(
    ssh: Ssh,
    hosts: Iterable[Host],
    store: Path,
    facts: dict[str, dict[str, Any]],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, HostError]:
    """Copy the store to every host without it. Returns the failures by address. An interrupted copy is no store, and
    the next run continues it. `facts` are by address; `progress(host, done, total)` is in bytes, of each host."""
    wanted = manifest_digest(store)
    behind = [host for host in hosts if not has_store(facts[host.address], store.name, wanted)]
    size = size_of([store])
    done = {host.address: 0 for host in behind}
    changing = threading.Lock()
    if progress:
        for host in behind:
            progress(host.name, 0, size)

    def copy(host: Host) -> None:
        def step(so_far: int, _: int) -> None:
            with changing:
                done[host.address] = max(done[host.address], so_far)
                if progress:
                    progress(host.name, done[host.address], size)

        there = facts[host.address]["stores"].get(store.name) or {}
        if there.get("manifest") != wanted or there.get("held"):
            ssh.run(host, f'rm -f {STORES}/"$(cat)"/manifest.json', 20, store.name.encode())
        ssh.push(host, [f"{store}/"], f"{STORES}/{store.name}", delete=True, last="manifest.json", progress=step)

    found = ssh.each(behind, copy, COPIES_AT_ONCE)
    return {address: error for address, error in found.items() if isinstance(error, HostError)}


def has_store(facts: dict[str, Any], name: str, manifest: str) -> bool:
    """Whether a host has the whole store, by file sizes. The node that opens it checks the bytes."""
    there = facts["stores"].get(name) or {}
    return there.get("manifest") == manifest and there.get("fault") is None and not there.get("held")


def manifest_digest(store: Path) -> str:
    """A digest of a store's manifest and those of its forms, as in `odmoe.machines.probe`. A new form changes it."""
    files = sorted(file for file in store.glob("*.json") if file.name != HELD)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def certificate_digest(keys: Path) -> str | None:
    """A digest of a host's certificate and the CA's, as in `odmoe.machines.probe`; None if one is missing."""
    with contextlib.suppress(OSError):
        return hashlib.sha256((keys / "node.pem").read_bytes() + (keys / "ca.pem").read_bytes()).hexdigest()
    return None


def lock_time() -> float:
    """Modification time of the lock file in seconds, which the archive preserves. Raises ConfigError."""
    return float(next(file.mtime for file in _files() if file.name == "requirements.lock"))


def _files() -> list[_File]:
    """The files of the code, sorted by name. Raises ConfigError if this is no whole checkout."""
    found = [(file, str(file.relative_to(ROOT))) for package in PACKAGES for file in _code_files(ROOT / package)]
    found += [(_shipped_file(RUNTIME_LOCK if name == "requirements.lock" else name, name), name) for name in FILES]
    found.append((environment_file(), Path(ENVIRONMENT).name))
    files = []
    for path, name in sorted(found, key=lambda pair: pair[1]):
        try:
            data, stat = path.read_bytes(), path.stat()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}), and the hosts need it; run odmoe from a checkout of the "
                "project: .venv/bin/odmoe there"
            ) from error
        files.append(_File(name, data, int(stat.st_mtime), bool(stat.st_mode & 0o100)))
    return files


def environment_file() -> Path:
    """What every process of a host starts with."""
    return _shipped_file(ENVIRONMENT, Path(ENVIRONMENT).name)


def _shipped_file(*names: str) -> Path:
    """The first of these that there is beside the packages: a host of a cluster may launch another, and has what was
    shipped to it."""
    places = [(BUNDLED if BUNDLED.is_dir() else ROOT) / name for name in names]
    return next((place for place in places if place.is_file()), places[0])


def _code_files(package: Path) -> list[Path]:
    """Without what a wheel has beside the code."""
    files = [file for file in package.rglob("*") if file.is_file() and not file.name.endswith(LEFTOVERS)]
    files = [file for file in files if not file.is_relative_to(BUNDLED) and file.suffix != TRACE]
    hidden = [
        file for file in files if any(p.startswith((".", "__pycache__")) for p in file.relative_to(package).parts)
    ]
    if not files:
        raise ConfigError(f"{package} is not there, and the hosts need it; run odmoe from a checkout of the project")
    return [file for file in files if file not in hidden]


def _digest(files: list[_File]) -> str:
    """A digest of names, modes and contents, without times."""
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.data).hexdigest()
        digest.update(f"{file.name}\0{file.executable}\0{content}\n".encode())
    return digest.hexdigest()


def _pack(files: list[_File]) -> bytes:
    """The archive. It keeps times, because make compares an environment's with the lock file's."""
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", 6, packed, mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for file in files:
            info = tarfile.TarInfo(file.name)
            info.size, info.mtime, info.mode = len(file.data), file.mtime, 0o755 if file.executable else 0o644
            archive.addfile(info, io.BytesIO(file.data))
    return packed.getvalue()


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
