"""The share of samples with a frame, from stacks as py-spy writes them."""

from __future__ import annotations

import re

from scripts.processes.samples import RESTORING, share

STACKS = """\
thread (a);_run (/x/node.py:10);restore_into (/x/checkpoint/native/mxfp4.py:20) 30
thread (a);_run (/x/node.py:10);compute (/x/expert.py:5) 50
MainThread;forward (/x/dense.py:1) 20
"""


def test_samples_beneath_a_frame_count_and_others_do_not() -> None:
    assert share(STACKS, RESTORING) == 0.3
    assert share(STACKS, re.compile("_run")) == 0.8
    assert share(STACKS, re.compile("nothing")) == 0


def test_no_sample_is_no_share() -> None:
    assert share("", RESTORING) is None
