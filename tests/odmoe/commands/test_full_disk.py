"""Commands that write to a full disk: one line names the file, and nothing half-written is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.machines.cli import CommandLine, check_one_line


@pytest.mark.slow
def test_a_full_disk_under_commands(cli: CommandLine, demo: Path, small_disk: Path) -> None:
    """A simulation's trace, an answer's recording and trace: one line names the file, and nothing is left."""
    file = small_disk / "file"
    words = [str(file), "No space left on device; free some space"]
    check = [("simulate", "-q", "--tokens", "8", "--trace", str(file), "--json")]
    model = ["-m", str(demo), "-n", "24", "--ignore-eos", "--shadow", "none", "--threads", "1", "-q", "HAMLET"]
    for flag in ("--record", "--trace"):
        check.append(("generate", *model, flag, str(file)))
    for command in check:
        answer = cli(*command)
        assert answer.code == 1, answer
        assert answer.err.count("\n") == 1, answer.err
        assert [word for word in words if word not in answer.err] == []
        assert list(small_disk.iterdir()) == []


def test_a_store_on_a_full_disk(cli: CommandLine, demo: Path, small_disk: Path) -> None:
    check_one_line(cli("shard", str(demo), str(small_disk / "store")), 1, "StoreWriteError", ["bytes more", "free"])
    assert list(small_disk.iterdir()) == []
