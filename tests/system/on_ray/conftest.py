"""A Ray that runs already, as a person starts one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.machines.processes import MARK, marked, wait_until_gone
from support.paths import ROOT

HOST = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of this machine on its network
RESOURCES = {"main_node": 1, "worker_node": 2}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        MARK: uuid.uuid4().hex,
    }


@pytest.fixture(scope="module")
def head(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray on loopback, as a person starts one."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"),
                "start",
                "--head",
                "--block",
                f"--node-ip-address={HOST}",
                f"--port={port}",
                "--include-dashboard=false",
                "--num-cpus=3",
                f"--resources={json.dumps(RESOURCES)}",
                "--object-store-memory=80000000",
                "--disable-usage-stats",
            ],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    yield f"{HOST}:{port}"
    process.kill()  # asked to end, it would first wait for actors to leave
    process.wait(60)
    for line in marked(environment[MARK]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    wait_until_gone(environment[MARK])
