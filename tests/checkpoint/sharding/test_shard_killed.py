"""A store whose making was killed: never taken for a whole one, taken up again, the same bytes in the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import open_source
from support.models.store_making import (
    StoreMaker,
    check_killed_after,
    contents,
    journaled,
    shard,
    wait_until,
)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    """Eight layers of 1.5 MiB: long enough in the making to be killed in the middle."""
    return tiny("mixtral", "bfloat16", hidden_size=128, intermediate_size=512, num_hidden_layers=8)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store that was made in one go."""
    return contents(shard(open_source(model), tmp_path_factory.mktemp("whole") / "store").path)


@pytest.fixture(scope="module")
def maker(model: Path) -> Iterator[StoreMaker]:
    made = StoreMaker(model)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 7])
def test_killed_after_some_layers(maker: StoreMaker, tmp_path: Path, whole: dict[str, bytes], layers: int) -> None:
    check_killed_after(maker, tmp_path / "store", whole, layers)


@pytest.mark.slow
def test_second_takes_over_from_a_first_that_dies(maker: StoreMaker, model: Path, tmp_path: Path) -> None:
    target, made = tmp_path / "store", []
    child = maker.start(target)
    wait_until(lambda: journaled(target) >= 1)
    os.kill(child, signal.SIGSTOP)  # it holds the lock
    second = threading.Thread(target=lambda: made.append(make_store(open_source(model), target)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert not target.exists()
    os.kill(child, signal.SIGKILL)
    assert maker.line() == "killed"
    second.join(60)
    assert made[0].written
    assert made[0].resumed >= 1
    made[0].store.verify()
