"""A testbed's hosts: each a network, mount, PID, UTS and IPC namespace whose first process is an sshd.

A host is a shell script that the launcher writes (`Layout.script`), run by `unshare`: it waits until its link is laid,
mounts what the host has of its own over what it would share, and becomes sshd. No namespace has a name or a mount that
keeps it: killing the first process ends all of its processes, mounts and its link. A host's processes are found by what
is mounted in them, so nothing has to be remembered between calls and no process number can be taken for another.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from odmoe.machines.cluster_file import Host
from scripts.lib.paths import ROOT
from scripts.testbed.layout import BASE, NAMESPACES, Layout, TestbedError, call, tool, wait_until

PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin"
VENV = "odmoe/venv"
"""Below a host's home: the project's environment, as a machine has it if `make env` was run."""

UNSHARE_S = 10.0
END_S = 15.0
FILES = 65536
"""Open files a process may have, if the launching machine allows it: Ray opens many."""

SSHD = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
UseDNS no
MaxSessions 100
MaxStartups 100:30:200
Subsystem sftp internal-sftp
SetEnv PATH={path}
"""


@dataclass(slots=True)
class Running:
    """What of a host runs, in the launching machine's process numbers: its first process, those that the host itself
    sees, and all that are in one of its namespaces."""

    first: int | None = None
    inside: list[int] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)


def homes(user: str) -> list[Path]:
    """The user's home on the hosts, then the launcher's own if that is another. Raises TestbedError."""
    try:
        own = Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise TestbedError(
            f"the cluster file's ssh_user is {user!r}, whom this machine does not know; the testbed's hosts have the "
            "users of this machine: name one of them, such as root"
        ) from None
    return list(dict.fromkeys(path.resolve() for path in (own, Path.home())))


def needed() -> list[Path]:
    """What Python and the project need to be seen where they are: interpreter, checkout, environment."""
    paths = [Path(sys.base_prefix), Path(sys.base_prefix).resolve(), ROOT, Path(sys.prefix)]
    outer: list[Path] = []
    for path in sorted(set(paths), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in outer):
            outer.append(path)
    return outer


def masks(user: str) -> dict[Path, str]:
    """Directories that a host has for itself, and the names of their places below its own directory."""
    names = ["home", *(f"home-of-launcher-{n}" for n, _ in enumerate(homes(user)[1:]))]
    private = dict(zip(homes(user), names, strict=True))
    for path in ("/tmp", "/var/tmp", "/run", "/dev/shm", "/etc/ssh"):
        private.setdefault(Path(path).resolve(), path.strip("/").replace("/", "-"))
    return private


def init_script(layout: Layout, host: Host, shm: str) -> str:
    """Shell: everything from the new namespaces to sshd. Paths are relative to the host's own directory.

    That stays reachable as the working directory once /var/tmp is covered; hence mount's --no-canonicalize.
    """
    private = masks(layout.cluster.user)
    tmpfs = {"run": "size=64m,mode=755", "dev-shm": f"size={shm},mode=1777"}
    lines = [
        "set -eu",
        "read -r go",  # the launcher's word that the link is there; if it dies first, so does this
        f"(ulimit -n {FILES}) 2>/dev/null && ulimit -n {FILES}",
        f"echo {host.name} > /proc/sys/kernel/hostname",
        f"cd {shlex.quote(str(layout.private(host.name)))}",
    ]
    lines += [f"{MOUNT} -t tmpfs -o {options} tmpfs {name}" for name, options in tmpfs.items()]
    lines += ["mkdir -p run/sshd run/lock"]
    for path in needed():
        over = [mask for mask in private if path != mask and path.is_relative_to(mask)]
        if over:
            mask = max(over, key=lambda mask: len(mask.parts))
            lines += read_only(str(path), f"{private[mask]}/{path.relative_to(mask)}")
    lines += read_only(sys.prefix, f"home/{VENV}")
    lines += [f"[ ! -f /etc/{name} ] || {MOUNT} --bind etc/{name} /etc/{name}" for name in ETC]
    for mask, name in sorted(private.items(), key=lambda item: len(item[0].parts)):
        target = shlex.quote(str(mask))
        lines += [f"mkdir -p {target}", f"{MOUNT} --rbind {name} {target}"]
    lines += ["cd /", f"exec env -i PATH={shlex.quote(PATH)} {tool('sshd')} -D -e -f /etc/ssh/sshd_config </dev/null"]
    return "\n".join(lines) + "\n"


MOUNT = "mount --no-canonicalize"
ETC = ("hosts", "hostname", "passwd", "shadow", "resolv.conf")


def read_only(source: str, target: str) -> list[str]:
    source, target = shlex.quote(source), shlex.quote(target)
    return [
        f"mkdir -p {target}",
        f"{MOUNT} --rbind {source} {target}",
        f"{MOUNT} -o remount,bind,ro {target}",
    ]


def write_private(layout: Layout, host: Host, shm: str, public: str) -> None:
    """A host's directories and files. What it had in its home stays, as a machine's disk does; /tmp starts empty."""
    user = layout.cluster.user
    root = layout.private(host.name)
    shutil.rmtree(root / "tmp", ignore_errors=True)
    for name in [*masks(user).values(), "etc"]:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var-tmp"):
        (root / name).chmod(0o1777)
    entry = pwd.getpwnam(user)
    (root / "home/odmoe").mkdir(exist_ok=True)
    for folder in (root / "home", root / "home/odmoe"):
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        folder.chmod(0o700)
    etc = root / "etc"
    names = "".join(f"{other.address} {other.name}\n" for other in layout.cluster.hosts)
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}{layout.gateway} launcher\n")
    (etc / "hostname").write_text(host.name + "\n")
    (etc / "resolv.conf").write_text("")  # refused at once, instead of asking a server that no host can reach
    users = Path("/etc/passwd").read_text()
    if not re.search(r"^sshd:", users, re.M):
        users = users.rstrip("\n") + "\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    (etc / "passwd").write_text(users)
    (etc / "shadow").write_text(f"{user}:*:20000:0:99999:7:::\n")  # `!` would mean locked, which sshd refuses
    (etc / "shadow").chmod(0o640)
    ssh = root / "etc-ssh"
    (ssh / "sshd_config").write_text(SSHD.format(user=user, path=PATH))
    authorize(layout, host, public)
    shutil.copyfile(layout.state / "host_key", ssh / "host_key")
    (ssh / "host_key").chmod(0o600)
    layout.script(host.name).write_text(init_script(layout, host, shm))


def authorize(layout: Layout, host: Host, public: str) -> bool:
    """Only the key `public` opens the host. False if that was so."""
    path = layout.private(host.name) / "etc-ssh/authorized_keys"
    if path.exists() and path.read_text() == public:
        return False
    path.write_text(public)
    return True


@dataclass(slots=True)
class Starting:
    """A host whose namespaces are there and that waits for its link."""

    host: Host
    process: subprocess.Popen[str]

    def go_on(self) -> None:
        """Its link is laid. Raises TestbedError if it ended meanwhile."""
        pipe = self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.write("go\n")
                pipe.close()
                return
        raise TestbedError(f"{self.host.name}: its first process ended with {self.process.wait(UNSHARE_S)}")


def start(layout: Layout, host: Host) -> Starting:
    """Makes the namespaces. Raises TestbedError."""
    with layout.log(host.name).open("w") as log:
        process = subprocess.Popen(
            [tool("unshare"), *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", layout.script(host.name)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            cwd="/",
            start_new_session=True,
        )
    own = os.readlink("/proc/self/ns/net")
    if not wait_until(lambda: process.poll() is not None or namespace(process.pid, "net") != own, UNSHARE_S):
        process.kill()
        raise TestbedError(f"{host.name}: no namespaces within {UNSHARE_S:.0f} s")
    if process.poll() is not None:
        raise TestbedError(f"{host.name}: its first process ended with {process.returncode}: {said(layout, host)}")
    return Starting(host, process)


def said(layout: Layout, host: Host) -> str:
    """The end of what the host's first process wrote."""
    path = layout.log(host.name)
    text = path.read_text(errors="replace") if path.exists() else ""
    return " ".join(text.split())[-400:] or "it said nothing"


def namespace(pid: int, kind: str) -> str:
    """Empty if the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def find(layout: Layout) -> dict[str, Running]:
    """The hosts of this testbed of which anything runs, by name; also those that the cluster file no longer has."""
    found: dict[str, Running] = {}
    own = namespace(os.getpid(), "mnt")
    seen: dict[str, str] = {}
    for pid in processes():
        mounts = namespace(pid, "mnt")
        if mounts in ("", own):
            continue
        name = seen.get(mounts) or _host_by_mounts(layout, pid) or _host_by_command(layout, pid)
        if not name:
            continue
        seen[mounts] = name
        running = found.setdefault(name, Running())
        running.processes.append(pid)
        numbers = _numbers_inside(pid)
        if numbers:
            running.inside.append(pid)
        if numbers == [1]:
            running.first = pid
    return found


def _host_by_mounts(layout: Layout, pid: int) -> str:
    """A host's /tmp is a directory of its own: mountinfo's field 4 says which directory a mount shows, 5 where."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return ""
    for mount in (line.split(" ") for line in text.splitlines()):
        shown = mount[3].removesuffix("//deleted").removesuffix("/tmp")
        if mount[4] == "/tmp" and f"/{BASE.name}/{layout.cluster.name}/" in shown:
            return shown.rpartition("/")[2]
    return ""


def _host_by_command(layout: Layout, pid: int) -> str:
    """Before anything is mounted: `unshare ... sh STATE/HOST.init`, and the shell that it starts."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    script = Path(words[-1])
    begun = Path(words[0]).name in ("unshare", "sh") and script.suffix == ".init" and script.parent == layout.state
    return script.stem if begun else ""


def _numbers_inside(pid: int) -> list[int]:
    """The process's numbers in the PID namespaces below this one."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    line = next((line for line in text.splitlines() if line.startswith("NSpid:")), "NSpid:")
    return [int(number) for number in line.split()[2:]]


def enter(pid: int, user: str, command: list[str]) -> list[str]:
    """The command line that runs a command in the host of process `pid`, as a login of the user there would."""
    entry = pwd.getpwnam(user)
    passed = {name: os.environ[name] for name in ("TERM", "LANG", "LC_ALL", "NO_COLOR") if name in os.environ}
    variables = passed | {
        "HOME": entry.pw_dir,
        "USER": user,
        "LOGNAME": user,
        "SHELL": entry.pw_shell or "/bin/sh",
        "PATH": PATH,
    }
    flags = ["--target", str(pid), "--net", "--mount", "--pid", "--uts", "--ipc"]
    drop = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups"] if entry.pw_uid else []
    settings = [f"{name}={value}" for name, value in variables.items()]
    return [tool("nsenter"), *flags, *drop, "env", "-i", *settings, "sh", "-c", 'cd && exec "$@"', "sh", *command]


def kill_all(layout: Layout) -> int:
    """Ends every process of every host. Returns how many hosts ran. Raises TestbedError naming who is left."""
    hosts = find(layout)
    deadline = time.monotonic() + END_S
    left = hosts
    while left:
        for running in left.values():
            end(running)
        time.sleep(0.02)
        left = find(layout)
        if left and time.monotonic() > deadline:
            raise TestbedError("processes do not end: " + "; ".join(f"{n} {r.processes}" for n, r in left.items()))
    return len(hosts)


def end(running: Running) -> None:
    """A namespace's processes end with its first; without that one, each is killed."""
    for pid in [running.first] if running.first else running.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stray_mounts(layout: Layout) -> list[str]:
    """Mounts of this machine in the testbed's directory: there are none unless someone else made them."""
    places = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if Path(place).is_relative_to(layout.root)]


def unmount(layout: Layout) -> None:
    """Before the directory is removed with all that is in it. Raises TestbedError."""
    for place in reversed(stray_mounts(layout)):
        call(["umount", "--lazy", place])
