"""What the script that goes to hosts answers on this machine, beside what the kernel and other programs say."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from odmoe.doctor import on_host
from odmoe.doctor.examination import FILE_BYTES, ON_HOST, ask_here, known_or_fault
from scheduler.errors import HostError


def test_it_is_of_python_3_7_and_the_standard_library() -> None:
    source = ast.parse(ON_HOST.read_text(), feature_version=(3, 7))
    names = {alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names}
    assert names <= sys.stdlib_module_names


def test_this_machine() -> None:
    asked = {"keys": [], "python": "/nowhere", "always": False, "commands": ["sh", "no-such"], "folder": "/"}
    found = ask_here(ON_HOST, "examine", 30, asked | {"address": "127.0.0.1", "ports": []})
    assert found["ram"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found["processor"]["threads"] == len(os.sched_getaffinity(0))
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    assert all(flag in lscpu for flag in found["processor"]["flags"])
    assert found["commands"]["sh"]
    assert found["commands"]["no-such"] is None
    assert found["kernel"]["release"] == os.uname().release


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "4000", "memory.current": "3000", "memory.stat": "inactive_file 500\n"}, (4000, 1500)),
        ({"memory.max": "max", "memory.current": "3000"}, None),
        ({"memory.limit_in_bytes": "4000", "memory.usage_in_bytes": "1000"}, (4000, 3000)),
        ({"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1000"}, None),
        ({}, None),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    """As the kernel's documents on cgroup v2 and v1 have them; a v1 group without a limit has the largest page."""
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert on_host.group_limit(str(tmp_path)) == expected


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    asked = {"folder": str(tmp_path / "not" / "there"), "bytes": 16 << 20, "seconds": 0.1}
    found = ask_here(ON_HOST, "disk", 30, asked)
    assert found["rate"] > 1e6
    assert found["source"] == "a new file"
    assert list(tmp_path.iterdir()) == []
    store = tmp_path / "stores" / "s"
    store.mkdir(parents=True)
    (store / "layer-00000.experts").write_bytes(bytes(64 << 20))
    assert ask_here(ON_HOST, "disk", 30, asked | {"folder": str(tmp_path / "stores")})["source"] == "its store"


def test_a_disk_without_room_is_not_filled(tmp_path: Path) -> None:
    found = ask_here(ON_HOST, "disk", 30, {"folder": str(tmp_path), "bytes": 1 << 60, "seconds": 0.1})
    assert "too little room" in found["fault"]
    assert FILE_BYTES < 1 << 30


def test_holes_of_a_part_are_not_read(tmp_path: Path) -> None:
    """They would take no time."""
    file = tmp_path / "layer-00000.experts"
    with file.open("wb") as stream:
        stream.truncate(8 * on_host.PIECE)
        for piece in (1, 5):
            stream.seek(piece * on_host.PIECE)
            stream.write(bytes([1]) * on_host.PIECE)
        stream.flush()
        assert on_host.pieces_there(stream.fileno(), 8 * on_host.PIECE) == [on_host.PIECE, 5 * on_host.PIECE]


@contextmanager
def sink(token: str) -> Iterator[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        asked = {"address": "127.0.0.1", "port": probe.getsockname()[1], "token": token}
    words = [sys.executable, str(ON_HOST), "sink", json.dumps(asked)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            yield asked
        finally:
            process.kill()


def test_a_link_is_measured_both_ways() -> None:
    with sink("right") as asked:
        found = on_host.link(asked)
    assert found["to"] > 1e6
    assert found["from"] > 1e6
    assert 0 < found["trip_s"] < 1


def test_a_stranger_gets_no_answer_and_the_right_one_does() -> None:
    with sink("right") as asked:
        assert "broke" in on_host.link(asked | {"token": "wrong"})["blocked"]
        assert on_host.link(asked)["to"] > 1e6


def test_a_port_that_nobody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "CONNECT_S", 0.2)
    assert "is not reached" in on_host.link({"address": "127.0.0.1", "port": 1, "token": "x"})["blocked"]


@pytest.mark.parametrize(
    ("source", "why"),
    [("import time; time.sleep(60)", "took longer than 1 s"), ("raise SystemExit('broken')", "failed: broken")],
)
def test_a_machine_that_does_not_answer_says_why(tmp_path: Path, source: str, why: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    began = time.monotonic()
    with pytest.raises(HostError, match=why):
        ask_here(script, "it", 1.0)
    assert why in known_or_fault(lambda: ask_here(script, "it", 1.0))["fault"]
    assert time.monotonic() - began < 20
