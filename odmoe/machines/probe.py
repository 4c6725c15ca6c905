"""Inspects one machine of a cluster. It is sent to its python3 over ssh: only the standard library of Python 3.7.

`python3 - facts` and `python3 - stop`: each prints one JSON object.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

HOME = os.path.expanduser("~")
OURS = os.path.join(HOME, "odmoe")
STORES = os.path.join(OURS, "stores")
# In the environment of everything started after env.sh, and of nothing else on the machine.
MARK = ("RAY_AUTH_TOKEN_PATH=" + os.path.join(OURS, "keys", "ray_token")).encode()
ASK_S, KILL_S = 8.0, 5.0


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
    return {"python": version.group(1) if version else "", "packages": packages, "made": made}


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
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    texts = [read(os.path.join(folder, name), 1 << 28) for name in names]
    try:
        manifest = json.loads(text)
        sizes = {
            layer["file"]: max(blob["offset"] + blob["length"] for blob in layer["blobs"])
            for manifest in map(json.loads, texts)
            for layer in manifest["layers"].values()
        }
        dense = [os.path.join("dense", name) for name in manifest["dense"]]
        found = {"fingerprint": manifest["fingerprint"], "dtype": manifest["dtype"], "format": manifest["format"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"fault": f"manifest.json is damaged ({error!r})"}
    found["bytes"], found["fault"] = 0, None
    found["manifest"] = hashlib.sha256("".join(texts).encode("utf-8", "replace")).hexdigest()
    for name in [*sizes, *dense]:
        try:
            size = os.stat(os.path.join(folder, name)).st_size
        except OSError as error:
            found["fault"] = f"{name} cannot be read ({error.strerror})"
            continue
        found["bytes"] += size
        if size != sizes.get(name, size):
            found["fault"] = f"{name} is {size} bytes, the manifest says {sizes[name]}"
    return found


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
    return {port: holder(holders.get(port, ())) for port in sockets.values() if not of(ours, holders.get(port, ()))}


def of(ours, numbers):
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


def processes():
    """{pid: name} of the cluster's processes: Ray's and our nodes'."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(folder + "/environ", "rb") as file:
                if MARK not in file.read().split(b"\0"):
                    continue
            with open(folder + "/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"Z":
                    continue
            with open(folder + "/cmdline", "rb") as file:
                words = file.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        found[int(os.path.basename(folder))] = name_of(words)
    for number in own_line():
        found.pop(number, None)
    return found


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


def facts():
    return {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "home": HOME,
        "hostname": socket.gethostname(),
        "venv_module": shutil.which("python3") is not None and has_venv(),
        "venv": environment(),
        "code": read(os.path.join(OURS, "code", "SHIPPED")).strip() or None,
        "stores": stores(),
        "keys": sorted(os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(OURS), "keys", "*"))),
        "certificate": certificate(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory(),
        "disk_free": disk_free(STORES),
        "gpus": gpus(),
        "processes": sorted(processes().values()),
        "machine": platform.machine(),
        "places": places(),
        "addresses": addresses(),
        "listening": listening(processes()),
        "rsync": shutil.which("rsync"),
        "make": shutil.which("make"),
        **clocks(),
    }


def has_venv():
    """Debian has Python's venv in a package of its own."""
    import importlib.util

    return importlib.util.find_spec("venv") is not None and importlib.util.find_spec("ensurepip") is not None


def stop():
    """End all of the cluster's processes: SIGTERM first, then SIGKILL."""
    asked = processes()
    for number, wait_s in ((signal.SIGTERM, ASK_S), (signal.SIGKILL, KILL_S)):
        end = time.monotonic() + wait_s
        left = processes()
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, number)
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left = processes()
            if number == signal.SIGKILL:
                for process in left:  # started in between
                    with contextlib.suppress(OSError):
                        os.kill(process, number)
    return {"stopped": sorted(asked.values()), "left": sorted(processes().values())}


if __name__ == "__main__":
    print(json.dumps(stop() if sys.argv[1:] == ["stop"] else facts()))
