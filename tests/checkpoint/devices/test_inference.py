"""A product on a new thread has the bits of the main thread's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from checkpoint.devices.inference import inference
from support.paths import ROOT

IN_A_THREAD = """
import threading, torch
from checkpoint.devices.inference import inference

torch.set_num_threads(1)
torch.manual_seed(0)
weight, rows = torch.randn(256, 96), [torch.randn(count, 96) for count in range(1, 12)]
found = []

def product(one):
    with inference():
        found.append(torch.nn.functional.linear(one, weight))

for one in rows:
    thread = threading.Thread(target=product, args=(one,))
    thread.start()
    thread.join()
expected = [torch.nn.functional.linear(one, weight) for one in rows]
print([torch.equal(*pair) for pair in zip(found, expected, strict=True)])
"""


@pytest.mark.slow
def test_a_new_thread_computes_with_the_process_number_of_threads() -> None:
    """With two by default, one set: on some processors a product of MKL then has other last bits."""
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.strip() == str([True] * 11), ended.stderr


def test_it_is_inference_mode() -> None:
    assert not torch.is_inference_mode_enabled()
    with inference():
        assert torch.is_inference_mode_enabled()
