"""Sizes, shares and rates as people write them."""

from __future__ import annotations

import pytest

from odmoe.settings.units import parse_bytes, parse_link, parse_memory, parse_rate


@pytest.mark.parametrize(
    ("text", "value"),
    [("1GB", 1e9), ("512MiB", 512 * 1024**2), ("704643072", 704643072), ("1.5 gb", 1.5e9), ("8Gi", 8 * 1024**3)],
)
def test_sizes(text: str, value: float) -> None:
    assert parse_bytes(text) == parse_memory(text, 3) == value


@pytest.mark.parametrize(("text", "value"), [("40%", 40), ("100 %", 100), ("0.5%", 0), ("12.5%", 12)])
def test_shares(text: str, value: int) -> None:
    assert parse_memory(text, 100) == value


@pytest.mark.parametrize(("text", "value"), [("25GB/s", 25e9), ("3.5 GB/s", 3.5e9), ("900MB", 9e8), ("2e9", 2e9)])
def test_bytes_a_second(text: str, value: float) -> None:
    assert parse_rate(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("1Gbit", 1e9), ("2.5 Gbit/s", 2.5e9), ("100Mbps", 1e8), ("1Gb", 1e9), ("1000000", 1e6)]
)
def test_bits_a_second(text: str, value: float) -> None:
    assert parse_link(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1 1", "nan", "inf", "1e999", "1XB", "\u0661GB", "1GB GB"])
def test_what_is_no_size(text: str) -> None:
    for parse in (parse_bytes, parse_rate, parse_link, lambda text: parse_memory(text, 100)):
        with pytest.raises(ValueError, match=r"such as|at most 100%"):
            parse(text)


@pytest.mark.parametrize("text", ["0%", "100.1%", "-5%", "%", "0.5"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|at most 100%"):
        parse_memory(text, 100)
