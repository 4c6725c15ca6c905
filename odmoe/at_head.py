"""`python -m odmoe.at_head` runs on the main host and carries out one request of the launching machine, a JSON
line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from odmoe.clusters.process import prepare_process, prepare_ray
from odmoe.commands.shared.exit import outcome
from odmoe.json_log import use_json_log
from odmoe.machines.head import KEYS, SILENT_S, STOP
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.derived import OUTPUT_FILES
from odmoe.settings.settings import Settings
from odmoe.settings.sources import merge_sources

if TYPE_CHECKING:
    from odmoe.serve.key_ring import KeyRing

AGAIN_S = 1.0
"""Between the interrupts of a service that is to end at once."""


def settings_here(given: dict[str, Any]) -> Settings:
    """The launching machine's settings, with directories and ports from this host's environment."""
    return merge_sources(given).settings


def _generate(request: dict[str, Any]) -> int:
    """Answer the prompts of a request, as `odmoe.commands.over_ssh.generate` writes it. Returns the exit code."""

    def work() -> int:
        from odmoe.commands.generate import run_generate
        from odmoe.terminal import Output

        given = request["settings"]
        given |= {name: os.path.expanduser(given[name]) for name in OUTPUT_FILES if name in given}
        settings = settings_here({**given, "cluster": "auto"})
        output = Output(**request["output"])
        run_generate(settings, request["prompts"], output, request["listed"], request.get("cluster_name"))
        return 0

    return outcome(work, bool(request["output"]["json"]))


def _chaos(request: dict[str, Any]) -> int:
    """Disturb this cluster, as `odmoe chaos` asks for. Returns the exit code."""

    def work() -> int:
        from odmoe.commands.chaos import Chaos, run_chaos

        settings = settings_here({**request["settings"], "cluster": "auto"})
        return 0 if run_chaos(settings, Chaos(**request["chaos"])) else 1

    return outcome(work, bool(request["chaos"]["as_json"]))


def _serve(request: dict[str, Any]) -> int:
    """Serve as `odmoe.commands.over_ssh.serve` asks for, to this host alone. Says on standard output where, in a JSON
    line. Returns the exit code."""

    from odmoe.serve.key_ring import KeyRing

    ring = KeyRing(_keys_of(request["keys"]))
    threading.Thread(target=_follow_signals, args=(ring,), daemon=True).start()

    def announce(name: str, address: tuple[str, int]) -> None:
        print(json.dumps({"name": name, "port": address[1]}), flush=True)

    def work() -> int:
        from odmoe.serve.start import run_serve
        from odmoe.settings.serve_settings import ServeSettings
        from odmoe.terminal import Output

        settings = settings_here({**request["settings"], "cluster": "auto"})
        own = ServeSettings(**request["service"])
        if own.log_format == "json":
            use_json_log()
        return run_serve(settings, own, ring, Output(**request["output"]), announce)

    return outcome(work)


def _keys_of(texts: list[dict[str, Any]]) -> list[ApiKey]:
    return [ApiKey(**one) for one in texts]


def _follow_signals(ring: KeyRing) -> None:
    """Interrupt this process once for each line about a signal at the launching machine; take the keys that it has read
    again. When standard input ends, or
    says nothing for `SILENT_S`, nobody can reach the service any more: then twice, which ends it at once."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while line := lines.get(timeout=SILENT_S):
            if line == STOP:
                os.kill(os.getpid(), signal.SIGINT)
            elif line.startswith(KEYS):
                ring.replace(_keys_of(json.loads(line.removeprefix(KEYS))))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), signal.SIGINT)


def _follow_launcher() -> None:
    """Interrupt this process when standard input ends, because the launching machine has disconnected."""
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    """Returns the exit code; 130 if the launching machine has disconnected."""
    prepare_ray("auto")
    line = sys.stdin.readline()
    if not line:
        return 130
    request = json.loads(line)
    prepare_process(timed=request.get("do") == "serve")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.get("do") == "serve":
        return _serve(request)
    threading.Thread(target=_follow_launcher, daemon=True).start()
    if request.get("do") == "generate":
        return _generate(request)
    if request.get("do") == "chaos":
        return _chaos(request)
    from odmoe.on_ray.head import serve

    return serve(request, settings_here)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)  # without waiting for Ray's threads
