"""HQQ stays out of the start of a process, and is there for whoever uses it. Each in a fresh process, since an import
cannot be taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import cache_utils

from support.paths import ROOT

pytestmark = pytest.mark.slow
PREPARED = "import sys; from odmoe.clusters.process import prepare_process; prepare_process()\n"
THREADS = """
import importlib, threading
names = ["transformers.cache_utils", "hqq.core.quantize"] * 2
start, errors = threading.Barrier(len(names)), []
def run(name):
    start.wait()
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=run, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
from hqq.core.quantize import Quantizer
from transformers import cache_utils
print(errors, cache_utils.HQQQuantizer.quantize == Quantizer.quantize)
"""


def output(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_transformers_caches_do_not_import_hqq() -> None:
    code = "from transformers import cache_utils as c\nprint('hqq.core.quantize' in sys.modules, c.is_hqq_available())"
    assert output(PREPARED + code) == "False True"
    source = Path(cache_utils.__file__).read_text()
    assert "\n    from hqq.core.quantize import" in source, "Transformers imports it no more: hqq_import.py can go"


def test_both_are_imported_by_several_threads_at_once() -> None:
    assert output(PREPARED + THREADS) == "[] True"
