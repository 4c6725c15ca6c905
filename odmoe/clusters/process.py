"""The preparations of every process of OD-MoE."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odmoe.clusters.hqq_import import postpone_hqq
from odmoe.log_thread import LOG_TIME
from scheduler.errors import LaunchError
from scheduler.one_line import one_line

OUR_PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
"""Their warnings are shown; of the libraries, only errors."""


class OneLineFormatter(logging.Formatter):
    """A record's message is one line, whatever others have put into it, and so is each line of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(one_line, super().formatException(ei).split("\n")))


def prepare_process(debug: bool = False, timed: bool = False) -> None:
    """Silence the libraries, unless `debug`, and postpone those that a start does not need. Call it before
    Transformers' models are imported. `timed`: lines of the log begin with the time, as those of processes that last
    need it."""
    prepare_imports(debug)
    level = logging.DEBUG if debug else logging.ERROR
    first = "%(asctime)s " if timed else ""
    handler = logging.StreamHandler()
    form = OneLineFormatter(f"{first}%(levelname)s %(name)s: %(message)s", LOG_TIME)
    form.converter = time.gmtime
    handler.setFormatter(form)
    logging.basicConfig(level=level, handlers=[handler])
    for ours in OUR_PACKAGES:
        logging.getLogger(ours).setLevel(logging.DEBUG if debug else logging.WARNING)


def prepare_imports(debug: bool = False) -> None:
    """What of `prepare_process` a Python program may have done to it: nothing about logging, which is its own."""
    postpone_hqq()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # gRPC's handlers of fork abort a child that is forked while a call runs, and ray.init forks its processes.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if not debug:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # for processes of Ray too, which import gRPC before us
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


_OF_RAY = (
    *("RAY_ENABLE_AUTO_CONNECT", "RAY_DEDUP_LOGS", "RAY_DEDUP_LOGS_SKIP_REGEX", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
    *("RAY_IGNORE_UNHANDLED_ERRORS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"),
    "RAY_memory_monitor_refresh_ms",
)
"""Variables that are set for Ray."""
_RAY_TOKEN = secrets.token_hex(32)
"""Of every Ray that this process starts: Ray keeps the first one."""
_ray_held = threading.Lock()


@contextlib.contextmanager
def held_ray(cluster: str) -> Iterator[None]:
    """Within the block this process uses Ray for one cluster, with the environment that Ray needs for it; then the
    environment is as before. Raises LaunchError where it uses Ray for another one."""
    if not _ray_held.acquire(blocking=False):
        raise LaunchError(
            f"--cluster is {cluster}, and this process uses Ray for another model; it can have one at a time: close "
            "that model first, or load this one in a process of its own"
        )
    before = {name: os.environ[name] for name in _OF_RAY if name in os.environ}
    try:
        prepare_ray(cluster)
        yield
    finally:
        for name in _OF_RAY:
            os.environ.pop(name, None)
        os.environ.update(before)
        _ray_held.release()


def prepare_ray(cluster: str) -> None:
    """Set Ray's authentication and logging. Call it before ray is first imported, which is when Ray reads them.

    Ray listens on every interface even on one machine, so `local` gets a token of its own that keeps others out.
    A running cluster has its own authentication (RAY_AUTH_MODE and RAY_AUTH_TOKEN, or ~/.ray/auth_token).
    """
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # otherwise a call after the shutdown would start another Ray
    # Ray prints "A worker died" to standard output, into the answer, whatever `log_to_driver` says.
    os.environ["RAY_DEDUP_LOGS"] = "1"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    if cluster == "local":
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", _RAY_TOKEN)
        # Ray would kill our processes, the main node too, when other programs have taken 95 % of the memory. The kernel
        # kills when none is left, and in the order of `prefer_as_victim`.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")


VICTIM_POINTS = {"main": 0, "worker": 300, "shadow": 600}
"""What the kernel adds to a node's share of the memory, in thousandths, when it chooses a process to kill."""


def prefer_as_victim(role: str) -> None:
    """Have the kernel kill the shadow before workers, and these before the main node, when memory runs out. Ray starts
    all its processes as the first victims. Does nothing where the kernel does not allow it."""
    with contextlib.suppress(OSError, ValueError):
        base = int(Path(f"/proc/{os.getppid()}/oom_score_adj").read_text())
        Path("/proc/self/oom_score_adj").write_text(str(min(1000, base + VICTIM_POINTS[role])))


VECTOR_MATH = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan"),
    *("tanh", "trunc"),
)
"""The functions of `ATen/cpu/vml.h` that MKL computes."""


def prepare_libraries(threads: int) -> None:
    """Disable progress bars and set the number of threads. Imports torch and Transformers.

    The last bits of float32 sums depend on the number of threads, so nodes of one kind must use the same number.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from checkpoint.native.threads import start_threads

    torch.set_num_threads(threads)
    _resolve_vector_math()
    start_threads(threads)
    transformers_logging.disable_progress_bar()


def _resolve_vector_math() -> None:
    """Call every function that torch takes from MKL's vector mathematics once, in one thread.

    MKL chooses a function's kernel at the first call. Of several first calls at once, one may compute with a kernel of
    low accuracy (https://github.com/pytorch/pytorch/issues/188792). Workers and main node begin at once: logits of a
    process's first answer were wrong by 1e-4, in one of some twenty starts on a busy machine.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_MATH:
            getattr(torch, name)(one)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the block. In other threads than the main one, which gets all signals, this does
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
