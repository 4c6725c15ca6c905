"""What is measured of restoring: only what workers do on this processor."""

from __future__ import annotations

import pytest
import torch

from scripts.measure.formats import restoring


@pytest.mark.parametrize("possible", [False, True])
def test_packed_weights_are_multiplied_where_workers_do_so(possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "MXFP4_SHAPES", {"small": (64, 32)})
    monkeypatch.setattr(restoring, "are_possible", lambda encoding, dtype, device: possible)
    weight = torch.ones(64, 32, dtype=torch.bfloat16)
    found = restoring.product_methods(
        "small", dict.fromkeys(("Transformers", restoring.TORCH, "compiled"), lambda: weight)
    )
    assert ("not restored" in found) == possible
    assert list(found)[:3] == ["dequantised", "restored by torch", "restored by the routine"]
