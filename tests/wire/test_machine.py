"""What a node says of where it runs, beside what others say of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import pytest

from wire.machine import host_name, memory_bytes, processor_name


def test_this_machine():
    assert host_name() == os.uname().nodename
    assert memory_bytes() == psutil.virtual_memory().total
    assert str(len(psutil.Process().cpu_affinity())) in processor_name()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU: 3.0 GHz\nmodel name\t: another\n", "Some CPU: 3.0 GHz"),
        ("BogoMIPS\t: 48\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("processor\t: 0\nmodel name\t:\n", platform.machine()),
        (None, platform.machine()),
    ],
)
def test_what_the_kernel_says_of_a_processor(tmp_path: Path, text: str | None, name: str):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert processor_name(file).startswith(f"{name}, ")
