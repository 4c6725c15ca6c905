"""`odmoe generate --cluster FILE`: runs on the cluster's main host over ssh, with its output passed on."""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from odmoe.api.checks import check_early
from odmoe.machines.cluster_file import ClusterFile, read_cluster_file
from odmoe.machines.head import AT_HEAD, Head
from odmoe.machines.home import cluster_dir
from odmoe.machines.ssh import Ssh
from odmoe.machines.ssh_process import Remote
from odmoe.machines.up import up
from odmoe.settings.derived import HERE_ONLY, OUTPUT_FILES
from odmoe.settings.settings import Settings
from odmoe.stores import store_of
from odmoe.terminal import Output, Terminal
from scheduler.errors import HostError, LaunchError, ODMoEError
from scheduler.files import write_whole

GRACE_S, CUT_S = 5.0, 7.0
"""For a request that is given up to end, and for the connection after that."""
FETCH_S = 120.0
"""Longest time to copy a trace or a record."""
STATUS_S = 30.0
"""Longest wait for the main host to report which model it serves."""


def ask(settings: Settings, prompts: list[str], output: Output, listed: bool = False) -> int:
    """Have the cluster's main host answer. Returns its exit code.

    `listed`: as for `run_generate`. Raises HostError, ConfigError.
    """
    file = Path(settings.cluster)
    cluster = read_cluster_file(file)
    check_early(settings)
    bring_up(settings, cluster, output)
    dumped = settings.model_dump(mode="json", exclude_unset=True)
    given = {name: value for name, value in dumped.items() if name not in HERE_ONLY}
    kept = {name: f"~/odmoe/{name}-{secrets.token_hex(8)}" for name in OUTPUT_FILES if name in given}
    given |= kept
    request = {
        "do": "generate",
        "settings": given,
        "prompts": prompts,
        "listed": listed,
        "output": asdict(output),
        "cluster_name": file.name,
    }
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        code, failure = _relay_request(ssh, cluster, request)
        with ExitStack() as both:  # each is fetched even if the other fails
            for name, there in kept.items():
                both.callback(_fetch, ssh, cluster, there, Path(dumped[name]), code)
    if failure is not None:
        raise failure
    return code


def ask_head(settings: Settings, request: dict[str, Any], output: Output, grace_s: float = GRACE_S) -> int:
    """Have the cluster's main host carry out another request, with these settings. Returns its exit code.

    `grace_s`: for its last words after Ctrl-C. Raises HostError, ConfigError."""
    cluster = read_cluster_file(Path(settings.cluster))
    bring_up(settings, cluster, output)
    dumped = settings.model_dump(mode="json", exclude_unset=True)
    given = {name: value for name, value in dumped.items() if name not in HERE_ONLY}
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        code, failure = _relay_request(ssh, cluster, {**request, "settings": given}, grace_s)
    if failure is not None:
        raise failure
    return code


def _relay_request(
    ssh: Ssh, cluster: ClusterFile, request: dict[str, Any], grace_s: float = GRACE_S
) -> tuple[int, HostError | None]:
    """Send a request to the main host and pass on what it prints. Returns the exit code, and why there is none."""
    remote = ssh.start(cluster.main, AT_HEAD, grace_s)
    try:
        remote.send(json.dumps(request) + "\n")
        code, stderr = relay(remote)
    finally:
        remote.close(grace_s + CUT_S)
    return code, remote.failure(code, stderr) if code == 255 else None


def bring_up(settings: Settings, cluster: ClusterFile, output: Output) -> None:
    """Start the cluster of the settings' file, unless it serves their model, or they name none.

    Raises LaunchError if it serves another model, HostError, ConfigError.
    """
    if settings.model and not _is_served(settings, cluster):
        up(Path(settings.cluster), settings, Terminal(output.quiet, output.debug), settings.launch_s)


def _fetch(ssh: Ssh, cluster: ClusterFile, there: str, to: Path, code: int) -> None:
    """Move a file of the main host to this machine. Raises HostError if it is missing, unless the answer failed
    (`code`): that error has been shown."""
    try:
        write_whole(to, base64.b64decode(ssh.run(cluster.main, f"base64 {there} && rm -f {there}", FETCH_S)))
    except HostError:
        if code == 0:
            raise


def _is_served(settings: Settings, cluster: ClusterFile) -> bool:
    """Whether the cluster serves this model, even if a node is missing at the moment.

    Raises LaunchError if it serves another model.
    """
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        try:
            seen = Head(ssh, cluster).status(STATUS_S)
        except ODMoEError:
            return False
    if seen.get("fingerprint") is None:
        return False
    if seen["fingerprint"] != store_of(settings).manifest.model_digest:
        raise LaunchError(
            f"the cluster serves another model than {settings.model}; odmoe up {settings.cluster} -m {settings.model} "
            "changes that; or leave out --model to use the model that it serves"
        )
    return True


def relay(remote: Remote) -> tuple[int, str]:
    """Pass on both streams until they end. Returns the exit code and the last 4,000 bytes of standard error.

    Raises OSError if the output cannot be written here: the main host would wait for room in the pipe for ever.
    """
    broken: list[OSError] = []
    stderr = bytearray()
    threads = [
        threading.Thread(target=pass_on, args=(stream, out, broken, kept), daemon=True)
        for stream, out, kept in ((remote.stdout, sys.stdout, None), (remote.stderr, sys.stderr, stderr))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not broken:  # a join without a limit would hold up Ctrl-C
            thread.join(0.2)
    if broken:
        raise broken[0]
    return remote.process.wait(10), stderr[-4000:].decode(errors="replace")


def pass_on(stream: IO[bytes], out: Any, broken: list[OSError], kept: bytearray | None) -> None:
    """Bytes as they come: an answer is shown a token at a time."""
    try:
        while data := os.read(stream.fileno(), 1 << 16):
            if kept is not None:
                kept += data
            out.buffer.write(data)
            out.buffer.flush()
    except OSError as error:
        broken.append(error)
