"""Every flag is checked before anything is loaded, and the message names flag, value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from odmoe.settings import settings as module
from odmoe.settings.declarations import CLUSTERS, DTYPES, KERNELS, LOADERS, SHADOWS
from odmoe.settings.settings import Settings
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"workers": 0}, ["--workers", "0", "allowed: 1"]),
    ({"workers": -3}, ["--workers", "-3", "allowed: 1"]),
    ({"slots": 0}, ["--slots", "0", "allowed: 1"]),
    ({"slots": "all"}, ["--slots", "'all'", "allowed: 1, 2, ... 65536, or auto"]),
    ({"slots": True}, ["--slots", "True", "or auto"]),
    ({"slots": 2, "device_memory": "25%"}, ["--device-memory is given with --slots"]),
    ({"audit": "some"}, ["--audit", "'some'", "allowed: auto, or a number from 0 to 1"]),
    ({"audit": 1.5}, ["--audit", "1.5", "from 0 to 1"]),
    ({"audit": "nan"}, ["--audit", "'nan'", "from 0 to 1"]),
    ({"audit": True}, ["--audit", "True", "from 0 to 1"]),
    ({"mini_batch": 0}, ["--mini-batch", "0", "allowed: 1"]),
    ({"max_new_tokens": 0}, ["--max-new-tokens", "0", "allowed: 1"]),
    ({"threads": 0}, ["--threads", "0", "allowed: 1"]),
    ({"group_size": 0}, ["--group-size", "0", "allowed: 1"]),
    ({"group_size": 4, "workers": 3}, ["--group-size", "4", "1 to --workers (3)"]),
    ({"align_token": -1}, ["align-token", "-1", "0 (never)"]),
    ({"align_kv": -2}, ["align-kv", "-2", "0 (never)"]),
    ({"shadow": "int3"}, ["--shadow", "'int3'", *SHADOWS]),
    ({"loader": "tape"}, ["--loader", "'tape'", *LOADERS]),
    ({"dtype": "float64"}, ["--dtype", "'float64'", *DTYPES]),
    ({"kernel": "mv"}, ["--kernel", "'mv'", *KERNELS]),
    ({"cluster": "somewhere"}, ["--cluster", "'somewhere'", *CLUSTERS, "host:port"]),
    ({"cluster": ""}, ["--cluster", "''", *CLUSTERS]),
    ({"cluster": "head:0"}, ["--cluster", "'head:0'"]),
    ({"cluster": "head:99999"}, ["--cluster", "'head:99999'"]),
    ({"shadow_hosts": 2}, ["--shadow-hosts is 2 with --cluster embedded", "--cluster local", "--shadow-device"]),
    ({"shadow_hosts": 2, "cluster": "local", "shadow": "none"}, ["--shadow-hosts is 2 without a shadow"]),
    ({"shadow_hosts": 2, "cluster": "local", "profile": "rtx3090-1gbe"}, ["--shadow-hosts is 2 with --profile"]),
    ({"cluster": ":6379"}, ["--cluster", "':6379'"]),
    ({"cluster": "head:63x"}, ["--cluster", "'head:63x'"]),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_wrong(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(model="m", **fields)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("cluster", [*CLUSTERS, "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_every_kind_of_cluster(cluster: str) -> None:
    assert Settings(model="m", cluster=cluster).cluster == cluster


def test_smallest_and_largest_that_go() -> None:
    least = Settings(
        model="m", workers=1, slots=1, group_size=1, align_token=0, align_kv=0, max_new_tokens=1, mini_batch=1
    )
    assert least.alignment == Alignment(0, 0)
    assert Settings(model="m", workers=3, group_size=3).group_size == 3


def test_only_the_exact_kernel_keeps_answers() -> None:
    assert Settings(model="m").kernel == "exact"
    assert Settings(model="m").inexact == {}
    assert Settings(model="m", kernel="fast", precision="int4").inexact == {"precision": "int4", "kernel": "fast"}


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the cores where nodes that share a machine compute at the same time, else all of them."""
    cores = 6
    monkeypatch.setattr(module, "available_cores", lambda: cores)
    assert Settings(model="m", threads=5).threads_a_node == 5
    half = 3
    for cluster, shadow, threads in (
        ("embedded", "nf4", half),
        ("embedded", "none", cores),
        ("local", "nf4", half),
        ("local", "none", half),
    ):
        assert Settings(model="m", cluster=cluster, shadow=shadow).threads_a_node == threads
    assert Settings(model="m", system="fully-cached").threads_a_node == cores
    assert Settings(model="m", cluster="head:6379").threads_a_node == cores


def test_no_library_is_imported() -> None:
    """A wrong flag answers at once."""
    heavy = {"torch", "transformers", "ray", "matplotlib"}
    code = f"import sys, odmoe.command_line, odmoe.settings.settings; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_auto_slots_are_no_number_that_was_given() -> None:
    """They may be given with the memory that they are chosen by."""
    assert not Settings(model="m", slots="auto", device_memory="25%").slots_given
    assert Settings(model="m", slots="3").slots == 3
    assert Settings(model="m", slots="3").slots_given
    assert not Settings(model="m").slots_given
