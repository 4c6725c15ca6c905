"""Every family of Transformers that is supported, through all of tests/families, and the tables of docs/models.md.

About 3 minutes on two idle cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.models.families import FAMILIES, TESTED
from support.paths import ROOT

DEADLINE_S = 1200
TESTS_A_FAMILY = 8
OF_FORMATS = "the_experts or the_dense_part or the_tokenizer"
"""Tests of formats. No table of docs/models.md has their results."""
pytestmark = [pytest.mark.system, pytest.mark.timeout(DEADLINE_S + 60)]


def test_every_family_passes_what_the_chosen_ones_pass(tmp_path: Path) -> None:
    assert set(TESTED) < set(FAMILIES)
    result = tmp_path / "families.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "tests/families"]
    command += ["--ignore=tests/families/test_rope_scaling.py", "-k", f"not ({OF_FORMATS})"]
    command += [f"--junitxml={result}", "-o", "junit_family=xunit1"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"FAMILIES": "all"},
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > TESTS_A_FAMILY * len(FAMILIES)
    command = [sys.executable, "-m", "scripts.families", "--check", "--from", str(result)]
    checked = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
