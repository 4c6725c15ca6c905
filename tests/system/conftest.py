"""What several of the system tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models.tiny_mixtral import save_tiny_mixtral


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of two layers and three experts; no tokenizer."""
    return save_tiny_mixtral(tmp_path_factory.mktemp("tiny"))
