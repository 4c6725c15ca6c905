"""`python -m odmoe.on_ray.ray_start ...` is `ray start ...` on one host of a cluster, without Ray's two agents.

A raylet waits 15 s for its dashboard agent, a time that is fixed in its code, and ends when an agent ends. The agents
serve Ray's jobs, metrics and runtime environments, which no node of ours uses, and take 200 MB. It is made for the
pinned Ray.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import services

from odmoe.on_ray.host import kill_half_started

TRIES = 3
"""Starts of Ray on a host that is too slow for the times that Ray allows itself."""
TOO_SLOW = "timed out"
"""In Ray's own error for that."""
PAUSE_S = 1.0

AGENT = 'sh -c "while kill -0 $PPID; do sleep 1; done"'
"""In place of an agent: a raylet insists on one. It ends with the raylet."""
UNUSED = "-1"
"""The port of an agent that serves nothing, by which a raylet does not wait for it."""
COMMANDS = ("--dashboard_agent_command", "--runtime_env_agent_command")
PORTS = (
    "--metrics-agent-port",
    "--metrics_export_port",
    "--runtime_env_agent_port",
    "--dashboard_agent_listen_port",
)
T = TypeVar("T")


def without_agents(command: list[str]) -> list[str]:
    """A raylet's command line, changed so that it starts no agent and waits for none."""
    kept = [word for word in command if word.partition("=")[0] not in (*COMMANDS, *PORTS)]
    return [*kept, *(f"{name}={AGENT}" for name in COMMANDS), *(f"{name}={UNUSED}" for name in PORTS)]


@contextlib.contextmanager
def raylet_without_agents() -> Iterator[None]:
    """Within the block, Ray starts raylets in this process without agents."""
    plain = services.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **named: Any) -> Any:
        changed = without_agents(command) if process_type == "raylet" else command
        return plain(changed, process_type, *args, **named)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = plain


@contextlib.contextmanager
def kept_sigterm() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself, which then raises SystemExit. After the block, whoever handled or ignored it
    before does so again."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def start_patiently(start: Callable[[], T], say: Callable[[str], object], tries: int = TRIES) -> T:
    """What `start` returns, which starts Ray here. If Ray was too slow for its own times, it is tried again; `say` gets
    a line about that. A failed start leaves no process. Raises what `start` raises."""
    with raylet_without_agents(), kept_sigterm():
        for left in reversed(range(tries)):
            try:
                return start()
            except Exception as error:
                kill_half_started(str(Path(ray.__file__).parent))
                if not left or TOO_SLOW not in str(error):
                    raise
                say(f"Ray did not start in its time ({first_line(error)}); trying again, {left} left")
            time.sleep(PAUSE_S)
    raise ValueError(f"tries is {tries}; allowed: at least 1")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Returns the exit code of `ray start`."""
    from ray.scripts.scripts import cli

    arguments = ["start", *sys.argv[1:]]
    try:
        start_patiently(lambda: cli.main(args=arguments, prog_name="ray", standalone_mode=False), print_error)
    except Exception as error:  # noqa: BLE001 - Ray's own classes, and click's
        print_error(f"ray start failed: {first_line(error)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
