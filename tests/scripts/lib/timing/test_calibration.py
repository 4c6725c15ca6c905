"""The work by which a machine's speed is told."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from scripts.lib.timing import calibration
from scripts.lib.timing.calibration import Calibration


@pytest.fixture
def calibrated(demo_store: Any) -> Any:
    found = Calibration(demo_store("bfloat16"))
    yield found
    found.close()


def test_the_speeds_are_those_of_real_work(calibrated: Calibration) -> None:
    """No processor has a product of 2 MB in less than a microsecond, nor any disk a gigabyte in a hundredth second."""
    speeds = calibrated.speeds()
    assert set(speeds) == set(calibration.SPEEDS)
    assert speeds["product_s"] > 1e-6
    assert math.isfinite(speeds["read_s_per_gb"])
    assert speeds["read_s_per_gb"] > 0.01


def test_a_slower_disk_shows(calibrated: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loads = calibrated._loader.load, []

    def slow(*of: Any) -> int:
        loads.append(of[:2])
        time.sleep(0.02)
        return load(*of)

    monkeypatch.setattr(calibrated._loader, "load", slow)
    sizes = calibrated._sizes
    found = calibrated.speeds()["read_s_per_gb"]
    assert len(loads) == calibration.READS
    assert found >= 0.02 * len(loads) / (sum(sizes[one] for one in loads) / 1e9)
