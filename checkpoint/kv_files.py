"""Blocks of KV caches on disk, so that a prompt's beginning is known after a restart.

A file a block, in safetensors' format: its tensors, and in the metadata everything else with a checksum of all of it.
Files are written beside their place and renamed, by a thread of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from checkpoint.kv_blocks import Key, KVBlock
from scheduler.errors import ConfigError

SUFFIX, LOCK = ".kv", ".lock"
WAITING_BYTES = 256 << 20
"""Of blocks that may wait to be written. Beyond, new ones are not."""
ABANDONED_S = 3600.0
"""Age of a half-written file that no process writes any more."""
CLOSE_S = 30.0
"""Longest wait at the end for blocks that are not written yet."""
PAUSE_S = 60.0
"""For which nothing is written after a file could not be."""
_VERSION = "1"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """For this process alone, where the file system has locks. Raises ConfigError if another one has it; OSError."""
    with open(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--kv-disk {directory} is used by another main node; give each a directory of its own"
            ) from error
        except OSError as error:
            _log.warning("%s cannot be locked (%s): let one main node use it", directory, error.strerror)
        yield


class KVDirectory:
    """Thread-safe. `identity`: see `PrefixCache`; files of another one are left alone, but they count, and give way.

    Raises ConfigError for a directory that cannot be made or read, or that another one uses, in any process.
    """

    def __init__(self, directory: Path, most_bytes: int, identity: str) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        """Of all files."""
        self._identity = xxhash.xxh3_128_hexdigest(identity.encode())
        self._directory = directory
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By name of file, the least recently used first."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[int, Key, KVBlock] | None] = queue.Queue()
        self._waiting_bytes = 0
        self._epoch = 0
        """How often everything was forgotten."""
        self._paused_until = 0.0
        with contextlib.ExitStack() as opened:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                opened.enter_context(_locked(directory))
                self._scan()
            except OSError as error:
                raise ConfigError(
                    f"--kv-disk {directory} cannot be used: {error.strerror}; give a directory that can be written"
                ) from error
            self._held = opened.pop_all()
        self._thread = threading.Thread(target=self._write_all, name="odmoe-kv-disk", daemon=True)
        self._thread.start()

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._directory):
            try:
                about = entry.stat()
            except FileNotFoundError:  # another process has removed it
                continue
            if entry.name.endswith(f"{SUFFIX}.part"):
                if time.time() - about.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink(missing_ok=True)  # of a process that was killed
            elif entry.name.endswith(SUFFIX) and entry.is_file():
                found.append((about.st_mtime_ns, entry.name, about.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.nbytes += size
        foreign = sum(not name.startswith(self._identity) for name in self._sizes)
        if foreign:
            _log.info(
                "%s: %d files are of another model, dtype or version; they are not read", self._directory, foreign
            )
        self._make_room(0)

    def _name(self, key: Key) -> str:
        return f"{self._identity}-{key.hex()}{SUFFIX}"

    def load(self, key: Key) -> KVBlock | None:
        """None where there is no intact file of it. One that is damaged is named and removed."""
        name = self._name(key)
        with self._lock:
            if name not in self._sizes:
                return None
        path = self._directory / name
        try:
            return decode(path, self._identity, key)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            _log.warning("%s is not read, its tokens are instead: %s", path, error)
            self._remove(name)
            return None

    def save(self, key: Key, block: KVBlock) -> None:
        """It is written later, or not at all where too many wait."""
        with self._lock:
            if self._name(key) in self._sizes:
                return
            waiting = self._waiting_bytes
            if not waiting or waiting + block.nbytes <= WAITING_BYTES:
                self._waiting_bytes += block.nbytes
                self._queue.put((self._epoch, key, block))
                return
        _log.warning("%s: a block of the KV cache is not written, since %d bytes wait", self._directory, waiting)

    def touch(self, chain: Sequence[Key]) -> None:
        """Blocks of a chain, from its beginning on, were used just now; those at the beginning last."""
        now = time.time_ns() - len(chain)
        for number, key in enumerate(reversed(chain)):
            name = self._name(key)
            with self._lock:
                if name not in self._sizes:
                    continue
                self._sizes.move_to_end(name)
            try:
                os.utime(self._directory / name, ns=(now + number, now + number))
            except OSError:
                self._remove(name)

    def clear(self) -> None:
        """Nothing of this identity is found again."""
        with self._lock:
            self._epoch += 1
            own = [name for name in self._sizes if name.startswith(self._identity)]
        for name in own:
            self._remove(name)

    def close(self) -> None:
        """What waits is written first, for at most `CLOSE_S`."""
        end = time.monotonic() + CLOSE_S
        self._queue.put(None)
        self._thread.join(max(0.0, end - time.monotonic()))
        if not self._thread.is_alive():
            self._held.close()

    # --- the thread that writes ---------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (one := self._queue.get()) is not None:
            with self._lock:
                self._waiting_bytes -= one[2].nbytes
            if time.monotonic() >= self._paused_until:
                try:
                    self._write(*one)
                except (OSError, ValueError) as error:
                    self._paused_until = time.monotonic() + PAUSE_S
                    _log.warning(
                        "%s: blocks of the KV cache are not written for %d s: %s; free space or give a smaller "
                        "--kv-disk-size",
                        *(self._directory, PAUSE_S, error),
                    )

    def _write(self, epoch: int, key: Key, block: KVBlock) -> None:
        """Raises OSError; ValueError for what cannot be written."""
        data, name = encode(block, self._identity, key), self._name(key)
        with self._lock:
            if name in self._sizes or not self._make_room(len(data)):
                return
        part = self._directory / f"{name.removesuffix(SUFFIX)}.{os.getpid()}{SUFFIX}.part"
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._directory / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._lock:
            self._sizes[name] = len(data)
            self.nbytes += len(data)
            forgotten = epoch != self._epoch
        if forgotten:
            self._remove(name)

    def _make_room(self, nbytes: int) -> bool:
        """With the lock held, or alone."""
        if nbytes > self.most_bytes:
            return False
        while self._sizes and self.nbytes + nbytes > self.most_bytes:
            name, size = self._sizes.popitem(last=False)
            self.nbytes -= size
            (self._directory / name).unlink(missing_ok=True)
        return True

    def _remove(self, name: str) -> None:
        with self._lock:
            self.nbytes -= self._sizes.pop(name, 0)
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self._directory / name, error.strerror)


def encode(block: KVBlock, identity: str, key: Key) -> bytes:
    """A block as the bytes of a file. Raises ValueError for an attribute that cannot be written."""
    tensors = {f"rows/{layer}/{name}": tensor for (layer, name), tensor in block.rows.items()}
    rest = [
        {name: _plain(value, f"rest/{number}/{name}", tensors) for name, value in layer.items()}
        for number, layer in enumerate(block.rest)
    ]
    about = json.dumps(
        {
            "version": _VERSION,
            "identity": identity,
            "key": key.hex(),
            "start": block.start,
            "stop": block.stop,
            "held": [[layer, name, count] for (layer, name), count in block.held.items()],
            "rest": rest,
        }
    )
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return save(tensors, {"about": about, "xxh3": _checksum(about, sorted(tensors.items()))})


def decode(path: Path, identity: str, key: Key) -> KVBlock:
    """Raises OSError, SafetensorError, ValueError, KeyError, TypeError for a file that is not intact or not that
    block's."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    if metadata.get("xxh3") != _checksum(metadata.get("about", ""), tensors.items()):
        raise ValueError("its checksum is another one")
    about = json.loads(metadata["about"])
    if (about["version"], about["identity"], about["key"]) != (_VERSION, identity, key.hex()):
        raise ValueError("it is of another model, dtype, version or text")
    rest = [{name: _restored(value, tensors) for name, value in layer.items()} for layer in about["rest"]]
    held = {(layer, name): count for layer, name, count in about["held"]}
    rows = {(layer, name): tensors[f"rows/{layer}/{name}"] for layer, name in held}
    return KVBlock(about["start"], about["stop"], rows, held, rest)


def _checksum(about: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = xxhash.xxh3_128(about.encode())
    for name, tensor in tensors:
        digest.update(name.encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """An attribute as JSON; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, dict):
        return {"dict": [[key, _plain(one, f"{name}/{key}", tensors)] for key, one in value.items()]}
    if value is None or isinstance(value, int | float | str):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which cannot be written")


def _restored(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "device" in value:
        return torch.device(value["device"])
    return {key: _restored(one, tensors) for key, one in value["dict"]}
