"""`odmoe plan --machine`: advice in words, as JSON, and what is said of machines that are written wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odmoe.settings.machine_texts import machines_of_hosts, parse_machines
from scheduler.errors import ConfigError
from support.machines.cli import CommandLine, check_one_line
from support.paths import CONFIGS, ROOT
from support.scheduling.homes import BASE

QWEN = str(CONFIGS / "qwen3-30b-a3b.json")
MINI = "mini x4: ram=24GB disk=3GB/s net=1Gbit memory=40GB/s"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odmoe.simulation_pool._make_pool", lambda: None)


def test_the_answer_is_a_sentence(cli: CommandLine) -> None:
    answer = cli("plan", "-m", QWEN, "--machine", MINI)
    assert (answer.code, answer.err) == (0, "")
    words = " ".join(answer.out.split())
    for part in (
        "Run fully-cached on 4 machines: the main node on mini 1's processor, experts on the processors of mini 1 to 4",
        "One machine alone, mini 1, would reach",
        "All 57.98 GB of experts stay in memory",
        "of the 96.00 GB given",
        "odmoe serve -m MODEL --cluster FILE.yaml --system fully-cached --group-size 4",
        "What would help most: a GPU of 8 GB for the dense part",
        "mini 1 to 4: disk 3 GB/s, memory 40 GB/s, link 1 Gbit/s",
        "times: those of pc-nvme-2.5gbe",
    ):
        assert part in words, part


def test_the_same_as_json(cli: CommandLine) -> None:
    answer = cli("plan", "--json", "-m", QWEN, "--machine", "pc: ram=16GB disk=2GB/s")
    assert answer.code == 0
    found = json.loads(answer.out)
    assert (found["system"], found["residency"], found["machines"]) == ("lrfu-prefetch", "lrfu", ["pc"])
    least, most = found["decode_tokens_per_s_range"]
    assert least < found["decode_tokens_per_s"] <= most
    roles = found["memory_bytes"]["pc"]
    assert sum(roles.values()) / 16e9 == pytest.approx(found["memory_used_share"])
    assert roles["worker"] >= found["workers"][0]["slots"] * found["model"]["expert_bytes"]
    assert found["does_not_fit"][0].startswith("all experts in memory: ")
    assert found["helps_most"] == max(found["changes"], key=lambda one: one["factor"])


def test_a_gpu_of_one_worker_is_said_of_its_host_alone(cli: CommandLine) -> None:
    """Memory for kept KV caches is the main node's, in the plan and in the command."""
    machines = ("--machine", "old: ram=48GB memory=20GB/s", "--machine", "gamer: ram=16GB gpu=24GB")
    answer = cli("plan", "-m", QWEN, "--kv-memory", "1GB", *machines)
    words = " ".join(answer.out.split())
    assert "and device: cuda of gamer alone" in words
    assert "--worker-device" not in words
    assert "--kv-memory 1GB" in words
    assert "main node 4.48 GB" in words


def test_a_machine_has_what_is_written() -> None:
    one, two, other = parse_machines(["pc x2: ram=32GB gpu=8GB gpu-memory=448GB/s", "mini: ram=8GiB cores=4"], BASE)
    assert (one.name, two.name, other.name) == ("pc 1", "pc 2", "mini")
    assert (one.ram, one.gpu, one.gpu_memory) == (32e9, 8e9, 448e9)
    assert (one.disk, one.memory, one.link) == pytest.approx((6e9, 64e9, 2.5e9), rel=1e-3), "the profile's"
    assert (other.ram, other.gpu, other.memory) == (8 * 2**30, 0, 32e9)


def test_the_hosts_of_a_cluster_file(cli: CommandLine) -> None:
    main, *others = machines_of_hosts(["main: ram=64GB", "rest: ram=8GB"], ["main", "shadow", "worker-0"], BASE)
    assert (main.ram, [(one.name, one.ram) for one in others]) == (64e9, [("shadow", 8e9), ("worker-0", 8e9)])
    with pytest.raises(ConfigError, match="a text for each host by its name"):
        machines_of_hosts(["main: ram=64GB"], ["main", "worker-0"], BASE)
    file = str(ROOT / "cluster.yaml")
    answer = cli("plan", "-m", QWEN, "--cluster", file, "--machine", "host: ram=8GB", "--json")
    assert answer.code == 0
    assert set(json.loads(answer.out)["machines"]) <= {"main", "shadow", *(f"worker-{n}" for n in range(8))}


def test_parts_of_the_store_are_said_or_follow_from_the_cluster_file(cli: CommandLine, tmp_path: Path) -> None:
    answer = cli("plan", "-m", QWEN, "--machine", "pc x8: ram=8GB")
    words = " ".join(answer.out.split())
    assert "Let 2 workers have each expert (replicas: 2): a worker's disk then needs 16.57 GB in place of 61." in words
    assert "disks pc 1: 61.06 GB, the whole store; pc 2 to 8: 16.57 GB, a part each" in words
    assert "odmoe shard MODEL STORE --parts 7 --replicas 2" in words
    file = tmp_path / "cluster.yaml"
    file.write_text((ROOT / "cluster.yaml").read_text().replace("  hosts:", "  replicas: 3\n  hosts:"))
    answer = cli("plan", "-m", QWEN, "--cluster", str(file), "--machine", "host: ram=8GB", "--json")
    found = json.loads(answer.out)
    assert found["replicas"] == 3
    assert sorted(found["disk_bytes"].values())[0] == -(-3 * found["store_bytes"] // (len(found["machines"]) - 1))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("pc ram=8GB", "allowed: NAME: ram=SIZE"),
        ("pc: disk=3GB/s", "--machine pc has no ram; give it, as ram=32GB"),
        ("pc: ram=8GB dsk=3GB/s", "did you mean disk?"),
        ("pc: ram=lots", "--machine has 'ram=lots'; allowed: a size such as 1GB"),
        ("pc: ram=8GB cores=0", "--machine has 'cores=0'; allowed: 1, 2, ... 9999"),
        ("pc: ram=8GB gpu-memory=300GB/s", "gpu-memory and no gpu"),
        ("pc x999: ram=8GB", "--machine has 999 machines; allowed: 1 to 256"),
    ],
)
def test_a_machine_that_is_written_wrongly(cli: CommandLine, machine: str, said: str) -> None:
    answer = cli("plan", "-m", QWEN, "--machine", machine)
    check_one_line(answer, 2, "ConfigError", [said])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--machine", MINI, "--workers", "4"], "--workers is given with --machine"),
        (["--machine", MINI, "--shadow-memory", "24GB"], "--shadow-memory is given with --machine"),
        (["--cluster", str(Path("cluster.yaml"))], "--machine does not say what its hosts are"),
        (["--machine", "pc: ram=8GB", "--machine", "pc: ram=16GB"], "two machines called pc"),
        (["--machine", "pc: ram=8GB", "--profile", "rtx3090-pcie3"], "use pc-nvme-2.5gbe"),
        (["--machine", "pc: ram=2GB"], "does not fit: all but the experts takes 3.48 GB"),
        (["--machine", "pc: ram=5GB", "--kv-memory", "4GB"], "takes 7.48 GB on one machine"),
    ],
)
def test_what_cannot_be_planned(cli: CommandLine, args: list[str], said: str) -> None:
    answer = cli("plan", "-m", QWEN, *args)
    assert answer.code != 0
    assert said in answer.err
