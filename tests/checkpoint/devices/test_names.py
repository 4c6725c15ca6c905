"""Devices by name, as on this machine and as on one with two accelerators."""

from __future__ import annotations

import pytest
import torch

from checkpoint.devices.names import accelerator, find_device
from scheduler.errors import ConfigError


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two CUDA devices, as torch tells."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


@pytest.mark.usefixtures("none")
def test_without_an_accelerator_auto_is_the_processor() -> None:
    assert accelerator() is None
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("name", "found"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_an_accelerator_has_a_number(name: str, found: str) -> None:
    assert str(find_device(name)) == found


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["cuda:2", "xpu", "mps", "gpu"])
def test_what_the_machine_does_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--main-device is '{name}', which this machine does not have") as caught:
        find_device(name, "--main-device")
    assert str(caught.value).endswith("has cuda:0, cuda:1 here; allowed: auto, cpu, cuda:0, cuda:1")


@pytest.mark.usefixtures("none")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_any_it_says_that_there_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*sees no accelerator here; allowed: auto, cpu$"):
        find_device(name)
