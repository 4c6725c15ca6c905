"""Every command and program of docs/serving.md, run against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.serve.openai.neutral import UNUSED
from odmoe.serve.openai.requests import ChatRequest, CompletionRequest
from support.paths import ROOT

if TYPE_CHECKING:
    from support.machines.http_service import Served

TEXT = (ROOT / "docs" / "serving.md").read_text()
CURLS = re.findall(r"^```sh\n(curl .*?)^```$", TEXT, re.M | re.S)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
DOCUMENTED = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")


def test_there_are_some() -> None:
    assert len(CURLS) == 5
    assert len(PROGRAMS) == 1
    assert all(DOCUMENTED in text for text in CURLS + PROGRAMS)


@pytest.mark.parametrize("command", CURLS)
@pytest.mark.usefixtures("curl")
def test_a_curl(served: Served, command: str) -> None:
    shell = command.replace(DOCUMENTED, served.url).replace("curl ", "curl -s --max-time 60 ", 1)
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=90, check=True)
    if '"stream": true' in command:
        *events, last = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert last == "[DONE]"
        assert json.loads(events[-1])["usage"]["completion_tokens"] == 12
    elif "suffix" in command:
        assert json.loads(done.stdout)["error"]["param"] == "suffix"
    else:
        found: dict[str, Any] = json.loads(done.stdout)
        assert "error" not in found
        assert found.get("status", "ready") == "ready"
        assert "choices" not in found or found["choices"][0]["text"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(served: Served, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(program.replace(DOCUMENTED, served.url), {})
    assert len(capsys.readouterr().out) > 12


def test_every_field_is_documented() -> None:
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *UNUSED} - {"model", "prompt", "messages"}
    assert not [name for name in sorted(fields) if f"`{name}`" not in TEXT]
