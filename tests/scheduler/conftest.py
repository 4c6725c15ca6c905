"""Test files do not import each other, so what they share comes as fixtures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(file: str) -> ModuleType:
    name = f"scheduler_{file}".replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def world() -> ModuleType:
    """The simulated world, core_world.py."""
    return _load("core_world")


@pytest.fixture(scope="session")
def desk() -> ModuleType:
    """core/test_core.py, for its Driver."""
    return _load("core/test_core")


@pytest.fixture(scope="session")
def device() -> type:
    """One device with a residency, cache_driver.py's Device."""
    found: type = _load("cache_driver").Device
    return found
