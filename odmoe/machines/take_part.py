"""Writes experts that come on standard input into a part of a store on this host. It is sent to its python3 over ssh:
only the standard library of Python 3.7.

The first line is a JSON object: {"store", "fresh", "last", "sizes": {file: bytes}, "extents": [[file, offset, length],
...], "texts": [[file, text], ...]}. The bytes of the extents follow, in this order. `texts` are written after them, one
after the other: what the first says is true by then, and a folder with the last is a store. Of held.json the experts
are added to those that the one there names: a worker may have got others meanwhile. With `fresh` all that was there
goes first; after `last` nothing follows. An interruption leaves what was there before, and bytes that no list names.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys

STORES = os.path.join(os.path.expanduser("~"), "odmoe", "stores")
PIECE = 1 << 20


def take(stream):
    asked = json.loads(stream.readline().decode())
    folder = os.path.join(STORES, asked["store"])
    if asked["fresh"] and os.path.isdir(folder):
        if os.path.exists(os.path.join(folder, "manifest.json")):
            os.unlink(os.path.join(folder, "manifest.json"))
        shutil.rmtree(folder)
    os.makedirs(folder, 0o700, exist_ok=True)
    files = {name: sized(os.path.join(folder, name), size) for name, size in asked["sizes"].items()}
    for name, offset, length in asked["extents"]:
        os.lseek(files[name], offset, os.SEEK_SET)
        copy(stream, files[name], length)
    written = {name for name, _, _ in asked["extents"]}
    for name, file in files.items():
        if name in written or asked["last"]:
            os.fsync(file)
        os.close(file)
    place = os.open(folder, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)  # as the worker does that runs here (checkpoint/part_files.py)
    for name, text in asked["texts"]:
        replace(folder, name, (with_experts_there(folder, text) if name == "held.json" else text).encode())
    os.close(place)


def with_experts_there(folder, text):
    """A list, and what the one that is there names, if that is of the same store."""
    asked = json.loads(text)
    try:
        with open(os.path.join(folder, "held.json")) as file:
            there = json.load(file)
        is_store = os.path.exists(os.path.join(folder, "manifest.json"))  # of this digest, or `fresh` had removed it
        if there.get("manifest", asked["manifest"] if is_store else None) != asked["manifest"]:
            return text
        layers = {layer: [*there["experts"].get(layer, []), *some] for layer, some in asked["experts"].items()}
        asked["experts"] = {layer: merge_ranges(some) for layer, some in {**there["experts"], **layers}.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return text
    return json.dumps(asked)


def merge_ranges(ranges):
    """As few as can be."""
    found: list[list[int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found


def sized(path, size):
    """A descriptor of the file, with holes where nothing was written."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if os.fstat(file).st_size != size:
        os.ftruncate(file, size)
    return file


def copy(stream, file, length):
    while length:
        data = stream.read(min(PIECE, length))
        if not data:
            sys.exit("the copy ended early")
        length -= len(data)
        data = memoryview(data)
        while data:
            data = data[os.write(file, data) :]


def replace(folder, name, data):
    """The whole file, or the former one stays."""
    draft = os.path.join(folder, "." + name + ".new")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, os.path.join(folder, name))
    place = os.open(folder, os.O_RDONLY)
    os.fsync(place)
    os.close(place)


if __name__ == "__main__":
    take(sys.stdin.buffer)
