"""One tiny model for all simulated worlds of a process."""

from __future__ import annotations

import pytest

from support.simulated.run import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))
