"""The head of Ray (its GCS) is killed while an answer is under way. One start of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from support.machines.processes import MARK, wait_until_gone
from support.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("head_killed.py")
GIVE_UP_S = 5
"""In place of Ray's 60 s."""
TOKENS = 400


def test_answers_go_on_until_ray_gives_up(demo_store: Any, reference: Any) -> None:
    """Tokens are right as long as they come; then every process ends, the client's too, and nothing hangs."""
    expected = reference("float32", 0, 24)
    mark = uuid.uuid4().hex
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(GIVE_UP_S),
    }
    command = [sys.executable, SCRIPT, str(demo_store("float32").path), json.dumps(expected.prompt), str(TOKENS), mark]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    tokens = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("token ")]
    after = done.stdout.partition("killed\n")[2].count("token ")
    assert after > 0, f"{done.stdout}\n{done.stderr}"
    assert tokens[:24] == expected.tokens[: len(tokens)]
    wait_until_gone(mark)
