"""Which threads compiled tasks run on."""

from __future__ import annotations

import pytest
import torch

from checkpoint.native import team


def test_a_team_is_all_of_torchs_threads_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(team, "_torch_start", lambda: lambda *_: None)
    assert {team.team_size(1 << power) for power in range(40)} == {1, 8}


def test_other_threads_are_worth_their_start_only_for_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(team, "_torch_start", lambda: None)
    assert [team.team_size(nbytes << 20) for nbytes in (1, 63, 64, 96, 1024)] == [1, 1, 2, 3, 8]
