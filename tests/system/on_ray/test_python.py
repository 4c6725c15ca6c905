"""`odmoe.load` over Ray: nodes of its own, one model at a time, and nodes of a Ray that runs already.

Takes about 90 s on two idle cores: three starts of Ray. Each program runs in a process of its own, since importing ray
settles how it authenticates.
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
how = {{"shadow": "none", "threads": 1, "workers": 2}}
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
JOINED = f"""
import json, os, sys, odmoe
store, tokens, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
told = []
for model, cluster in ((store, "auto"), (store, os.environ["RAY_ADDRESS"]), (None, "auto")):
    with odmoe.load(model, cluster, **({{"shadow": "none", "threads": 1}} if model else {{}})) as joined:
        told.append([joined.generate(prompt, {HOW}).token_ids, joined.cluster.pid("main node")])
print("told " + json.dumps(told))
"""


def told_by(program: str, arguments: list[str], environment: dict[str, str]) -> Any:
    """What a program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert found, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(found[0].removeprefix("told "))


@pytest.fixture(scope="module")
def wanted(reference: Callable[[str, int, int], Any]) -> Any:
    return reference("float32", 0, TOKENS)


@pytest.fixture(scope="module")
def arguments(demo_store: Callable[[str], Any], wanted: Any) -> list[str]:
    return [str(demo_store("float32").path), str(TOKENS), json.dumps(wanted.prompt)]


def test_nodes_of_its_own_for_one_model_at_a_time(arguments: list[str], wanted: Any) -> None:
    """A second one is refused, and the first goes on; after its end another one may come. Nothing stays."""
    mark = uuid.uuid4().hex
    told = told_by(LOCAL, arguments, os.environ | {"PYTHONPATH": str(ROOT), MARK: mark})
    assert told["answers"] == [wanted.tokens] * 4
    assert len(told["refused"]) == 4
    assert all("uses Ray for another model" in error for error in told["refused"])
    assert told["given up"]
    before, after = told["environment"]
    assert after == before
    wait_until_gone(mark)


def test_nodes_of_a_ray_that_runs(head: str, environment: dict[str, str], arguments: list[str], wanted: Any) -> None:
    """Started by the first, found by the next, who name the model or take what is served."""
    told = told_by(JOINED, arguments, environment | {"RAY_ADDRESS": head})
    assert [tokens for tokens, _ in told] == [wanted.tokens] * 3
    assert len({pid for _, pid in told}) == 1, "the nodes of the first one"
