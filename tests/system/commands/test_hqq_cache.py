"""A cache that HQQ quantises, with its import postponed and without. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.system
PREPARED = "import sys; from odmoe.clusters.process import prepare_process; prepare_process()\n"
QUANTISED_CACHE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("models/demo-moe")
found = model.generate(
    torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=8, do_sample=False, cache_implementation="quantized",
    cache_config={"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 16,
                  "residual_length": 2},
)
print(found.tolist(), "hqq.core.quantize" in sys.modules)
"""


def output(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_a_cache_quantised_by_hqq_is_the_same() -> None:
    postponed = output(PREPARED + QUANTISED_CACHE)
    assert postponed.endswith("True")
    assert postponed == output("import sys" + QUANTISED_CACHE)
