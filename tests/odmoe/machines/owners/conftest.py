"""Three hosts in this machine's file system, and two clusters that both want them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from odmoe.machines.cluster_file import ClusterFile
from support.machines.local_hosts import LocalSsh, local_cluster

ADDRESSES = ("127.0.9.1", "127.0.9.2", "127.0.9.3")
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[LocalSsh]:
    with LocalSsh(tmp_path) as made:
        yield made


@pytest.fixture
def lab(tmp_path: Path, ssh: LocalSsh) -> ClusterFile:
    return local_cluster(tmp_path / "lab", ssh, ADDRESSES, "lab")


@pytest.fixture
def office(tmp_path: Path, ssh: LocalSsh) -> ClusterFile:
    return local_cluster(tmp_path / "office", ssh, ADDRESSES, "office")


@pytest.fixture
def start(ssh: LocalSsh, tmp_path: Path) -> Iterator[Start]:
    """`start(address, "raylet", "--port=1", marked=True)`: a program of that name that sleeps on a host."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(address: str, name: str, *words: str, marked: bool = True, **how: Any) -> subprocess.Popen[bytes]:
        home = ssh.home(address)
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        if not program.exists():  # the kernel names a process after its script
            program.write_text(f"#!{shutil.which('python3', path='/usr/bin')} -S\nimport time; time.sleep(600)\n")
            program.chmod(0o755)
        mark = {"RAY_AUTH_TOKEN_PATH": f"{home}/odmoe/keys/ray_token"} if marked else {}
        running.append(
            subprocess.Popen([program, *words], env={"PATH": os.environ["PATH"]} | mark, start_new_session=True, **how)
        )
        return running[-1]

    yield begin
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
