"""Examines one machine. It is sent to its python3, over ssh or here: only the standard library of Python 3.7.
`python3 - examine`, or another function of `ACTIONS` with a JSON argument: each prints one JSON object.

Nothing is left on the machine: the file that the disk is measured with has no name, and goes with this process.
"""

from __future__ import annotations

import contextlib
import glob
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time

FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
PIECE = 4 << 20  # bytes of a read: about an expert in few bits
PING, BULK = 64, 1 << 18
PINGS = 40
LINK_S = 0.8  # each way
CONNECT_S = 6.0
SILENT_S = 5.0
TORCH_S = 60.0
SECRETS = ("node.key", "secret", "ray_token", "ca.key")
LIBRARY = """
import json, torch
gpus = []
for n in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(n)
    name, level = torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)
    gpus.append({"name": name, "free": free, "total": total, "level": "sm_%d%d" % level})
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
    "levels": torch.cuda.get_arch_list()}))
"""


def read(path, most=1 << 20):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def processor():
    """Its model, the instruction sets of `FLAGS` that it has, and its threads of all kinds."""
    text = read("/proc/cpuinfo", 1 << 24)
    has = set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)[:1]).split())
    names = re.findall(r"^(?:model name|Model)\s*: *(.+)$", text, re.MULTILINE)
    pairs = re.findall(r"^physical id\s*: *(\d+)$(?:.|\n)*?^core id\s*: *(\d+)$", text, re.MULTILINE)
    return {
        "name": names[0].strip() if names else platform.machine(),
        "machine": platform.machine(),
        "flags": [flag for flag in FLAGS if flag in has],
        "threads": len(os.sched_getaffinity(0)),
        "all_threads": os.cpu_count(),
        "cores": len(set(pairs)) or None,
    }


def memory():
    """Bytes. `limit` and `left`: of the control group with the least left; None if none is limited."""
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", read("/proc/meminfo"), re.MULTILINE))
    found = {name: int(sizes.get(key, 0)) * 1024 for name, key in _MEMORY}
    limits = [limit for limit in map(group_limit, control_groups()) if limit]
    limit, left = min(limits, key=lambda one: one[1]) if limits else (None, None)
    return dict(found, limit=limit, left=left)


_MEMORY = (
    ("total", "MemTotal"),
    ("available", "MemAvailable"),
    ("swap_total", "SwapTotal"),
    ("swap_free", "SwapFree"),
)


def control_groups():
    """Folders of this process's memory groups and those around them, of version 1 and 2. In a container the path that
    the kernel names may be outside: its own group is then at the top."""
    for line in read("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = "/sys/fs/cgroup/memory" if kinds else "/sys/fs/cgroup"
        while True:
            yield top + path.rstrip("/")
            if path in ("/", ""):
                break
            path = os.path.dirname(path)


def group_limit(folder):
    """(limit, bytes left) of a control group; None if it has no limit. What its files take in the page cache can be
    taken back, and counts as left."""
    pairs = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for most, now in pairs:
        limit, used = read(os.path.join(folder, most)).strip(), read(os.path.join(folder, now)).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            stat = read(os.path.join(folder, "memory.stat"))
            pages = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            return int(limit), max(0, int(limit) - int(used) + (int(pages.group(1)) if pages else 0))
    return None


def driver():
    """The version of NVIDIA's driver, or None."""
    found = re.search(r"Kernel Module\D*?(\d+(?:\.\d+)+)", read("/proc/driver/nvidia/version"))
    return found.group(1) if found else None


def has_gpu():
    return driver() is not None or bool(glob.glob("/dev/nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def library(python):
    """What torch there says of itself and of the GPUs; {"fault": why} if it cannot be asked."""
    if not python or not os.access(python, os.X_OK):
        return {"fault": "there is no environment yet"}
    try:
        done = subprocess.run([python, "-c", LIBRARY], capture_output=True, timeout=TORCH_S)
        return json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"fault": f"torch did not start within {TORCH_S:.0f} s"}
    except (OSError, ValueError, IndexError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() if "done" in locals() else []
        return {"fault": "torch cannot be imported: {}".format(lines[-1] if lines else "it printed nothing")}


def secrets(folders):
    """{path: mode} of keys and secrets, the mode as `ls` counts it: 0o600 is 384."""
    found = {}
    for folder in folders:
        for path in glob.glob(os.path.join(glob.escape(folder), "*")):
            if os.path.basename(path) in SECRETS:
                with contextlib.suppress(OSError):
                    found[path] = os.stat(path).st_mode & 0o777
    return found


def disk_free(folder):
    """Bytes that the user may still write there, or in the folder where it would be made."""
    there = os.statvfs(existing(folder))
    return there.f_bavail * there.f_frsize


def existing(folder):
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def kernel():
    """Its version, and whether this machine could hold the testbed."""
    names = [name for name in ("net", "mnt", "pid", "uts", "ipc") if os.path.exists("/proc/self/ns/" + name)]
    return {"release": platform.release(), "namespaces": len(names) == 5}


def commands(names):
    return {name: shutil.which(name) for name in names}


def free_port(address, ports):
    """The first at which something can listen, or None."""
    for port in ports:
        with contextlib.closing(socket.socket()) as trial, contextlib.suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
            return port
    return None


def examine(asked):
    """`asked`: {"keys": folders of keys, "python": interpreter with torch, "always": import it without a GPU,
    too, "commands": names, "folder": of stores, "address" and "ports": to choose a free one of}."""
    home = os.path.expanduser("~")
    keys = [folder.replace("~", home, 1) for folder in asked["keys"]]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "processor": processor(),
        "ram": memory(),
        "driver": driver(),
        "files": [soft, hard if hard != resource.RLIM_INFINITY else 1 << 30],
        "secrets": secrets(keys),
        "certificates": [read(os.path.join(folder, name)) for folder in keys for name in ("node.pem", "ca.pem")],
        "kernel": kernel(),
        "free_port": free_port(asked["address"], asked["ports"]),
        "free": disk_free(asked["folder"].replace("~", home, 1)),
        "commands": commands(asked["commands"]),
        "library": library(asked["python"].replace("~", home, 1)) if has_gpu() or asked["always"] else None,
    }


def disk(asked):
    """How fast whole pieces are read in random order past the page cache, from a store's largest file or a new one.

    `asked`: {"folder", "bytes" of a new file, "seconds"}. {"rate": bytes a second, "direct", "source"}, or {"fault":
    why}.
    """
    home, size = os.path.expanduser("~"), asked["bytes"]
    folder, room = asked["folder"].replace("~", home, 1), size + (64 << 20)
    files = glob.glob(os.path.join(glob.escape(folder), "*", "layer-*"))
    sizes = {path: os.stat(path).st_size for path in files if os.path.isfile(path)}
    path = max(sizes, key=lambda one: sizes[one], default=None)
    try:
        if path and sizes[path] >= 16 * PIECE:
            number = os.open(path, os.O_RDONLY)
            places = pieces_there(number, sizes[path])
            if len(places) >= 16:
                return dict(timed_reads(number, path, places, asked["seconds"]), source="its store")
            os.close(number)
        folder = existing(folder)
        if disk_free(folder) < room:
            return {"fault": f"too little room for a file of {size >> 20} MB"}
        number = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        noise = os.urandom(PIECE)
        for _ in range(size // PIECE):
            os.write(number, noise)
        os.fsync(number)
        places = pieces_there(number, size)
        return dict(timed_reads(number, f"/proc/self/fd/{number}", places, asked["seconds"]), source="a new file")
    except OSError as error:
        return {"fault": f"{folder}: {error.strerror}"}


def pieces_there(number, size):
    """Where whole pieces of an open file are: those of a store's part have holes, which take no time to read."""
    return [at for at in range(0, size - PIECE + 1, PIECE) if os.lseek(number, at, os.SEEK_HOLE) >= at + PIECE]


def timed_reads(number, path, places, seconds):
    """Of an open file, whose descriptor is closed. The median would hide a disk that stalls: bytes over seconds."""
    buffer, direct = mmap.mmap(-1, PIECE), True
    try:
        other = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        other, direct = os.open(path, os.O_RDONLY), False
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        count, read_bytes, at = len(places), 0, 0
        step = next(n for n in (7919, 104729, 1) if count % n)  # a prime that is no factor: every piece once
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            read_bytes += os.preadv(other, [buffer], places[at % count])
            at += step
        return {"rate": read_bytes / (time.monotonic() - start), "direct": direct}
    finally:
        os.close(other)
        os.close(number)


def sink(asked):
    """Be measured by `link` of another machine: one connection that begins with the token."""
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((asked["address"], asked["port"]))
        except OSError as error:
            return {"fault": "it cannot listen at port {}: {}".format(asked["port"], error.strerror)}
        server.listen(4)
        end = time.monotonic() + CONNECT_S + SILENT_S
        while time.monotonic() < end:
            server.settimeout(max(0.1, end - time.monotonic()))
            with contextlib.suppress(OSError):
                link, _ = server.accept()
                with contextlib.closing(link):
                    link.settimeout(SILENT_S)
                    if exactly(link, len(asked["token"])) == asked["token"].encode():
                        answer(link)
                        return {"done": True}
    return {"fault": "nobody connected"}


def answer(link):
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        link.sendall(exactly(link, PING))
    got, _ = drain(link)
    link.sendall(got.to_bytes(8, "big"))
    pour(link)


def link(asked):
    """Bits a second to and from another machine that runs `sink`, and seconds of a round trip: the median of several.
    {"blocked": why} if it is not reached."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            stream = socket.create_connection((asked["address"], asked["port"]), 2.0)
            break
        except OSError as error:
            if time.monotonic() > end:
                return {"blocked": "port {} is not reached: {}".format(asked["port"], error.strerror or error)}
            time.sleep(0.1)
    with contextlib.closing(stream):
        stream.settimeout(4 * SILENT_S)
        try:
            return measure_link(stream, asked["token"])
        except OSError as error:
            return {"blocked": f"the connection broke: {error.strerror or error}"}


def measure_link(stream, token):
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sendall(token.encode())
    trips = []
    for _ in range(PINGS):
        start = time.monotonic()
        stream.sendall(b"\0" * PING)
        exactly(stream, PING)
        trips.append(time.monotonic() - start)
    start = time.monotonic()
    pour(stream)
    sent = int.from_bytes(exactly(stream, 8), "big")
    middle = time.monotonic()
    back, _ = drain(stream)
    return {
        "to": 8 * sent / (middle - start),
        "from": 8 * back / (time.monotonic() - middle),
        "trip_s": sorted(trips)[PINGS // 2],
    }


def pour(link):
    """Send for some time, then say that nothing more comes."""
    block, end = bytes(BULK), time.monotonic() + LINK_S
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BULK)  # what waits here does not count as sent
    while time.monotonic() < end:
        link.sendall(block)
    link.shutdown(socket.SHUT_WR)


def drain(link):
    """Receive until nothing more comes: bytes and seconds."""
    buffer, got, start = bytearray(BULK), 0, time.monotonic()
    while True:
        count = link.recv_into(buffer)
        if not count:
            return got, time.monotonic() - start
        got += count


def exactly(link, count):
    """Raises OSError if the other end hangs up before."""
    found = b""
    while len(found) < count:
        part = link.recv(count - len(found))
        if not part:
            raise OSError("the other end hung up")
        found += part
    return found


ACTIONS = {action.__name__: action for action in (examine, disk, sink, link)}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](json.loads(sys.argv[2]) if sys.argv[2:] else {})))
