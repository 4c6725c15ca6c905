"""Every family of Transformers that is supported, through all of tests/families. About 3 minutes on two idle cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.models.families import FAMILIES, TESTED
from support.paths import ROOT

DEADLINE_S = 1200
TESTS_A_FAMILY = 8
pytestmark = [pytest.mark.system, pytest.mark.timeout(DEADLINE_S + 60)]


def test_every_family_passes_what_the_chosen_ones_pass() -> None:
    assert set(TESTED) < set(FAMILIES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/families"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"FAMILIES": "all"}, timeout=DEADLINE_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > TESTS_A_FAMILY * len(FAMILIES)
