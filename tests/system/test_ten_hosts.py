"""From nothing to nothing on ten hosts: the testbed, plain `ray up`, an answer, a worker lost and found, `ray down`.

Skipped where a machine may not make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.paths import DEMO, ROOT

BIN = Path(sys.executable).parent
TESTBED = [sys.executable, "-m", "scripts.testbed"]
TOKENS = 32
LONG = 96
BACK_S = 180.0


def why_not() -> str:
    """Why this machine cannot make hosts; empty where it can."""
    done = subprocess.run([*TESTBED, "check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or "scripts.testbed check fails"


class Hosts:
    """Ten hosts in a network of their own, so that nobody's testbed is disturbed."""

    def __init__(self, folder: Path) -> None:
        self.file, self.temporary = folder / "cluster.yaml", folder / "temporary"
        text = (ROOT / "cluster.yaml").read_text().replace("10.77.0.", "10.79.47.")
        text = text.replace("cluster_name: odmoe", "cluster_name: odmoe-ten").replace(
            "~/.ssh/odmoe", str(folder / "key")
        )
        self.file.write_text(text)
        self.environment = os.environ | {"XDG_CONFIG_HOME": str(folder / "config"), "RAY_TMPDIR": str(folder)}

    def testbed(self, verb: str, *words: str) -> str:
        return self.call([*TESTBED, verb, "--cluster", str(self.file), *words], 120)

    def on(self, host: str, command: str) -> str:
        """What a shell command says on a host."""
        return self.testbed("run", "--on", host, "bash", "-c", command)

    def odmoe(self, *words: str, deadline_s: float = 300) -> str:
        return self.call([str(BIN / "odmoe"), *words], deadline_s)

    def ray(self, verb: str) -> str:
        """In a directory for temporary files of its own: in the common one, `ray up` may find the configuration of an
        earlier run, kept under a hash of the cluster file, and take that."""
        self.temporary.mkdir(exist_ok=True)
        command = [str(BIN / "ray"), verb, "-y", str(self.file)]
        return self.call(command, 240, TMPDIR=str(self.temporary))

    def ask(self, text: str, count: int, *flags: str) -> dict[str, Any]:
        answer = self.odmoe(
            "generate", "--cluster", str(self.file), "--json", "--ignore-eos", "-n", str(count), *flags, text
        )
        return dict(json.loads(answer))

    def streamed(self, text: str, count: int, act: Callable[[], object]) -> str:
        """An answer's text; `act` begins when it has begun to come."""
        command = [str(BIN / "odmoe"), "generate", "--cluster", str(self.file), "--ignore-eos", "-n", str(count), text]
        pieces = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=self.environment, cwd=ROOT) as asked:
            assert asked.stdout is not None
            acting = threading.Thread(target=act)
            while piece := os.read(asked.stdout.fileno(), 1 << 16):
                pieces.append(piece)
                if len(pieces) == 10:
                    acting.start()
        acting.join()
        return b"".join(pieces).decode().removesuffix("\n")

    def states(self) -> dict[str, str]:
        """Of every host, by name."""
        command = [str(BIN / "odmoe"), "status", str(self.file), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=self.environment)
        return {row["name"]: row["state"] for row in json.loads(done.stdout)["hosts"]}

    def call(self, command: list[str], deadline_s: float, **environment: str) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env=self.environment | environment,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    made = Hosts(tmp_path_factory.mktemp("ten"))
    try:
        made.testbed("up")
        yield made
    finally:
        made.testbed("down")


pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_ray_up_brings_up_ten_hosts_each_with_its_role(hosts: Hosts) -> None:
    hosts.ray("up")
    deadline = time.monotonic() + 240
    roles: list[str] = []
    while len(roles) < 10 and time.monotonic() < deadline:
        nodes = json.loads(hosts.on("main", ". ~/odmoe/code/env.sh; ray list nodes --format=json"))
        alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
        roles = [role for found in alive for role in ("main_node", "shadow_node", "worker_node") if role in found]
        time.sleep(3)
    assert sorted(roles) == ["main_node", "shadow_node", *["worker_node"] * 8]


def test_the_tokens_are_those_of_transformers(hosts: Hosts, gsm8k: list[str], reference: Any) -> None:
    """The first `generate` with a model brings keys and store to the hosts and starts the nodes."""
    how = ("-m", str(ROOT / "models" / "demo-moe"), "--dtype", "float32", "--threads", "1", "--shadow", "nf4")
    report = hosts.ask(gsm8k[0], TOKENS, *how)
    assert report["token_ids"] == reference("float32", 0, TOKENS).tokens
    assert report["exact"]
    assert report["recall"] > 0.9
    assert report["resident_experts_max"] == [1] * 8
    assert set(hosts.states().values()) == {"ready"}
    assert report["wire_bytes_per_token"]["to_workers"] >= 192 * 4 * 8 * 2  # hidden size, float32, layers, top-k


def test_a_worker_is_unplugged_within_an_answer_and_comes_back(hosts: Hosts, gsm8k: list[str], reference: Any) -> None:
    text = AutoTokenizer.from_pretrained(DEMO).decode(reference("float32", 1, LONG).tokens)
    assert hosts.streamed(gsm8k[1], LONG, lambda: hosts.testbed("unplug", "worker-5")) == text
    time.sleep(1)
    assert hosts.states()["worker-5"] != "ready"
    hosts.testbed("plug", "worker-5")
    deadline = time.monotonic() + BACK_S
    while hosts.states()["worker-5"] != "ready" and time.monotonic() < deadline:
        time.sleep(2)
    report = hosts.ask(gsm8k[0], TOKENS)
    assert report["token_ids"] == reference("float32", 0, TOKENS).tokens
    assert report["lost"].count("worker 5") == report["rejoined"].count("worker 5") > 0


def test_the_main_process_is_killed_and_the_next_answer_finds_it_again(
    hosts: Hosts, gsm8k: list[str], reference: Any
) -> None:
    hosts.on("main", "pkill -9 -f '^ray::Main'")
    report = hosts.ask(gsm8k[0], TOKENS)
    assert report["token_ids"] == reference("float32", 0, TOKENS).tokens


def test_other_settings_than_the_served_ones_are_refused(hosts: Hosts) -> None:
    command = [str(BIN / "odmoe"), "generate", "--cluster", str(hosts.file), "--slots", "2", "HAMLET"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=hosts.environment)
    assert done.returncode == 1
    assert "LaunchError: the cluster serves with --slots 1, not 2; odmoe up" in done.stderr


def test_ray_down_leaves_no_process_on_any_host(hosts: Hosts) -> None:
    hosts.ray("down")
    deadline = time.monotonic() + 60
    left = {"?": {"?": 1}}
    while left and time.monotonic() < deadline:
        time.sleep(2)
        found = json.loads(hosts.testbed("status", "--json"))["hosts"]
        left = {host["host"]: host["ray"] for host in found if host["ray"]}
    assert not left
