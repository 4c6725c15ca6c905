"""A profile of this machine: what was measured is what a plan counts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from odmoe.bench import processor
from odmoe.bench.processor import Processor, measure_processor, write_profile
from scheduler.planning.machines import defaults_of
from scheduler.planning.scaling import Hardware, Policy, Setup, scale_profile
from scheduler.timing.profile import load_profile
from support.scheduling.homes import model

QWEN = model("qwen3-30b-a3b")
FOUND = Processor(bytes_per_s=40e9, layer_s=2e-3, layer_extra_s=2e-4, expert_s=3e-4, expert_extra_s=4e-5)


def test_a_plan_of_the_measured_model_has_the_measured_times(tmp_path: Path) -> None:
    write_profile(tmp_path / "here.yaml", "a PC", FOUND, 3e9, (1e-4, 2.35e9))
    found = load_profile(tmp_path / "here.yaml")
    assert (found.name, found.main_layer_s, found.expert_s) == ("here", FOUND.layer_s, FOUND.expert_s)
    assert defaults_of(found) == pytest.approx((3e9, 40e9, 2.35e9), rel=1e-3)
    planned = scale_profile(Setup(QWEN, Hardware(found, 1), Policy("none")))
    assert planned.expert_s == pytest.approx(FOUND.expert_s)
    assert planned.main_layer_s == pytest.approx(FOUND.layer_s, rel=1e-3)
    assert planned.load_s == pytest.approx(QWEN.expert_bytes / 3e9, rel=1e-3)


def test_a_link_that_was_not_measured_is_said(tmp_path: Path) -> None:
    write_profile(tmp_path / "here.yaml", "a PC", FOUND, 3e9, (1e-4, None))
    assert load_profile(tmp_path / "here.yaml").link_bits_per_s == 1e9
    assert "1 Gbit/s is assumed" in (tmp_path / "here.yaml").read_text()


@pytest.mark.slow
def test_products_of_a_row_take_as_long_as_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has 19 million weights, an expert 4.7 million: neither is read faster than a processor's cache allows."""
    monkeypatch.setattr(processor, "SECONDS", 0.0)
    found = measure_processor(lambda done, total: None)
    assert found.layer_s > 19e6 * 2 / 1e12
    assert found.layer_s > found.expert_s > 4.7e6 * 2 / 1e12
    assert 1e8 < found.bytes_per_s < 1e12
