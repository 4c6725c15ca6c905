"""Faults, lies and hostile messages against real nodes, and what of them a client notices.

.venv/bin/python -m scripts.measure.attack --quick           # two or three minutes
.venv/bin/python -m scripts.measure.attack                   # about half an hour
.venv/bin/python -m scripts.measure.attack --steps lies,away

Three workers and a shadow in processes of their own, over gRPC (`scripts/faults/`). Tokens are compared with those of
Transformers (`eager`). Results: results/attack.json. docs/promises.md has what is promised.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from scripts.faults.cluster import Seen, ask
from scripts.faults.hostile import SETTLE_S, HostileMain, RawMain, forget_peak, frames, peak_bytes
from scripts.faults.main_process import MainProcess
from scripts.faults.nodes import WORKERS, Nodes
from scripts.faults.outputs import Lie
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.testbed.kills import greedy
from wire import messages as w

STEPS = ("outputs", "lies", "deaths", "away", "shadow", "frames", "flood", "abandoned", "fuzz")
TOKENS = 16
LIES = ("zeros", "another expert", "scaled")
SHOWN = ("nan", "infinity", "bit flip")
NAMED_WITHIN = 2000
"""Tokens after which a worker that lies counts as never named."""
FLOOD_BYTES_PER_S = 64e6
ABANDONED = 60
FUZZ = ROOT / "tests" / "system" / "nodes" / "test_fuzzed_frames.py"


class Attack:
    """`rows`: figure, goal, what was measured."""

    def __init__(self, quick: bool, seed: int) -> None:
        self.quick = quick
        self.rows: list[dict[str, Any]] = []
        self._draw = random.Random(seed)
        self._answers = greedy(str(DEMO), gsm8k_prompts(3 if quick else 8), 4 * TOKENS)
        self.nodes = Nodes(DEMO)

    def show(self, figure: str, goal: str, found: str, **facts: Any) -> None:
        self.rows.append({"figure": figure, "goal": goal, "found": found, **facts})
        print(f"{figure}: {found}", flush=True)

    def ask(
        self,
        cluster: Any,
        number: int = 0,
        count: int = TOKENS,
        acts: dict[int, Callable[[], object]] | None = None,
    ) -> tuple[Seen, bool]:
        """An answer, and whether its tokens so far are right."""
        prompt, tokens = self._answers[number % len(self._answers)]
        seen = ask(cluster, prompt, count, acts)
        return seen, seen.tokens == tokens[: len(seen.tokens)] and (seen.error is not None or len(seen.tokens) == count)

    # --- wrong outputs --------------------------------------------------------------------------------------------

    def step_outputs(self) -> None:
        """One wrong element or bit, at a random element of a random computation."""
        points = 20 if self.quick else 200
        for kind in SHOWN:
            believed = failed = told = tried = 0
            cluster: Any = None
            while told < points and tried < 2 * points:
                if tried % (2 * WORKERS) == 0:  # before a worker has so many marks that it is dropped
                    self.nodes.mend()
                    cluster = self.nodes.cluster(audit=0)
                worker = self.nodes.workers[tried % WORKERS]
                worker.set("lie", Lie(kind, first=self._draw.randrange(60), count=1, seed=tried))
                seen, right = self.ask(cluster, tried)
                told += worker.told()
                worker.set("lie", None)
                believed += not right and seen.calls_itself_exact
                failed += seen.error is not None
                tried += 1
            self.nodes.mend()
            found = f"{believed} of {told} ({failed} answers failed by name)"
            self.show(f"{kind} in an output: wrong answers called exact", "0", found, points=told, believed=believed)

    def step_lies(self) -> None:
        """One worker of three lies in every output, with --audit 0.05."""
        for kind in LIES:
            counts = [self._until_named(kind, seed) for seed in range(2 if self.quick else 9)]
            found = f"median {statistics.median(counts):g}, worst {max(counts)} ({len(counts)} runs)"
            self.show(f"lies ({kind}), --audit 0.05: tokens until the worker is named", "200", found, tokens=counts)

    def _until_named(self, kind: str, seed: int) -> int:
        cluster = self.nodes.cluster(audit=0.05)
        liar = self.nodes.workers[seed % WORKERS]
        liar.set("lie", Lie(kind, seed=seed))
        count = number = 0
        while not cluster.lost and count < NAMED_WITHIN:
            seen, _ = self.ask(cluster, seed + number, 4 * TOKENS)
            count, number = count + len(seen.tokens), number + 1
        named = cluster.lost == [f"worker {seed % WORKERS}"]
        self.nodes.mend()
        return count if named else NAMED_WITHIN

    # --- nodes and links that are gone ------------------------------------------------------------------------------

    def step_deaths(self) -> None:
        """One worker of three, at a random token."""
        for fate, goal in (("kill", "0.5 s"), ("freeze", "1.5 s"), ("cut", "1.5 s")):
            gaps, calm, same = [], [], True
            for number in range(3 if self.quick else 20):
                relays = self.nodes.relays()
                cluster = self.nodes.cluster(relays=relays)
                seen, right = self.ask(cluster, number)
                same, calm = same and right, [*calm, seen.longest_gap_s]
                victim = self._draw.randrange(WORKERS)
                act = relays[victim].cut if fate == "cut" else getattr(self.nodes.workers[victim], fate)
                seen, right = self.ask(cluster, number, acts={self._draw.randrange(2, TOKENS - 2): act})
                same, gaps = same and right, [*gaps, seen.longest_gap_s]
                self.nodes.mend()
            found = (
                f"{'identical' if same else 'lost'}; longest gap: median {statistics.median(gaps):.2f} s, worst "
                f"{max(gaps):.2f} s (calm {statistics.median(calm):.2f} s)"
            )
            self.show(f"a worker: {fate}: tokens", f"identical, {goal}", found, gaps=gaps, calm=calm)

    def step_away(self) -> None:
        main = MainProcess(
            self.nodes.settings, self.nodes.store.path, [worker.address for worker in self.nodes.workers]
        )
        try:
            self._away("main node frozen for 4 s", main, main.freeze, main.thaw, 4.0)
        finally:
            main.close()
        for away_s in (0.5, 1.3, 1.6, 4.0) if self.quick else (0.5, 1.3, 1.6, 4.0, 20.0):
            relays = self.nodes.relays()
            cluster = self.nodes.cluster(relays=relays)
            self._away(
                f"all links away for {away_s:g} s",
                cluster,
                lambda relays=relays: [relay.cut() for relay in relays],
                lambda relays=relays: [relay.mend() for relay in relays],
                away_s,
            )
            self.nodes.mend()

    def _away(self, what: str, cluster: Any, go: Callable[..., Any], come: Callable[..., Any], away_s: float) -> None:
        def act() -> None:
            go()
            threading.Timer(away_s, come).start()

        seen, right = self.ask(cluster, acts={5: act})
        told = f"{type(seen.error).__name__}" if seen.error else "identical" if right else "wrong"
        self.show(f"{what}: tokens", "identical", f"{told}, longest gap {seen.longest_gap_s:.2f} s")

    def step_shadow(self) -> None:
        for fault in (None, "silent"):
            self.nodes.shadow.set("predictions", fault)
            cluster = self.nodes.cluster(shadow=True)
            held = []
            for number in range(5):
                seen, right = self.ask(cluster, number)
                gaps = [after - before for before, after in zip(seen.times, seen.times[1:], strict=False)][1:-2]
                held.append(seen.held_back_s - statistics.median(gaps))
                if not right:
                    raise RuntimeError(f"{seen.tokens}, {seen.error}")
            found = f"{1e3 * statistics.median(held):.0f} ms, worst {1e3 * max(held):.0f} ms"
            self.show(f"{fault or 'sound'} shadow: last token held back", "100 ms", found, held_back_s=held)
            self.nodes.mend()

    # --- memory -----------------------------------------------------------------------------------------------------

    def step_frames(self) -> None:
        worker = self.nodes.workers[0]
        worst = 0
        for name, (rows, weights) in frames(self.nodes.store).items():
            main = RawMain(worker.address, self.nodes.store)
            layer = self.nodes.store.manifest.moe_layers[0]
            main.send(w.Load(1, 0, layer, 0))
            main.wait(w.Loaded)
            before = forget_peak(worker.pid)
            main.compute(layer, 0, rows, weights)
            answer = main.answer()
            time.sleep(SETTLE_S)
            grown = peak_bytes(worker.pid) - before
            worst = max(worst, grown)
            print(f"  {name}: {grown / 1e6:.1f} MB; {answer:.150}", flush=True)
            main.close()
            if not worker.process.is_alive():
                self.nodes.mend()
        goal = f"{2 * w.MAX_MESSAGE_BYTES / 1e6:.0f} MB"
        self.show("memory that one hostile frame claims", goal, f"{worst / 1e6:.1f} MB", bytes=worst)

    def step_flood(self) -> None:
        """Valid computations of an expert that is being loaded again and again, as fast as the link takes them."""
        worker, store = self.nodes.workers[0], self.nodes.store
        hidden, size = int(store.manifest.config["hidden_size"]), w.DTYPE_BYTES[store.manifest.dtype]
        rows = int(store.manifest.config["max_position_embeddings"])
        main = HostileMain(worker.address, store)
        worker.set("slowness", 1000)
        before = forget_peak(worker.pid)
        layer, expert = main.load()
        tensors = (
            w.Tensor(store.manifest.dtype, (rows, hidden), bytes(rows * hidden * size)),
            w.Tensor(store.manifest.dtype, (rows,), bytes(rows * size)),
        )
        sent, end = 0, time.monotonic() + (10.0 if self.quick else 60.0)
        while time.monotonic() < end and main.send(w.Compute(sent + 1, 0, layer, expert, *tensors, False)):
            sent += 1
            time.sleep(rows * hidden * size / FLOOD_BYTES_PER_S)  # faster, our own end would give up
        main.settle()
        grown = peak_bytes(worker.pid) - before
        stated = main.ready.queue_bytes
        found = f"{grown / 1e6:.0f} MB for {sent * rows * hidden * size / 1e6:.0f} MB sent; ended by: {main.error}"
        self.show("memory that a flood of valid frames claims", f"stated: {stated / 1e6:.0f} MB", found, bytes=grown)
        main.close()
        worker.restart()

    # --- clients ----------------------------------------------------------------------------------------------------

    def step_abandoned(self) -> None:
        settings = Settings(model=str(DEMO), workers=WORKERS, threads=1, shadow="none", loader="memory")
        cluster = EmbeddedCluster(settings, self.nodes.store)
        gc.disable()
        try:
            for number in range(ABANDONED):
                answer = cluster.generate(self._answers[0][0], TOKENS, ignore_eos=True)
                for _ in range(1 + number % 3):
                    next(answer)
                del answer
            end = time.monotonic() + 10.0
            while cluster.main.engine.core.stats and time.monotonic() < end:
                time.sleep(0.01)
            left = len(cluster.main.engine.core.stats)
        finally:
            gc.enable()
            cluster.close()
        self.show("abandoned iterators left open with collection off", "0", f"{left} of {ABANDONED}", left=left)

    def step_fuzz(self) -> None:
        """What the fuzz tests print."""
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(FUZZ)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
        for line in re.findall(r"^.* frames in .*$", done.stdout, re.M):
            self.show("fuzz", "no crash, memory flat", line.strip(". "))
        if done.returncode:
            self.show("fuzz", "no crash, memory flat", f"failed: {done.stdout[-500:]}")

    def close(self) -> None:
        self.nodes.mend()
        self.nodes.close()


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer points, seeds and seconds")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    args = parser.parse_args()
    if unknown := set(args.steps.split(",")) - set(STEPS):
        parser.error(f"--steps has {', '.join(sorted(unknown))}; allowed: {', '.join(STEPS)}")
    return args


def main() -> None:
    args = parse()
    header("Faults, lies and hostile messages")
    prepare_process()
    prepare_libraries(1)
    attack = Attack(args.quick, args.seed)
    try:
        for step in args.steps.split(","):
            getattr(attack, f"step_{step}")()
            save_rows("attack", attack.rows)
    finally:
        attack.close()
    columns = [Column("figure", "figure"), Column("at least", "goal"), Column("found", "found")]
    print("\n" + text_table(columns, attack.rows))


if __name__ == "__main__":
    main()
