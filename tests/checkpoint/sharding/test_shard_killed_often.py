"""A store whose making is killed early, late, and again and again. About 20 s of one core."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.sharding.partial_store import partial_of
from checkpoint.sharding.source import open_source
from support.models.checkpoints import build
from support.models.store_making import (
    StoreMaker,
    assert_no_store,
    check_killed_after,
    contents,
    kill_when,
    shard,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 1.5 MiB: long enough in the making to be killed in the middle."""
    folder = tmp_path_factory.mktemp("model")
    made = build("mixtral", hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    made.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store that was made in one go."""
    return contents(shard(open_source(model), tmp_path_factory.mktemp("whole") / "store").path)


@pytest.fixture(scope="module")
def maker(model: Path) -> Iterator[StoreMaker]:
    made = StoreMaker(model)
    yield made
    made.close()


@pytest.mark.parametrize("layers", [0, 3, 7])
def test_killed_after_some_layers(maker: StoreMaker, tmp_path: Path, whole: dict[str, bytes], layers: int) -> None:
    check_killed_after(maker, tmp_path / "store", whole, layers)


def test_killed_again_and_again_at_any_moment(
    maker: StoreMaker, model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Every run but the last is killed a little later than the one before could have finished its next layer."""
    target, chance, said, kills = tmp_path / "store", random.Random(7), "killed", 0
    while said == "killed" and kills < 20:
        until = time.monotonic() + chance.uniform(0.0, 0.25) + 0.02 * kills
        said = kill_when(maker, target, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        if said == "killed" and not target.exists():
            assert_no_store(target)
            kills += 1
        elif said == "killed":
            break  # between the last step and the end of the process
    assert kills > 2
    assert shard(open_source(model), target).path == target
    assert contents(target) == whole
    assert [name for name in os.listdir(tmp_path) if name != "store"] in ([], [partial_of(target).name])
