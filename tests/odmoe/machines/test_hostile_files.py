"""Cluster files that nobody meant well with: each is read, or refused by ConfigError, whatever is in it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from odmoe.machines.cluster_file import read_cluster_file
from scheduler.errors import ConfigError
from support.paths import ROOT

FILES = 120
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 1e300, float("nan"), float("inf"), "", "\0", "\ud800", "x" * 5000, "10.0.0.1"),
    *("$(id)", "-oProxyCommand=id", "../..", "10.77.0.11\n", "::1", "256.0.0.1", "0x7f.1", [], {}, [[]], [None]),
    *({"host": None}, {"host": "10.0.0.9", "slots": -1}, {"host": "10.0.0.9", "nothing": 1}, {1: 2}, [{}, []]),
)
KEYS: tuple[Any, ...] = ("", "host", "docker", "worker_node", "provider", "x" * 5000, 1, None, True, 1.5, "hosts")


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value within, by keys and places."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, one in inner for path in paths(one, (*here, key)))]


def mutated(sound: Any, rng: random.Random) -> Any:
    found = copy.deepcopy(sound)
    for _ in range(rng.choice((1, 1, 2, 4))):
        *way, last = rng.choice([path for path in paths(found) if path] or [("",)])
        parent = found
        for key in way:
            parent = parent[key]
        match rng.randrange(3):
            case 0:
                parent[last] = copy.deepcopy(rng.choice(VALUES))
            case 1 if isinstance(parent, dict):
                parent[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
            case _:
                del parent[last]
    return found


@pytest.mark.slow
def test_many_files(tmp_path: Path) -> None:
    text = (ROOT / "cluster.yaml").read_text()
    sound, file, refused = yaml.safe_load(text), tmp_path / "cluster.yaml", 0
    for seed in range(FILES):
        rng = random.Random(seed)
        if seed % 3:
            written = yaml.safe_dump(mutated(sound, rng)).encode(errors="surrogatepass")
        else:
            bits = bytearray(text.encode())
            for _ in range(rng.choice((1, 3, 30))):
                at = rng.randrange(len(bits))
                bits[at : at + rng.choice((0, 1, 9))] = rng.randbytes(rng.choice((0, 1, 4)))
            written = bytes(bits)
        file.write_bytes(written)
        try:
            cluster = read_cluster_file(file)
        except ConfigError:
            refused += 1
        else:
            assert cluster.main.role == "main_node", seed
            assert all(set(host.address) <= set("0123456789.") for host in cluster.hosts), seed
            assert not cluster.user.startswith("-"), seed
    assert refused > FILES / 2
