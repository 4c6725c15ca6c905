"""What the page costs: frames a second and processor time of Chromium, and the service's share of a core for it.

A scheduler core runs at a steady speed without a model: each layer is predicted, loaded, gated and computed. Its
service, its feed and its page are the real ones. The feed's share is the processor time of the service's threads with a
viewer, less that without one, in turns. The engine's is what following the gates of a token takes longer, times the
tokens that are followed in a second. Chromium is headless and has no GPU, so that its processor draws every frame.

    .venv/bin/python -m scripts.measure.page
    .venv/bin/python -m scripts.measure.page --layers 61 --experts 256 --top-k 8
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from main_node.engine import activity_watch
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

SETTLE_S = 2.0
FOLLOWED_TOKENS, FOLLOWING_RUNS = 100, 9
ACCESSES_S = activity_watch.ACCESSES_S
FRAMES = """
window.frames_drawn = 0;
const request = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (act) => request((time) => { window.frames_drawn += 1; act(time); });
"""


class PacedCore:
    """A scheduler core at so many tokens/s, as `Cluster` shows it to the page."""

    def __init__(self, layers: int, experts: int, top_k: int, workers: int, tokens_per_s: float) -> None:
        from main_node.engine.activity_watch import ActivityWatch
        from main_node.totals import Totals
        from scheduler import types as t
        from scheduler.alignment import Alignment
        from scheduler.core.groups import RoundRobin
        from scheduler.core.machine import Core

        self.t = t
        self.shape = t.ModelShape(tuple(range(layers)), experts, top_k)
        self.core = Core(self.shape, RoundRobin(min(workers, 2)), Alignment())
        self.watch, self.totals = ActivityWatch(self.core, self._leave), Totals()
        self.lock = threading.Lock()
        self.is_watched = False
        self.workers, self.rate = workers, tokens_per_s
        self.is_busy = threading.Event()
        self._rng = random.Random(0)
        for number in range(workers):
            self._post(t.WorkerJoined(number, max(1, top_k // 2)))
        self._post(t.ShadowJoined())
        threading.Thread(target=self._run, daemon=True).start()

    def _post(self, event: Any) -> None:
        """Every command is answered at once."""
        events = [event]
        while events:
            first = events.pop(0)
            now = time.monotonic()
            commands = self.core.handle(first, now)
            if self.is_watched:
                self.watch.on_handled(first, now, commands)
            for one in commands:
                if isinstance(one, self.t.Load):
                    events.append(self.t.LoadEnded(one.load_id, 1))
                elif isinstance(one, self.t.Compute):
                    events.append(self.t.ComputeEnded(one.call_id))

    def _leave(self) -> None:
        self.is_watched = False

    def _run(self) -> None:
        while True:
            self.is_busy.wait()
            self.open()
            due, index = time.monotonic(), 0
            while self.is_busy.is_set():
                self.token(index)
                index, due = index + 1, due + 1 / self.rate
                time.sleep(max(0.0, due - time.monotonic()))
            with self.lock:
                self._post(self.t.RequestClosed(1))

    def open(self) -> None:
        with self.lock:
            self._post(self.t.RequestOpened(1, 4))

    def token(self, index: int) -> None:
        t, position = self.t, 4 + index
        with self.lock:
            self._post(t.TokenDecoded(1, index))
            self._post(t.StepStarted((t.Pass(1, position, 1, False),)))
            chosen = [self._draw() for _ in self.shape.layers]
            for layer in self.shape.layers:
                if self._rng.random() < 0.9:
                    self._post(t.Predicted(1, position, layer, chosen[layer]))
                self._post(t.GateFired(t.Visit(1, position, layer), tuple((expert, 1) for expert in chosen[layer])))
            self.totals.answer_tokens += 1

    def _draw(self) -> tuple[int, ...]:
        return tuple(sorted(self._rng.sample(range(self.shape.experts), self.shape.top_k)))

    def activity(self, since: int | None) -> Any:
        with self.lock:
            self.is_watched = True
            from main_node.activity import Activity, WorkerActivity

            accesses, done = self.watch.read(since), self.totals.answer_tokens
            workers = tuple(WorkerActivity(one, 1, done, done / 50, done, done / 100) for one in range(self.workers))
            watch = self.watch
            return Activity(watch.count, accesses, time.monotonic(), workers, watch.predictions, self.totals.copy())

    def figures(self) -> Any:
        from main_node.figures import Figures, NodeFigures

        nodes = [NodeFigures("main", 0, True, "here", "cpu", memory_bytes=1 << 30)]
        nodes += [
            NodeFigures("worker", number, True, "here", "cpu", slots=1, memory_bytes=1 << 28)
            for number in range(self.workers)
        ]
        return Figures(1, 0, self.totals.copy(), None, tuple(nodes))  # type: ignore[arg-type]

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        return 0, []

    def serves(self) -> Any:
        from odmoe.settings.settings import Settings

        return Settings(model=str(DEMO))

    def close(self) -> None:
        self.is_busy.clear()


def serve(core: PacedCore) -> str:
    """The service of a model that is never asked, with this core as its cluster. Returns its address."""
    from odmoe.api.model import Model, open_model
    from odmoe.serve.app import Access, make_app
    from odmoe.serve.lifetime import HttpServer
    from odmoe.serve.page import routes
    from odmoe.serve.start import make_service
    from odmoe.settings.serve_settings import ServeSettings
    from odmoe.settings.settings import Settings
    from odmoe.terminal import Terminal

    opened = open_model(Settings(model=str(DEMO), shadow="none"), Terminal(quiet=True, debug=False))
    service = make_service(Model(opened, core), ServeSettings())  # type: ignore[arg-type]
    described = routes.describe_cluster(service)
    described |= {"layers": core.shape.layers, "experts": [core.shape.experts] * len(core.shape.layers)}
    routes.describe_cluster = lambda service: described
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()[:2]
    server = HttpServer(make_app(service, Access()), service, listening, 0.0)
    threading.Thread(target=server.run, name="service", daemon=True).start()
    return f"http://{host}:{port}"


def chromium_s() -> float:
    """Processor time of all of Chromium's processes so far, in seconds."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "chrom" in process.name():
                times = process.cpu_times()
                found += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


def feed_s() -> float:
    """Of the service's and the feed's threads in this process. The kernel counts it in nanoseconds."""
    found = 0
    for thread in threading.enumerate():
        if thread.name in ("odmoe-page", "service"):
            with contextlib.suppress(OSError):  # it has ended
                found += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return found / 1e9


class Cost(NamedTuple):
    """Frames a second, and shares of a core."""

    frames: float
    chromium: float
    service: float


def measure(page: Any, seconds: float) -> Cost:
    """Without a page: what the service needs for itself."""
    frames: Callable[[], float] = lambda: float(page.evaluate("window.frames_drawn")) if page else 0.0  # noqa: E731
    before = frames(), chromium_s(), feed_s(), time.monotonic()
    time.sleep(seconds)
    after = frames(), chromium_s(), feed_s(), time.monotonic()
    passed = after[3] - before[3]
    return Cost(*((one - other) / passed for one, other in zip(after[:3], before[:3], strict=True)))


def following_s(args: Any) -> float:
    """What the engine's thread needs longer for a token if every gate is followed: a median of alternated runs."""
    core = PacedCore(args.layers, args.experts, args.top_k, args.workers, args.rate)
    core.open()
    activity_watch.ACCESSES_S = 1e9
    index, found = 0, []
    for _ in range(FOLLOWING_RUNS):
        each = []
        for is_watched in (False, True):
            core.activity(0)  # for five seconds
            core.is_watched = is_watched
            began = time.thread_time()
            for _ in range(FOLLOWED_TOKENS):
                core.token(index)
                index += 1
            each.append((time.thread_time() - began) / FOLLOWED_TOKENS)
        found.append(each[1] - each[0])
    return statistics.median(found)


def observe(browser: Any, url: str, args: Any) -> dict[str, float]:
    """With a page and without one, in turns."""
    alone, seen = [], []
    for _ in range(args.turns):
        alone.append(measure(None, args.seconds).service)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(FRAMES)
        page.goto(url)
        page.wait_for_selector(".node")
        time.sleep(SETTLE_S)
        seen.append(measure(page, args.seconds))
        page.close()
        time.sleep(activity_watch.WATCHED_S + 1)  # until it is watched no more
    return {
        "frames": statistics.median(one.frames for one in seen),
        "chromium": statistics.median(one.chromium for one in seen),
        "alone": statistics.median(alone),
        "service": statistics.median(one.service for one in seen) - statistics.median(alone),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--experts", type=positive, default=8)
    parser.add_argument("--top-k", type=positive, default=2)
    parser.add_argument("--workers", type=positive, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens/s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--turns", type=positive, default=2, help="with a page and without one")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        sys.exit("there is no chromium; install it: apt-get install chromium")
    header("What the page costs")
    core = PacedCore(args.layers, args.experts, args.top_k, args.workers, args.rate)
    follow_s = following_s(args)
    followed = min(1.0, ACCESSES_S / (args.rate * args.layers * args.top_k))
    url, rows = serve(core), []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for busy in (False, True):
            core.is_busy.set() if busy else core.is_busy.clear()
            time.sleep(SETTLE_S)
            what = f"{args.rate:g} tokens/s" if busy else "idle"
            engine = follow_s * args.rate * followed if busy else 0.0
            rows.append({"cluster": what, "engine": engine, **observe(browser, url, args)})
        browser.close()
    columns = [
        Column("cluster", "cluster"),
        Column("frames/s", "frames", ".0f"),
        Column("Chromium, % of a core", "chromium", ".1f", 100),
        Column("feed, % of a core", "service", ".2f", 100),
        Column("engine, % of a core", "engine", ".2f", 100),
        Column("service without a page", "alone", ".2f", 100),
    ]
    print(text_table(columns, rows))


if __name__ == "__main__":
    main()
