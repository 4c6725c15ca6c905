"""More seeds, in a file of their own: the processes of `make test` share by files."""

from __future__ import annotations

import pytest

from support.simulated.run import Stage


@pytest.mark.parametrize("first", range(100, 200, 20))
def test_what_is_promised_holds_whatever_fails(stage: Stage, first: int) -> None:
    for seed in range(first, first + 20):
        stage.play(seed)
