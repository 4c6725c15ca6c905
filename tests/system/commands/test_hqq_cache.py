"""A cache that HQQ quantises, with its import postponed and with HQQ's own class, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.system
QUANTISED_CACHE = """
import sys
from odmoe.clusters.process import prepare_process
prepare_process()
import torch
from transformers import AutoModelForCausalLM, cache_utils
model = AutoModelForCausalLM.from_pretrained("models/demo-moe")
def tokens():
    return model.generate(
        torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=8, do_sample=False, cache_implementation="quantized",
        cache_config={"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 16,
                      "residual_length": 2},
    ).tolist()
before = "hqq.core.quantize" in sys.modules
postponed = tokens()
used = "hqq.core.quantize" in sys.modules
from hqq.core.quantize import Quantizer
stand_in, cache_utils.HQQQuantizer = cache_utils.HQQQuantizer, Quantizer
print(before, used, stand_in is Quantizer, len(postponed[0]), postponed == tokens())
"""


def test_a_cache_quantised_by_hqq_is_the_same() -> None:
    command = [sys.executable, "-c", QUANTISED_CACHE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["False", "True", "False", "13", "True"]
