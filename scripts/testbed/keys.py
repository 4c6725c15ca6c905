"""The testbed's ssh keys: the cluster file's own, the hosts', and what the launcher knows the hosts by.

What is made outside of the testbed's directory is written down there first: `down` removes that and no more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from odmoe.machines.cluster_file import Host
from scripts.testbed.layout import Layout, TestbedError, call, tool, wait_until

LOGIN_S = 60.0


def key_of(layout: Layout) -> Path:
    if layout.cluster.key is None:
        raise TestbedError(
            f"{layout.cluster.path}: auth has no ssh_private_key; name one, such as ~/.ssh/odmoe: where the file is "
            "not there, the testbed makes it"
        )
    return layout.cluster.key


def make_keys(layout: Layout) -> tuple[str, bool]:
    """The cluster file's public key, and whether the key was made for it; the hosts' key, if there is none.

    Raises TestbedError.
    """
    key = key_of(layout)
    layout.state.mkdir(parents=True, exist_ok=True)
    layout.state.chmod(0o700)
    fresh = not key.exists()
    if fresh:
        _make_folders(layout, key.parent)
        _write_down(layout, key, key.with_name(key.name + ".pub"))
        _generate(key, f"odmoe-testbed:{layout.cluster.name}")
    if not (layout.state / "host_key").exists():
        _generate(layout.state / "host_key", f"odmoe-testbed:{layout.cluster.name}")
    return call([tool("ssh-keygen"), "-y", "-P", "", "-f", str(key)]), fresh


def _generate(path: Path, comment: str) -> None:
    call([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def _ours(layout: Layout) -> list[str]:
    path = layout.state / "made-outside.json"
    return json.loads(path.read_text()) if path.exists() else []


def _write_down(layout: Layout, *paths: Path) -> None:
    """Before they are made, and whole or not at all."""
    known = _ours(layout)
    path = layout.state / "made-outside.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(known + [str(one) for one in paths if str(one) not in known]))
    draft.replace(path)


def _make_folders(layout: Layout, folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        _write_down(layout, path)
        path.mkdir(mode=0o700, exist_ok=True)


def known_hosts(layout: Layout) -> Path:
    """The file that the launcher reads: $XDG_CONFIG_HOME/odmoe/clusters/NAME/known_hosts."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "odmoe" / "clusters" / layout.cluster.name / "known_hosts"


def write_known_hosts(layout: Layout) -> None:
    """Adds the hosts' lines; others' lines stay."""
    path = known_hosts(layout)
    _make_folders(layout, path.parent)
    _write_down(layout, path)
    kind, key = (layout.state / "host_key.pub").read_text().split()[:2]
    lines = [f"{host.address} {kind} {key} {_mark(layout)}" for host in layout.cluster.hosts]
    path.write_text("".join(f"{line}\n" for line in [*_others(layout, path), *lines]))
    path.chmod(0o600)


def _mark(layout: Layout) -> str:
    return f"odmoe-testbed:{layout.cluster.name}"


def _others(layout: Layout, path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.split()[-1:] != [_mark(layout)]]


def remove_keys(layout: Layout) -> list[str]:
    """What was made outside of the testbed's directory: files, then directories that are empty again. Returns them."""
    removed = []
    for name in reversed(_ours(layout)):
        path = Path(name)
        if path.name == "known_hosts":
            others = _others(layout, path)
            if others:
                path.write_text("".join(f"{line}\n" for line in others))
                continue
        if path.is_dir():
            if any(path.iterdir()):
                continue
            path.rmdir()
        elif path.exists():
            path.unlink()
        else:
            continue
        removed.append(name)
    return removed


def ssh_command(layout: Layout, host: Host, *command: str) -> list[str]:
    return [
        tool("ssh"),
        "-F",
        "none",
        "-i",
        str(key_of(layout)),
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "BatchMode=yes",
        "-o",
        f"UserKnownHostsFile={known_hosts(layout)}",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "ConnectTimeout=5",
        f"{layout.cluster.user}@{host.address}",
        *command,
    ]


def log_in(layout: Layout, host: Host) -> None:
    """Waits until the host lets us in by ssh and has its own name. Raises TestbedError with what ssh said last."""
    last = ["ssh was not tried"]

    def answers() -> bool:
        try:
            name = call(ssh_command(layout, host, "cat", "/proc/sys/kernel/hostname"), limit_s=10).strip()
        except TestbedError as error:
            last[0] = str(error)
            return False
        last[0] = f"it calls itself {name!r}"
        return name == host.name

    if not wait_until(answers, LOGIN_S, pause_s=0.1):
        raise TestbedError(
            f"{host.name} ({host.address}) does not answer ssh within {LOGIN_S:.0f} s: {last[0]}; its sshd writes to "
            f"{layout.log(host.name)}"
        )
