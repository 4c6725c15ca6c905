"""Everything that the flags say, checked before anything is loaded. No torch here: a wrong flag answers at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from scheduler.alignment import Alignment
from scheduler.errors import ConfigError

CLUSTERS = ("embedded", "local", "auto")
SHADOWS = ("fp16", "int8", "nf4", "none")
LOADERS = ("disk", "memory")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster and how it answers. `group_size` None: the model's top-k, at most all workers. `dtype` None: as
    stored. `store` None: found or made in the cache. `threads` None: see `threads_a_node`.
    `launch_s`: most seconds until a node is ready."""

    model: str
    store: str | None = None
    cluster: str = "embedded"
    workers: int = 8
    group_size: int | None = None
    slots: int = 1
    shadow: str = "int8"
    align_token: int = 1
    align_kv: int = 1
    dtype: str | None = None
    loader: str = "disk"
    mini_batch: int = 128
    max_new_tokens: int = 128
    threads: int | None = None
    launch_s: float = 600.0
    host: str = "127.0.0.1"
    secret: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError naming the flag, its value and what is allowed."""
        least = {"workers": 1, "slots": 1, "mini_batch": 1, "max_new_tokens": 1, "launch_s": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; allowed: {low}, {low + 1}, ...")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; allowed: 1, 2, ...")
        if self.group_size is not None and not 1 <= self.group_size <= self.workers:
            raise ConfigError(f"--group-size is {self.group_size}; allowed: 1 to --workers ({self.workers})")
        if self.cluster not in CLUSTERS and not _is_address(self.cluster):
            raise ConfigError(
                f"--cluster is {self.cluster!r}; allowed: {', '.join(CLUSTERS)} or a Ray head's host:port"
            )
        _ = self.alignment
        for name, value, allowed in (
            ("shadow", self.shadow, SHADOWS), ("loader", self.loader, LOADERS), ("dtype", self.dtype, DTYPES),
        ):  # fmt: skip
            if value is not None and value not in allowed:
                raise ConfigError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}")

    @property
    def threads_a_node(self) -> int:
        """As said, or: every core of a node's machine; half of them where all nodes share this one, since the shadow
        computes beside the others and threads that wait for a busy core cost more than they bring."""
        cores = len(os.sched_getaffinity(0))
        shared = self.cluster in ("embedded", "local")
        return self.threads or (max(1, cores // 2) if shared else cores)

    @property
    def alignment(self) -> Alignment:
        return Alignment(self.align_token, self.align_kv)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
