"""What is counted of several requests at once, beside a count by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scripts.measure.requests import Answered, Moment, figures


def answered(times: list[float], read: tuple[int, int], loads: int) -> Answered:
    counts = {"loads": loads, "prefill_loads": 1, "hits": 1, "named": 4, "stall_s": 0.5, "ttft_s": times[0]}
    report = SimpleNamespace(new_tokens=len(times), **counts)
    first, last = (Moment(at, by_then, by_then / 100) for at, by_then in zip((times[0], times[-1]), read, strict=True))
    return Answered([0] * len(times), times, first, last, report)


def test_only_the_time_in_which_all_decode_counts() -> None:
    """The second begins at 3; the first ends at 6. In between are 4, 5, 6 of the first and 4.5, 6 of the second."""
    first = answered([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (10, 400), loads=6)
    second = answered([3.0, 4.5, 6.0, 8.0], (100, 900), loads=4)
    found = figures([first, second])
    assert found["tokens_per_s"] == pytest.approx(5 / 3)
    assert found["bytes_a_token"] == (400 - 100) / 5
    assert found["cpu_s_a_token"] == pytest.approx((4 - 1) / 5)
    assert found["loads_a_token"] == (5 + 3) / (5 + 3)
    assert found["hit_rate"] == 2 / 8
    assert found["gap_s"] == 1.25  # 1, 1, 1 and 1.5, 1.5, 2
    assert found["longest_gap_s"] == 2.0


def test_one_request_is_its_decode() -> None:
    found = figures([answered([1.0, 3.0, 5.0], (0, 80), loads=3)])
    assert (found["tokens_per_s"], found["bytes_a_token"]) == (0.5, 40)
