"""An engine in a process of its own answers as it does in this one, and its failures are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from odmoe.commands.shared.whole_model import load_whole
from scripts.peers.engine_process import EngineFailed, EngineProcess
from scripts.peers.engines import EAGER, Eager, Engine, forced_task
from scripts.peers.groups import Refused, find_groups

TASK = forced_task(0, 0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["mixtral"], indirect=True)
def test_it_answers_and_tells_time_and_memory(checkpoint: Path) -> None:
    process = EngineProcess(Engine(EAGER, checkpoint, torch.get_num_threads()))
    try:
        assert process.start_s is None
        found = process.answer(TASK)
        start = process.start_s
        process.answer(TASK)
        assert process.peak_bytes() > 50e6
    finally:
        process.close()
    assert found.choices == Eager(load_whole(checkpoint, "bfloat16")).answer(TASK).choices
    assert start is not None
    assert start > found.ttft_s
    assert process.start_s == start


@pytest.mark.slow
def test_a_failure_says_what_the_process_said(tmp_path: Path) -> None:
    process = EngineProcess(Engine(EAGER, tmp_path / "nothing", 1))
    with pytest.raises(EngineFailed, match=r"Transformers eager ended \(1\): .*CheckpointError"):
        process.answer(TASK)


@pytest.mark.parametrize("shape", ["mixtral"], indirect=True)
def test_a_cap_that_is_too_small_is_named(checkpoint: Path) -> None:
    try:
        group = find_groups().make(64 << 20)
    except Refused as error:
        pytest.skip(str(error))
    process = EngineProcess(Engine(EAGER, checkpoint, 1), group)
    with pytest.raises(EngineFailed, match=r"needs more than its cap of 0\.07 GB"):
        process.answer(TASK)
    assert not group.path.exists()
