"""What the main host of a cluster says is passed on as it comes, and until nobody reads it any more."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.commands import generate_remote
from odmoe.settings.settings import Settings
from scheduler.errors import HostError

pytestmark = pytest.mark.timeout(60)


class Screen:
    """Standard output or error; `broken`: whoever read it has gone."""

    def __init__(self, broken: bool = False) -> None:
        self.buffer = self
        self.got = io.BytesIO()
        self.broken = broken

    def write(self, data: bytes) -> None:
        if self.broken:
            raise BrokenPipeError
        self.got.write(data)

    def flush(self) -> None:
        pass


def relayed(monkeypatch: pytest.MonkeyPatch, program: str, broken: bool = False) -> tuple[Any, Screen, Screen]:
    """The exit code or error, and what came out, of a Python program that stands for the main host."""
    out, err = Screen(broken), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        remote: Any = SimpleNamespace(stdout=process.stdout, stderr=process.stderr, process=process)
        try:
            return generate_remote.relay(remote), out, err
        except OSError as error:
            return error, out, err
        finally:
            process.kill()
            monkeypatch.undo()


def test_both_streams_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('answer'); print('figures', file=sys.stderr); sys.exit(7)"
    code, out, err = relayed(monkeypatch, program)
    assert (code, out.got.getvalue(), err.got.getvalue()) == ((7, "figures\n"), b"answer\n", b"figures\n")


def test_records_come_back_byte_for_byte(tmp_path: Path) -> None:
    """Fetched from the main host by a shell there, which is this one; and it is removed there."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.write_bytes(bytes(range(256)) * 100)

    def run(host: Any, command: str, deadline_s: float) -> str:
        return subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True, timeout=30).stdout

    generate_remote._fetch(SimpleNamespace(run=run), SimpleNamespace(main=None), str(there), here, 0)  # type: ignore[arg-type]
    assert here.read_bytes() == bytes(range(256)) * 100
    assert not there.exists()


def test_it_ends_when_nobody_reads_the_answer_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main host says nothing on its standard error, and would wait for room on its output for ever."""
    program = "import sys, time; sys.stdout.write('x' * 10_000_000); time.sleep(3600)"
    began = time.monotonic()
    code, _, _ = relayed(monkeypatch, program, broken=True)
    assert isinstance(code, BrokenPipeError)
    assert time.monotonic() - began < 30


def test_a_record_that_is_not_there_does_not_keep_the_other_from_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main host wrote the record, and could not write the trace: the record is here, and the lack is told."""
    cluster = tmp_path / "c.yaml"
    fetched: list[str] = []

    def fetch(ssh: Any, cluster: Any, there: str, to: Path, code: int) -> None:
        fetched.append(to.name)
        if to.name == "trace":
            raise HostError("no such file")

    machine = SimpleNamespace(send=lambda text: None, close=lambda: None)
    ssh = SimpleNamespace(start=lambda host, command: machine)
    monkeypatch.setattr(generate_remote, "read_cluster_file", lambda file: SimpleNamespace(name="c", main=None))
    monkeypatch.setattr(generate_remote.Ssh, "of", lambda *of: contextlib.nullcontext(ssh))
    monkeypatch.setattr(generate_remote, "relay", lambda remote: (0, ""))
    monkeypatch.setattr(generate_remote, "_fetch", fetch)
    settings = Settings(cluster=str(cluster), trace=str(tmp_path / "trace"), record=str(tmp_path / "record"))
    with pytest.raises(HostError):
        generate_remote.ask(settings, ["HAMLET"], {"quiet": True, "debug": False})
    assert sorted(fetched) == ["record", "trace"]
