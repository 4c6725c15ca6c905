"""Ten hosts from nothing to nothing, on the testbed: start, tokens, traffic, faults, emulated hardware, down.

.venv/bin/python -m scripts.testbed.ten_hosts                              # all of it: about a quarter of an hour
.venv/bin/python -m scripts.testbed.ten_hosts --steps up,answers,faults    # leaves the hosts up

Makes the testbed of the cluster file (scripts.testbed, as root), brings it up with `odmoe up`, asks it as a user would.
Tokens are compared with Transformers' own (`eager`). The step `emulated` brings the hosts up with models/deep-moe on a
profile's times and has scripts.measure.agreement ask them. Results: results/ten_hosts.json, and agreement-cluster.json
beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from odmoe.machines import certs
from odmoe.machines.cluster_file import read_cluster_file
from odmoe.machines.home import cluster_dir
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEEP, DEMO, RESULTS, ROOT
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows
from scripts.testbed.kills import greedy

BIN = Path(sys.executable).parent
STEPS = ("up", "links", "answers", "traffic", "refusals", "faults", "emulated", "down")
PROFILE = "rtx3090-1gbe"
LONG = 300
BACK_S = 300.0
AGREEMENT_S = 3600.0


def embedding_bytes_per_token() -> int:
    """The traffic that the paper counts for one way between main node and workers: 32 bits an element of the hidden
    state, for each layer and each of its top-k workers."""
    config = json.loads((DEMO / "config.json").read_text())
    return 4 * int(config["hidden_size"]) * int(config["num_experts_per_tok"]) * int(config["num_hidden_layers"])


class Run:
    """One cluster file, and what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file, self.shadow = str(args.cluster.resolve()), args.shadow
        self.rows: list[dict[str, Any]] = []
        self.answers = greedy(str(DEMO), [*gsm8k_prompts(args.prompts)], LONG)
        self.texts = gsm8k_prompts(args.prompts)

    def say(self, step: str, **facts: Any) -> None:
        """Keep and show what one step found."""
        self.rows.append({"step": step, **facts})
        texts = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in facts.items()}
        shown = ", ".join(f"{name} {text}" for name, text in texts.items())
        print(f"{step}: {shown}", flush=True)

    # --- commands -----------------------------------------------------------------------------------------------

    def testbed(self, verb: str, *words: str, data: str | None = None) -> str:
        """Standard output of scripts.testbed."""
        command = [sys.executable, "-m", "scripts.testbed", verb, "--cluster", self.file, *words]
        return run(command, 120, data=data)

    def up(self, *flags: str, model: Path = DEMO, name: str = "odmoe up") -> None:
        began = time.monotonic()
        command = [str(BIN / "odmoe"), "up", self.file, "-m", str(model), "--dtype", "float32", "--threads", "1"]
        said = run([*command, "--timeout", "600", *(flags or ("--shadow", self.shadow))], 900, stderr=True)
        last = [line for line in said.splitlines() if line.startswith("ready in")][-1]
        self.say(name, seconds=time.monotonic() - began, says=last)

    def ask(self, text: str, count: int, *flags: str) -> dict[str, Any]:
        command = [str(BIN / "odmoe"), "generate", "--cluster", self.file, "--json", "--ignore-eos", "-n", str(count)]
        return dict(json.loads(run([*command, *flags, text], 600)))

    def counters(self, name: str) -> tuple[int, int]:
        """(bytes received, bytes sent) of a host's link so far."""
        found = json.loads(self.testbed("status", "--json"))["hosts"]
        host = next(one for one in found if one["host"] == name)
        return host["received_bytes"], host["sent_bytes"]

    def state(self, name: str) -> str:
        """Of a host's node, as `odmoe status` says."""
        command = [str(BIN / "odmoe"), "status", self.file, "--json"]  # exit code 1 until all is ready
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return next(str(row["state"]) for row in json.loads(done.stdout)["hosts"] if row["name"] == name)

    # --- steps --------------------------------------------------------------------------------------------------

    def step_up(self) -> None:
        began = time.monotonic()
        self.testbed("up")
        self.say("testbed up", seconds=time.monotonic() - began)
        self.up()
        began = time.monotonic()
        command = [str(BIN / "odmoe"), "generate", "--cluster", self.file, "-n", "4", "HAMLET"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asked:
            if asked.stdout is not None:
                asked.stdout.read(1)
            self.say("first token", seconds_from_the_command=time.monotonic() - began)
        nodes = json.loads(self.testbed("run", "bash", "-c", ". ~/odmoe/code/env.sh; ray list nodes --format=json"))
        roles = ("main_node", "shadow_node", "worker_node")
        alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
        found = [role for resources in alive for role in roles if role in resources]
        self.say("ray list nodes", hosts=len(found), **{role: found.count(role) for role in roles})

    def step_links(self) -> None:
        self.say("link main to worker-0", **json.loads(self.testbed("measure", "--json")))

    def step_answers(self) -> None:
        for (_, tokens), text in zip(self.answers, self.texts, strict=True):
            report = self.ask(text, 64)
            self.say(
                "answer",
                tokens_equal=report["token_ids"] == tokens[:64],
                ttft_s=report["ttft_s"],
                tokens_per_s=report["decode_tokens_per_s"],
                recall=report["recall"],
                in_time=report["recall_in_time"],
                lost=report["lost"],
            )

    def step_traffic(self) -> None:
        """What the main host's link carried for an answer, beside what the streams counted and the paper says."""
        report = self.ask(self.texts[0], 8)  # what a stream needs once is not counted
        before = self.counters("main")
        report = self.ask(self.texts[0], LONG)
        after = self.counters("main")
        calm = self.counters("main")
        time.sleep(report["decode_s"])
        idle = [there - here for here, there in zip(calm, self.counters("main"), strict=True)]
        link = [(there - here - still) / LONG for here, there, still in zip(before, after, idle, strict=True)]
        streams = report["wire_bytes_per_token"]
        self.say(
            "traffic of a token, bytes",
            streams=streams,
            paper_one_way=embedding_bytes_per_token(),
            link_in=link[0],
            link_out=link[1],
            bits_of_the_paper=32,
            bits_here=32,
        )

    def step_refusals(self) -> None:
        """What a node that does not belong hears, and what the worker's log says of it."""
        cluster = read_cluster_file(Path(self.file))
        folder = cluster_dir(cluster.name)
        with tempfile.TemporaryDirectory() as made:
            expired(folder, Path(made), cluster.find("shadow").address)
            files = {file.name: file.read_text() for file in Path(made).rglob("*") if file.is_file()}
        files["stranger.py"] = (ROOT / "scripts" / "testbed" / "stranger.py").read_text()
        unpack = (
            "import json, sys\n"
            "for name, text in json.load(sys.stdin).items():\n"
            "    with open(name, 'w') as file: file.write(text)"
        )
        worker = cluster.find("worker-0").address
        attempt = (
            "mkdir -p /tmp/stranger && cd /tmp/stranger && . ~/odmoe/code/env.sh && "
            f"python -c {shlex.quote(unpack)} && chmod 600 node.key && "
            f"python stranger.py {worker}:8701 ~/odmoe/keys /tmp/stranger; rm -r /tmp/stranger"
        )
        heard = self.testbed("run", "--on", "shadow", "bash", "-c", attempt, data=json.dumps(files))
        for line in heard.splitlines():
            self.say("refused", **json.loads(line))
        logs = "grep -h 'wire.*refused' /tmp/ray/session_latest/logs/worker*.err | tail -6"
        for line in self.testbed("run", "--on", "worker-0", "bash", "-c", logs).splitlines():
            self.say("the worker's log", says=line)

    def step_faults(self) -> None:
        host = "worker-3"
        kill = ("run", "--on", host, "pkill", "-9", "-f", "^ray::Served")
        self.disturbed("a worker's process is killed", host, kill)
        kill = ("run", "--on", "shadow", "pkill", "-9", "-f", "^ray::Served")
        self.disturbed("the shadow's process is killed", "shadow", kill)
        self.disturbed("a worker is unplugged for 20 s", host, ("unplug", host), ("plug", host), 20.0)
        self.disturbed("a worker is unplugged for 120 s", host, ("unplug", host), ("plug", host), 120.0)

    def disturbed(
        self, name: str, host: str, act: tuple[str, ...], undo: tuple[str, ...] = (), after_s: float = 0.0
    ) -> None:
        """One long answer, in whose middle something happens; then until the host's node is ready again."""
        calm = self.ask(self.texts[0], LONG)
        text, gaps, moment = self.streamed(self.texts[0], lambda: self.testbed(*act))
        if undo:
            time.sleep(max(0.0, moment + after_s - time.monotonic()))
            self.testbed(*undo)
        since = time.monotonic() if undo else moment
        while (state := self.state(host)) != "ready" and time.monotonic() - since < BACK_S:
            time.sleep(1.0)
        back_s = time.monotonic() - since
        lost = len(self.ask(self.texts[0], 8)["lost"]) - len(calm["lost"])
        self.say(
            name,
            tokens_equal=calm["token_ids"] == self.answers[0][1] and text == calm["text"],
            longest_gap_s=max(gaps),
            longest_gap_calm_s=calm["longest_gap_s"],
            lost=lost,
            state=state,
            back_after_s=back_s,
        )

    def streamed(self, text: str, act: Callable[[], object]) -> tuple[str, list[float], float]:
        """An answer as it comes, with `act` begun after its thirtieth piece: its text, the seconds between its pieces,
        and when `act` began."""
        command = [str(BIN / "odmoe"), "generate", "--cluster", self.file, "--ignore-eos", "-n", str(LONG), text]
        pieces, times, moment = [], [], 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as asked:
            if asked.stdout is None:
                raise RuntimeError("no standard output")
            acting = threading.Thread(target=act)
            while piece := os.read(asked.stdout.fileno(), 1 << 16):
                pieces.append(piece)
                times.append(time.monotonic())
                if len(pieces) == 30:
                    moment = time.monotonic()
                    acting.start()
        acting.join()
        gaps = [after - before for before, after in pairwise(times)]
        return b"".join(pieces).decode().removesuffix("\n"), gaps, moment

    def step_emulated(self) -> None:
        """The profile's hardware on ten hosts, with a model of its layers: beside the simulator and the paper."""
        # fp16: the shadow's time is the profile's whichever, and its arithmetic is what costs two cores least
        flags = ("--shadow", "fp16", "--profile", PROFILE, "--record", "yes")
        self.up(*flags, model=DEEP, name="odmoe up, emulated")
        file = os.path.relpath(self.file, ROOT)
        print(run([sys.executable, "-m", "scripts.measure.agreement", "--cluster", file], AGREEMENT_S), flush=True)
        found = json.loads((RESULTS / f"agreement-{Path(file).stem}.json").read_text())
        for row in found["rows"]:
            self.say(f"emulated: {PROFILE}, {row.pop('what')}", **row)
        for cell in found["cells"]:
            told = f"{cell['events']} events, {cell['commands']} commands"
            self.say("emulated, replayed", told=told, difference=cell["difference"])

    def step_down(self) -> None:
        began = time.monotonic()
        run([str(BIN / "odmoe"), "down", self.file], 300)
        self.say("odmoe down", seconds=time.monotonic() - began)
        self.testbed("down")
        left = [line for line in run(["ip", "-o", "link"], 10).splitlines() if "odm" in line]
        self.say("testbed down", links_left=len(left), namespaces_left=len(run(["ip", "netns"], 10).split()))


def expired(folder: Path, to: Path, address: str) -> None:
    """A certificate of the cluster's own authority, made a month ago for five days."""
    key, certificate = certs._authority(folder, 3650, [])
    now = certs._now
    certs._now = lambda: now() - datetime.timedelta(days=30)
    try:
        certs._make(to, "stranger", address, 5, key, certificate)
    finally:
        certs._now = now
    (to / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())


def run(command: list[str], deadline_s: float, stderr: bool = False, data: str | None = None) -> str:
    """A command's standard output, or both. Raises RuntimeError with the end of what it said."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline_s, check=False, cwd=ROOT, input=data or ""
    )
    if done.returncode:
        said = f"{done.stdout[-500:]}{done.stderr[-1500:]}"
        raise RuntimeError(f"{' '.join(command[:4])} ...: exit code {done.returncode}: {said}")
    return done.stdout + done.stderr if stderr else done.stdout


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--cluster", type=Path, default=ROOT / "cluster.yaml")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)}")
    parser.add_argument("--shadow", default="nf4")
    parser.add_argument("--prompts", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    header("Ten hosts of namespaces on one machine")
    made = Run(args)
    for step in args.steps.split(","):
        getattr(made, f"step_{step}")()
        save_rows("ten_hosts", made.rows)
    table = Table("step", "found")
    for row in made.rows:
        table.add_row(row["step"], ", ".join(f"{k}={v}" for k, v in row.items() if k != "step"))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
