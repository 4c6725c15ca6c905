"""The table of hosts, as a terminal shows it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.table import HostTable
from support.machines.pretended_cluster import snapshot
from support.machines.ssh_hosts import write_cluster_file


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterFile:
    return write_cluster_file(tmp_path, tuple(f"127.0.99.{n}" for n in (1, 2, 3, 4)), tmp_path / "key")


def test_the_table_in_a_terminal(cluster: ClusterFile) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    table = HostTable(console, cluster)
    with table.show():
        table.update(
            snapshot(
                cluster,
                ["ready", "lost", "ready", "starting"],
                **{"shadow": {"heartbeat_s": 70.4}, "worker-1": {"detail": "[bold]an [/] odd text"}},
            )
        )
    drawn = [line for line in out.getvalue().splitlines() if "127.0.99." in line]
    assert "shadow (127.0.99.2): no heartbeat for 70 s" in drawn
    assert "worker-1 (127.0.99.4): [bold]an [/] odd text" in drawn
    assert "0.31 ms" in next(line for line in drawn if "worker-0" in line)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_terminal_has_a_line_a_host_and_cuts_no_figure(cluster: ClusterFile, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width)
    table = HostTable(console, cluster)
    full = {"loader": "memory", "load_bytes_per_s": 12.34e9, "round_trip_s": 0.01234, "device": "AMD EPYC, 2 cores"}
    why = "it does not answer ssh; see that it is switched on, that its cable is in and that no firewall is in between"
    odd = {"store": "a-model-bfloat16-2-0123456789abcdef", "ray": "missing", "state": "unreachable", "detail": why}
    table.update(snapshot(cluster, ["ready"] * 4, **{"worker-0": full, "worker-1": full | odd}))
    console.print(table.draw())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[1:5]] == [host.name for host in cluster.hosts]
    assert all("memory 12.34 GB/s" in line and "12.34 ms" in line for line in lines[3:5])
    assert "unreachable missing a-model-bfl" in " ".join(lines[4].split())
    assert " ".join(" ".join(lines[5:]).split()) == f"worker-1 (127.0.99.4): {why}"
    assert ("AMD EPYC, 2 cores" in lines[3]) == (width == 160)
