"""Standard error as JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys

from odmoe.json_log import JsonLines

PROGRAM = """
import logging, sys, threading, warnings
logging.basicConfig(level=logging.WARNING)
from odmoe.json_log import use_json_log
use_json_log()
from odmoe.terminal import Terminal
Terminal().notify("starting")
logging.getLogger("some.library").warning("two\\nlines")
warnings.warn("take care")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
sys.stderr.buffer.write(b'{"status": 200}\\n')
print("2026-01-01T00:00:00Z a worker is lost", file=sys.stderr)
raise SystemExit("the end")
"""


def test_every_line_of_a_process_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    messages = [line.get("message", "") for line in lines]
    for said in ("starting", "two", "take care", "ZeroDivisionError: division by zero", "the end"):
        assert any(said in one for one in messages), said
    assert {"status": 200} in lines
    assert {"time": "2026-01-01T00:00:00Z", "message": "a worker is lost"} in lines
    assert done.returncode == 1


def test_lines_in_pieces() -> None:
    found = io.StringIO()
    lines = JsonLines(found)
    for piece in ("a", "b\nc", "\n\n", "{not json\n"):
        lines.write(piece)
    assert [json.loads(one)["message"] for one in found.getvalue().splitlines()] == ["ab", "c", "{not json"]
