"""What a viewer is sent."""

from __future__ import annotations

import random
from collections import Counter

from main_node.activity import OUTCOMES, ExpertAccess
from odmoe.serve.page.updates import aggregate


def test_cells_are_counted_and_show_their_worst_outcome() -> None:
    rng = random.Random(1)
    accesses = tuple(
        ExpertAccess(rng.randrange(4), rng.randrange(6), rng.randrange(len(OUTCOMES)), rng.randrange(3))
        for _ in range(200)
    )
    flat = aggregate(accesses)
    cells = {(flat[at], flat[at + 1]): tuple(flat[at + 2 : at + 5]) for at in range(0, len(flat), 5)}
    assert len(flat) == 5 * len(cells)
    assert {cell: times for cell, (_, _, times) in cells.items()} == Counter((a.layer, a.expert) for a in accesses)
    for cell, (outcome, worker, _) in cells.items():
        of = [one for one in accesses if (one.layer, one.expert) == cell]
        assert outcome == max(one.outcome for one in of)
        assert worker == [one.worker for one in of if one.outcome == outcome][-1]


def test_the_first_to_be_chosen_comes_first() -> None:
    accesses = (ExpertAccess(2, 0, 0, 0), ExpertAccess(0, 1, 0, 0), ExpertAccess(2, 0, 3, 1))
    assert aggregate(accesses) == [2, 0, 3, 1, 2, 0, 1, 0, 0, 1]
    assert aggregate(()) == []
