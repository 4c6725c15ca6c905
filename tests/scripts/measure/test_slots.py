"""Slots by how their memory lies: what is counted, on a small store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.tensors import aligned_buffer
from scripts.measure import slots

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_every_kind_is_filled_with_experts(demo_store: Any) -> None:
    store = demo_store("bfloat16")
    rows = slots.measured(store, 5, 2, 1 << 24)
    kinds = [(row["memory"], row["slots"]) for row in rows]
    assert kinds == [(memory, of) for memory in ("fresh", "scattered") for of in ("one area", "pieces")]
    assert all(row["read_s_per_gb"] > 0 and row["product_s_per_gb"] > 0 for row in rows)
    assert rows[0]["read_ratio"] == rows[0]["product_ratio"] == 1.0
    assert all(row["slot_bytes"] == store.manifest.blob_bytes for row in rows)


@pytest.mark.skipif("[always]" in THP.read_text() if THP.exists() else True, reason="the kernel gives them to all")
def test_small_pieces_have_no_huge_pages() -> None:
    """The kernel says so; what it has to spare for larger areas is its own affair."""
    assert slots.huge_share([aligned_buffer(1 << 16) for _ in range(3)]) == 0.0
    assert 0.0 <= slots.huge_share([aligned_buffer(1 << 22)]) <= 1.0


def test_every_other_page_is_given_back() -> None:
    pages = 64
    area = slots.scattered(pages * 4096)
    kept = torch.frombuffer(area, dtype=torch.uint8)[::4096].tolist()
    assert kept == [0, 1] * (pages // 2)
