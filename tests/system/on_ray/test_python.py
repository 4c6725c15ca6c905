"""`odmoe.load` with Ray nodes of its own, one model at a time. Two starts of Ray, in a process of its own, since
importing ray settles how it authenticates. lasting.py loads from a Ray that runs already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from support.machines.processes import MARK, wait_until_gone
from support.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

TOKENS = 12
LIMIT_S = 800.0
HOW = "max_new_tokens=tokens, ignore_eos=True"
LOCAL = f"""
import json, os, sys, odmoe
store, tokens, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
how = {{"shadow": "none", "threads": 1, "workers": 1}}
told = {{"answers": [], "refused": []}}
of_ray = lambda: {{name: value for name, value in os.environ.items() if name.startswith("RAY_")}}
before = of_ray()
for _ in range(2):
    with odmoe.load(store, "local", **how) as model:
        told["answers"].append(model.generate(prompt, {HOW}).token_ids)
        for cluster in ("local", "auto"):
            try:
                odmoe.load(store, cluster, **how)
            except odmoe.errors.LaunchError as error:
                told["refused"].append(str(error))
        told["answers"].append(model.generate(prompt, {HOW}).token_ids)
        stream = model.stream(prompt, max_new_tokens=900, ignore_eos=True)
        next(stream)
    try:
        next(stream)
    except odmoe.errors.RequestCancelledError:
        told["given up"] = True
    told["environment"] = [before, of_ray()]
print("told " + json.dumps(told))
"""


def test_nodes_of_its_own_for_one_model_at_a_time(demo_store: Callable[[str], Any], reference: Any) -> None:
    """A second one is refused, and the first goes on; after its end another one may come. Nothing stays."""
    wanted, mark = reference("float32", 0, TOKENS), uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, demo_store("float32").path, str(TOKENS), json.dumps(wanted.prompt)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert found, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    told = json.loads(found[0].removeprefix("told "))
    assert told["answers"] == [wanted.tokens] * 4
    assert len(told["refused"]) == 4
    assert all("uses Ray for another model" in error for error in told["refused"])
    assert told["given up"]
    before, after = told["environment"]
    assert after == before
    wait_until_gone(mark)
