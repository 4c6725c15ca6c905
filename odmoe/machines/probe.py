"""Inspects and changes one machine of a cluster. It is sent to its python3 over ssh: only the standard library of
Python 3.7. `python3 - facts`, or another function of `ACTIONS` with a JSON argument: each prints one JSON object.

A host belongs to the cluster that has claimed it, in the file `owner.json`: {"id", "cluster", "launcher", "file",
"head", "stores", "launching", "since"}. `id` is the cluster's, `head` its Ray's host:port, `stores` the names of those
that its nodes use, `since` in seconds of this host's clock. `launching`: an `odmoe up` is at work on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

HOME = os.path.expanduser("~")
OURS = os.path.join(HOME, "odmoe")
# In the environment of everything started after env.sh, and of nothing else on the machine.
MARK = ("RAY_AUTH_TOKEN_PATH=" + os.path.join(OURS, "keys", "ray_token")).encode()
ASKED = "odmoe.at_head"  # the launching machine's request, which ends with that
OWNER = os.path.join(OURS, "owner.json")
STORES = os.path.join(OURS, "stores")
HELD = "held.json"  # as in checkpoint.held, which hosts may not have yet
SESSION = re.compile(r"(/[^\0=, ]*/session_[0-9_-]+/)")  # the folder of a Ray's sockets and logs
ASK_S, KILL_S = 5.0, 5.0  # of each round
CONNECT_S = 1.0
NAMED = 2  # processes in a message
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # the first frame that each end of HTTP/2 sends, empty
ABANDONED_S = 24 * 3600.0  # after so long nobody waits for an `odmoe up`


def read(path, most=1 << 20):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def environment():
    """Versions of Python and the packages in ~/odmoe/venv, and when make finished it (0 for never); None without it."""
    venv = os.path.join(OURS, "venv")
    if not os.access(os.path.join(venv, "bin", "python"), os.X_OK):
        return None
    version = re.search(r"^version(?:_info)? *= *(\S+)", read(os.path.join(venv, "pyvenv.cfg")), re.MULTILINE)
    packages = {}
    for folder in glob.glob(os.path.join(glob.escape(venv), "lib", "python3*", "site-packages", "*.dist-info")):
        name, _, number = os.path.basename(folder)[: -len(".dist-info")].rpartition("-")
        packages[re.sub("[-_.]+", "-", name).lower()] = number.partition("+")[0]
    try:
        made = os.stat(os.path.join(venv, ".locked")).st_mtime
    except OSError:
        made = 0.0
    return {"python": python_of(venv) or (version.group(1) if version else ""), "packages": packages, "made": made}


def python_of(venv):
    """The version of its Python as it is now: the system's may have been updated since."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [os.path.join(venv, "bin", "python"), "-c", "import platform; print(platform.python_version())"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5)
        found = re.search(r"^\d+\.\d+\.\d+\S*$", done.stdout.decode("utf-8", "replace").strip())
        return found.group() if found else ""
    return ""


def certificate():
    """A digest of the certificates there, or None."""
    keys = os.path.join(OURS, "keys")
    texts = [read(os.path.join(keys, name)) for name in ("node.pem", "ca.pem")]
    return hashlib.sha256("".join(texts).encode("utf-8", "replace")).hexdigest() if all(texts) else None


def store(folder):
    """A store's manifest, and whether its files, forms included, have their full size; None if there is no store."""
    text = read(os.path.join(folder, "manifest.json"), 1 << 28)
    if not text:
        return None
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and name != HELD)
    texts = [read(os.path.join(folder, name), 1 << 28) for name in names]
    try:
        manifest = json.loads(text)
        sizes = {
            layer["file"]: max(blob["offset"] + blob["length"] for blob in layer["blobs"])
            for manifest in map(json.loads, texts)
            for layer in manifest["layers"].values()
        }
        dense = [os.path.join("dense", name) for name in manifest["dense"]]
        total = sum(len(layer["blobs"]) for layer in manifest["layers"].values())
        found = {"fingerprint": manifest["fingerprint"], "dtype": manifest["dtype"], "format": manifest["format"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"fault": f"manifest.json is damaged ({error!r})"}
    found["bytes"], found["fault"] = 0, None
    found["manifest"] = hashlib.sha256("".join(texts).encode("utf-8", "replace")).hexdigest()
    part = held(folder)
    if part is not None:
        found["held"] = [count(part), total]
        dense = dense if os.path.isdir(os.path.join(folder, "dense")) else []  # a worker needs none
    for name in [*sizes, *dense]:
        try:
            stat = os.stat(os.path.join(folder, name))
        except OSError as error:
            found["fault"] = f"{name} cannot be read ({error.strerror})"
            continue
        size = stat.st_size
        found["bytes"] += size if part is None else on_disk(stat)
        if size != sizes.get(name, size):
            found["fault"] = f"{name} is {size} bytes, the manifest says {sizes[name]}"
    return found


def held(folder):
    """A part's list of experts, {"manifest", "experts": {layer: [[first, last], ...]}}; None if there is no such list.
    A copy that has not ended has one, too."""
    with contextlib.suppress(ValueError):
        found = json.loads(read(os.path.join(folder, HELD), 1 << 28))
        if isinstance(found, dict) and isinstance(found.get("experts"), dict):
            return found
    return None


def count(part):
    """The number of experts in a part's list; 0 if it is damaged."""
    with contextlib.suppress(ValueError, TypeError):
        return sum(last - first + 1 for ranges in part["experts"].values() for first, last in ranges)
    return 0


def on_disk(stat):
    """Bytes that a file takes: a part's files have holes."""
    return min(stat.st_size, stat.st_blocks * 512)


def parts():
    """The lists of all parts of stores, by the stores' names."""
    found = {}
    with contextlib.suppress(OSError):
        found = {name: held(os.path.join(STORES, name)) for name in sorted(os.listdir(STORES))}
    return {name: part for name, part in found.items() if part is not None}


def stores():
    with contextlib.suppress(OSError):
        found = {name: store(os.path.join(STORES, name)) for name in sorted(os.listdir(STORES))}
        return {name: value for name, value in found.items() if value}
    return {}


def memory():
    """Total and available bytes."""
    kilobytes = dict(re.findall(r"^(\w+): +(\d+) kB$", read("/proc/meminfo"), re.MULTILINE))
    return {
        "total": int(kilobytes.get("MemTotal", 0)) * 1024,
        "available": int(kilobytes.get("MemAvailable", 0)) * 1024,
    }


def nearest(path):
    """The path, or the nearest folder above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def disk_free(path):
    """Bytes that the user may still write there."""
    there = os.statvfs(nearest(path))
    return there.f_bavail * there.f_frsize


def places():
    """What is known of the folders in which something is written: {"free", "device", "writable", "executes"}."""
    found = {}
    for name in (OURS, STORES, "/tmp/ray"):
        path = nearest(name)
        found[name.replace(HOME, "~")] = {
            "free": disk_free(path),
            "device": os.stat(path).st_dev,
            "writable": os.access(path, os.W_OK | os.X_OK),
            "executes": not os.statvfs(path).f_flag & os.ST_NOEXEC,
        }
    return found


def addresses():
    """This host's IPv4 addresses."""
    lines = read("/proc/net/fib_trie").splitlines()
    ends = [number for number, line in enumerate(lines) if line.split()[:3] == ["/32", "host", "LOCAL"]]
    return sorted({lines[number - 1].split()[-1] for number in ends})


def listening(ours):
    """{port: process} of TCP ports at which something listens that is not of `ours`, the numbers of processes."""
    sockets = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read(file, 1 << 26).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    holders: dict[int, set[int]] = {}
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            port = sockets.get(os.readlink(link))
            if port is not None:
                holders.setdefault(port, set()).add(int(link.split("/")[2]))
    return {
        port: holder(holders.get(port, ())) for port in sockets.values() if not is_ours(ours, holders.get(port, ()))
    }


def is_ours(ours, numbers):
    """Whether one of these processes, or one of its ancestors, is among `ours`: titles overwrite the mark."""
    return any(ancestor in ours for number in numbers for ancestor in line_of(number))


def holder(numbers):
    for number in sorted(numbers):
        words = read(f"/proc/{number}/cmdline").split("\0")
        return f"{name_of(words)} (process {number})"
    return "a process of another user"


def gpus():
    """Their names."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        found += re.findall(r"^Model:\s*(.+)$", read(path), re.MULTILINE)
    if not found and shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
            found = re.findall(r"^GPU \d+: (.+?) \(UUID", done.stdout.decode("utf-8", "replace"), re.MULTILINE)
    return [name.strip() for name in found]


class Process:
    """A line of the process table. `start` is in ticks since the machine's start: with it a number is never another's.

    Raises OSError if it has ended."""

    def __init__(self, number):
        self.number = number
        with open(f"/proc/{number}/stat", "rb") as file:
            program, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        fields = rest.split()
        self.program, self.ended = program.decode("utf-8", "replace"), fields[0] == b"Z"
        self.parent, self.start = int(fields[1]), int(fields[19])

    def words(self):
        return read(f"/proc/{self.number}/cmdline").split("\0")

    def name(self):
        return name_of(self.words())

    def is_marked(self):
        with contextlib.suppress(OSError), open(f"/proc/{self.number}/environ", "rb") as file:
            return MARK in file.read().split(b"\0")
        return False

    def opens(self, folders):
        """Whether it has a file open in one of these folders."""
        for link in glob.glob(f"/proc/{self.number}/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(tuple(folders)):
                    return True
        return False

    def network(self):
        """A container has another than its host. None if this user may not know it."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self.number}/ns/net")

    def key(self):
        return self.number, self.start


def table():
    """All processes of the machine that have not ended, by number."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            process = Process(int(os.path.basename(folder)))
            if not process.ended:
                found[process.number] = process
    return found


def processes(everything=None):
    """The cluster's processes, by number: those with the mark, what they have started, and who writes to their Ray's
    logs. A process that sets its title overwrites its environment, and with it the mark."""
    everything = table() if everything is None else everything
    found = {number: process for number, process in everything.items() if process.is_marked()}
    sessions = {folder for process in found.values() for folder in SESSION.findall("\0".join(process.words()))}
    for number, process in everything.items():
        if sessions and number not in found and process.program.startswith("ray") and process.opens(sessions):
            found[number] = process
    started = found
    while started:
        started = {number: one for number, one in everything.items() if number not in found and one.parent in found}
        found.update(started)
    for number in own_line():
        found.pop(number, None)
    return found


def other_rays(everything, ours):
    """Each Ray of this machine that is not the cluster's: {"pid", "name", "user", "port", "since"}; `since` in seconds
    of this host's clock."""
    found = []
    for process in everything.values():
        if process.program not in ("raylet", "gcs_server") or process.number in ours:
            continue
        if process.network() not in (None, os.readlink("/proc/self/ns/net")):
            continue
        with contextlib.suppress(OSError):
            number = os.stat(f"/proc/{process.number}").st_uid
            user = str(number)
            with contextlib.suppress(KeyError):
                user = pwd.getpwuid(number).pw_name
            port = re.search(r"--(?:node_manager_port|gcs_server_port)=(\d+)", "\0".join(process.words()))
            age = clocks()["up_s"] - process.start / os.sysconf("SC_CLK_TCK")
            ray = {"pid": process.number, "name": process.program, "user": user}
            ray["port"], ray["since"] = int(port.group(1)) if port else None, clocks()["time"] - age
            found.append(ray)
    return sorted(found, key=lambda ray: ray["pid"])


def own_line():
    """This process and its ancestors, which are never ended, whatever is in their environment."""
    return line_of(os.getpid())


def line_of(number):
    """A process and its ancestors."""
    while number > 0:
        yield number
        fields = read(f"/proc/{number}/stat").rpartition(")")[2].split()
        number = int(fields[1]) if len(fields) > 1 else 0


def name_of(words):
    """`raylet`, `gcs_server`, `ray::Worker`, `monitor.py`: the program, or the script that Python runs."""
    if not words or not words[0]:
        return "?"
    program = os.path.basename(words[0].split(" ")[0])
    if program.startswith("python") and "-c" in words:
        return "python -c"
    if program.startswith("python"):
        scripts = [word for word in words[1:] if word and not word.startswith("-")]
        program = os.path.basename(scripts[0]) if scripts else program
    return program


def clocks():
    """The time, and the uptime, which shows a restart in between."""
    return {"time": time.time(), "up_s": float(read("/proc/uptime").split(" ")[0] or 0)}


def names(found):
    return sorted(process.name() for process in found.values())


def home_id():
    """The same for all addresses of this machine, and for no other machine that runs now."""
    home = os.stat(HOME)
    return "{}:{}:{}".format(read("/proc/sys/kernel/random/boot_id").strip(), home.st_dev, home.st_ino)


def claim_here():
    """The claim of a cluster on this host. Without one, Ray's token still tells its id. {} if it is nobody's."""
    with contextlib.suppress(ValueError):
        found = json.loads(read(OWNER))
        if isinstance(found, dict) and is_claim(found):
            return found
    token = read(os.path.join(OURS, "keys", "ray_token")).strip()
    return {"id": hashlib.sha256(token.encode()).hexdigest()[:16]} if token else {}


def is_claim(found):
    """Whether a file has what is read of a claim."""
    texts = ("id", "cluster", "launcher", "file", "head")
    since = found.get("since")
    return (
        all(isinstance(found.get(name), str) for name in texts)
        and isinstance(since, (int, float))
        and 0 <= since < 1e11
    )


def owner(ours):
    """The claim on this host, and why it still holds as `held`: empty if nothing of that cluster runs."""
    claim = claim_here()
    return dict(claim, held=why_held(claim, ours)) if claim else {}


def why_held(claim, ours):
    running = [name for name in names(ours) if name != ASKED]
    if running:
        running.sort(key=lambda name: name not in ("raylet", "gcs_server"))
        more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
        return "it runs here: " + ", ".join(running[:NAMED]) + more
    if is_at_work(claim):
        return "its odmoe up is at work, or was cut off"
    address, _, port = claim.get("head", "").rpartition(":")
    if address and claim.get("address") != address and speaks_grpc(address, port):
        return "its head answers at " + claim["head"]
    return ""


def speaks_grpc(address, port):
    """Whether HTTP/2 is spoken there, as Ray's head does. Others may listen at its port, or accept every connection."""
    with contextlib.suppress(OSError, ValueError), socket.create_connection((address, int(port)), CONNECT_S) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        return link.recv(9)[3:4] == SETTINGS[3:4]
    return False


def is_at_work(claim):
    return claim.get("launching") and clocks()["time"] - claim.get("since", 0.0) < ABANDONED_S


@contextlib.contextmanager
def lock_claims():
    """No other claim on this host meanwhile."""
    os.makedirs(OURS, 0o700, exist_ok=True)
    with open(os.path.join(OURS, "owner.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def claim(wanted):
    """Make this host the cluster's, unless it is held by another: {"claimed", "owner"}, the latter as it was.

    `wanted` is the claim, with `take_over`: also if it is held."""
    take_over = wanted.pop("take_over")
    with lock_claims():
        former = owner(processes())
        ours = former.get("id") == wanted["id"]
        at_work = is_at_work(former) and former.get("launcher") != wanted["launcher"]
        if former and not take_over and (at_work if ours else former["held"]):
            return {"claimed": False, "owner": former}
        stores = former.get("stores", []) if ours and former["held"] else []
        write(dict(wanted, since=clocks()["time"], launching=True, stores=sorted({*wanted["stores"], *stores})))
    return {"claimed": True, "owner": former}


def settle(wanted):
    """The `odmoe up` of the cluster with this `id` has ended. `stores`: those that its nodes use, if it knows them."""
    with lock_claims():
        found = claim_here()
        if found.get("id") == wanted["id"] and "cluster" in found:
            write(dict(found, launching=False, stores=wanted.get("stores") or found["stores"]))
    return {}


def write(owner):
    """The whole file, or the former one stays."""
    draft = OWNER + ".new"
    with open(draft, "w") as file:
        json.dump(owner, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, OWNER)


def others(wanted):
    """The claim of another cluster on this host, or {}. One of which nothing is left but a token counts for nothing."""
    found = owner(processes())
    return found if found.get("id") != wanted["id"] and (found.get("held") or found.get("cluster")) else {}


def release(wanted):
    """Give up the claim of the cluster with this `id`. The host goes back to a `former` owner."""
    former = {name: value for name, value in wanted.get("former", {}).items() if name != "held"}
    with lock_claims():
        if claim_here().get("id") != wanted["id"]:
            return {}
        if former:
            write(former)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(OWNER)
    return {}


def facts(_=None):
    everything = table()
    ours = processes(everything)
    return {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "home": HOME,
        "hostname": socket.gethostname(),
        "venv_module": shutil.which("python3") is not None and has_venv(),
        "venv": environment(),
        "code": read(os.path.join(OURS, "code", "SHIPPED")).strip() or None,
        "stores": stores(),
        "parts": parts(),
        "keys": sorted(os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(OURS), "keys", "*"))),
        "certificate": certificate(),
        "node_certificate": read(os.path.join(OURS, "keys", "node.pem")),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory(),
        "disk_free": disk_free(STORES),
        "gpus": gpus(),
        "processes": names(ours),
        "machine": platform.machine(),
        "places": places(),
        "addresses": addresses(),
        "listening": listening(ours),
        "other_rays": other_rays(everything, ours),
        "owner": owner(ours),
        "home_id": home_id(),
        "rsync": shutil.which("rsync"),
        "make": shutil.which("make"),
        **clocks(),
    }


def has_venv():
    """Debian has Python's venv in a package of its own."""
    import importlib.util

    return importlib.util.find_spec("venv") is not None and importlib.util.find_spec("ensurepip") is not None


def stop(wanted=None):
    """End all of the cluster's processes, each round with SIGTERM, the last with SIGKILL: {"stopped", "left"}. Raylets
    come first and GCS last: those that lose them early wait for them.

    `wanted`: an `id`, and to `release` the claim. On a host of another cluster nothing is done, but that the answer has
    its `owner`."""
    if wanted and others(wanted):
        return {"stopped": [], "left": [], "owner": others(wanted)}
    known = processes()
    stopped = names(known)
    for round_s, number, chosen in (
        (ASK_S, signal.SIGTERM, lambda process: process.program == "raylet"),
        (ASK_S, signal.SIGTERM, lambda process: process.program not in ("raylet", "gcs_server")),
        (ASK_S, signal.SIGTERM, lambda process: True),
        (KILL_S, signal.SIGKILL, lambda process: True),
    ):
        end, told = time.monotonic() + round_s, set()
        while True:
            left = remaining(known)
            for process in left.values():
                if process.key() not in told and chosen(process):
                    told.add(process.key())
                    with contextlib.suppress(OSError):
                        os.kill(process.number, number)
            if time.monotonic() > end or not any(chosen(process) for process in left.values()):
                break
            time.sleep(0.1)
    left = remaining(known)
    if wanted and wanted.get("release") and not left:
        release(wanted)
    return {"stopped": stopped, "left": [f"{one.name()} (process {one.number})" for one in left.values()]}


def remaining(known):
    """Those of `known` that have not ended, and all that came to be since, which `known` then has too."""
    everything = table()
    known.update(processes(everything))
    still = {one.key() for one in everything.values()}
    return {number: process for number, process in known.items() if process.key() in still}


def host_stores(_=None):
    """{name: {"bytes", "whole", "used"}} of all folders for stores; `used`: why one may not be removed, or empty. Of a
    part also how many experts it has of how many, as `held`."""
    ours = processes()
    claim = owner(ours)
    found = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(STORES)):
            folder = os.path.join(STORES, name)
            part = held(folder)
            files = [os.path.join(place, file) for place, _, held in os.walk(folder) for file in held]
            size = 0
            for file in files:
                with contextlib.suppress(OSError):
                    stat = os.lstat(file)
                    size += stat.st_size if part is None else on_disk(stat)
            used = ""
            if claim.get("held") and name in claim.get("stores", [name]):
                used = claim["held"]
            elif any(process.opens([folder + "/"]) for process in ours.values()):
                used = "a process has its files open"
            whole = os.path.isfile(os.path.join(folder, "manifest.json"))
            found[name] = {"bytes": size, "whole": whole, "used": used}
            if whole and part is not None:
                found[name]["held"] = (store(folder) or {}).get("held")
    return {"stores": found, "owner": claim}


def remove_stores(wanted):
    """Remove the stores `names` unless they are used: {"removed": {name: bytes}, "kept": {name: reason}}. The manifest
    goes first: what an interruption leaves is no store."""
    with lock_claims():
        there, removed, kept = host_stores()["stores"], {}, {}
        stranger = others(wanted)
        for name in wanted["names"]:
            if name not in there:
                continue
            if stranger or there[name]["used"]:
                kept[name] = "it belongs to another cluster" if stranger else there[name]["used"]
                continue
            folder = os.path.join(STORES, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, "manifest.json"))
            shutil.rmtree(folder, ignore_errors=True)
            if os.path.exists(folder):
                kept[name] = "it cannot be removed; see there"
            else:
                removed[name] = there[name]["bytes"]
    return {"removed": removed, "kept": kept}


ACTIONS = {action.__name__: action for action in (facts, stop, claim, settle, release, host_stores, remove_stores)}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](json.loads(sys.argv[2]) if sys.argv[2:] else None)))
