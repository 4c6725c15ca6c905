"""Where memory groups may be made, for both versions, and that the kernel keeps their limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.peers.groups import Groups, Refused, find_groups


def machine(tmp_path: Path, mounts: str, own: str) -> Path:
    """What /proc/self would say."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mounts").write_text(mounts.format(tmp_path))
    (proc / "cgroup").write_text(own)
    return proc


def test_version_1_limits_memory_and_swap_below_its_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "memory" / "user" / "me"
    own.mkdir(parents=True)
    made = Path.mkdir

    def mkdir(path: Path, *args: object, **more: object) -> None:
        made(path)
        if path.parent == own:  # as the kernel does
            for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
                (path / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", lambda path: [*map(Path.unlink, path.iterdir()), path.rename(tmp_path / "gone")])
    text = "cgroup {0}/cpu cgroup rw,cpu 0 0\ncgroup {0}/memory cgroup rw,memory 0 0\n"
    groups = find_groups(machine(tmp_path, text, "5:devices:/x\n4:memory:/user/me\n0::/\n"))
    assert (groups.parent, groups.version) == (own, 1)
    (tmp_path / "gone").rename(tmp_path / "tried")
    group = groups.make(5000)
    assert (group.path / "memory.limit_in_bytes").read_text() == "5000"
    assert (group.path / "memory.memsw.limit_in_bytes").read_text() == "5000"
    group.add(42)
    assert (group.path / "cgroup.procs").read_text() == "42"
    group.close()
    assert not group.path.exists()


def test_version_2_without_the_controller_is_refused_with_the_reason(tmp_path: Path) -> None:
    own = tmp_path / "unified" / "user.slice"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu pids\n")
    proc = machine(tmp_path, "cgroup2 {0}/unified cgroup2 rw 0 0\n", "0::/user.slice\n")
    with pytest.raises(Refused, match=r"user\.slice has no memory controller"):
        find_groups(proc)


def test_groups_of_a_killed_run_are_removed_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    left, used = tmp_path / "odmoe-peers-999999999-1", tmp_path / f"odmoe-peers-{os.getpid()}-1"
    left.mkdir()
    used.mkdir()
    Groups(tmp_path, 1).sweep()
    assert not left.exists()
    assert used.exists()


def test_a_machine_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no memory controller is mounted"):
        find_groups(machine(tmp_path, "tmpfs {0} tmpfs rw 0 0\n", "0::/\n"))


def test_the_kernel_ends_a_process_that_takes_more_than_its_group_may() -> None:
    try:
        group = find_groups().make(96 << 20)
    except Refused as error:
        pytest.skip(str(error))
    code = "import sys; sys.stdin.read(1); kept = bytearray(b'x') * (int(sys.argv[1]) << 20); print(len(kept))"
    try:
        ends = []
        for size in (16, 256):
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            group.add(process.pid)
            process.communicate("x", timeout=60)
            ends.append(process.returncode)
        assert ends == [0, -9]
        peak = group.peak_bytes()
        assert peak is None or 16 << 20 < peak <= 96 << 20
    finally:
        group.close()
    assert not group.path.exists()
