"""What is measured of published formats: processor time of a process, and dense parts that share their room."""

from __future__ import annotations

import os
import time
from pathlib import Path

from scripts.measure.formats.published import ANSWERING, cpu_s, share_files, task


def test_processor_time_is_that_of_the_kernel() -> None:
    before, began = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert abs(cpu_s(os.getpid()) - before - 0.2) < 0.1


def test_equal_files_share_their_room_and_others_stay(tmp_path: Path) -> None:
    for folder, text in (("one", "same"), ("two", "same"), ("three", "else")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(text)
    files = {"file": tmp_path / "one" / "file"}
    share_files(files, tmp_path / "two")
    share_files(files, tmp_path / "three")
    assert (tmp_path / "two" / "file").samefile(tmp_path / "one" / "file")
    assert (tmp_path / "three" / "file").read_text() == "else"


def test_a_turn_has_the_same_tokens_for_every_store_and_others_than_the_next() -> None:
    first = task(0, 1, 1000, 4, 8)
    assert first == task(0, 1, 1000, 4, 8) != task(0, 2, 1000, 4, 8)
    assert (len(first.prompt), len(first.continuation)) == (4, 8)


def test_a_ratio_is_said_with_its_interval() -> None:
    [column] = [one for one in ANSWERING if one.name == "over dequantised"]
    assert column.text({"ratios": [2.5, 2.3, 2.6]}) == "2.5 (2.3 to 2.6)"
    assert column.text({"ratios": None}) == "-"
