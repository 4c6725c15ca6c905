"""What the main host of a cluster says is passed on as it comes, and until nobody reads it any more."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe import at_head
from odmoe.commands.over_ssh import generate
from odmoe.settings.settings import Settings
from odmoe.terminal import Output
from scheduler.errors import HostError, RequestFailedError


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
            return generate.relay(remote), out, err
        except OSError as error:
            return error, out, err
        finally:
            process.kill()
            monkeypatch.undo()


def test_both_streams_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('answer'); print('figures', file=sys.stderr); sys.exit(7)"
    code, out, err = relayed(monkeypatch, program)
    assert (code, out.got.getvalue(), err.got.getvalue()) == ((7, "figures\n"), b"answer\n", b"figures\n")


def test_it_ends_when_nobody_reads_the_answer_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main host says nothing on its standard error, and would wait for room on its output for ever."""
    program = "import sys, time; sys.stdout.write('x' * 10_000_000); time.sleep(3600)"
    code, _, _ = relayed(monkeypatch, program, broken=True)
    assert isinstance(code, BrokenPipeError)


# --- records ----------------------------------------------------------------------------------------------------------


class Head:
    """The main host, whose shell is that of this machine. `writes`: the records that it writes when it answers."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path, writes: dict[str, bytes]) -> None:
        self.home, self.writes = home, writes
        (home / "odmoe").mkdir(parents=True)
        patch.setenv("HOME", str(home))
        patch.setattr(generate, "read_cluster_file", lambda file: SimpleNamespace(name="c", main=None))
        patch.setattr(generate.Ssh, "for_cluster", lambda *of: contextlib.nullcontext(self))
        patch.setattr(generate, "relay", lambda remote: (0, ""))

    def start(self, host: Any, command: str, grace_s: float) -> Any:
        return SimpleNamespace(send=self.answer, close=lambda deadline_s: None)

    def answer(self, text: str) -> None:
        settings = json.loads(text)["settings"]
        for name, data in self.writes.items():
            Path(settings[name]).expanduser().write_bytes(data)

    def run(self, host: Any, command: str, deadline_s: float) -> str:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise HostError(done.stderr)
        return done.stdout

    def left(self) -> list[Path]:
        return list((self.home / "odmoe").iterdir())


def ask(tmp_path: Path, **records: str) -> int:
    settings = Settings(cluster=str(tmp_path / "c.yaml"), **{name: str(tmp_path / to) for name, to in records.items()})
    return generate.ask(settings, ["HAMLET"], Output(quiet=True))


def test_records_come_back_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are removed there."""
    data = bytes(range(256)) * 100
    head = Head(monkeypatch, tmp_path / "home", {"record": data})
    assert ask(tmp_path, record="here") == 0
    assert (tmp_path / "here").read_bytes() == data
    assert head.left() == []


def test_a_record_that_is_not_there_does_not_keep_the_other_from_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main host wrote the record, and could not write the trace: the record is here, and the lack is told."""
    Head(monkeypatch, tmp_path / "home", {"record": b"the record"})
    with pytest.raises(HostError, match="No such file"):
        ask(tmp_path, trace="trace", record="record")
    assert (tmp_path / "record").read_bytes() == b"the record"


def test_the_main_host_is_asked_what_was_asked_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of the request: what `ask` writes, and what `at_head` makes of it."""
    head, requests, runs = Head(monkeypatch, tmp_path / "home", {}), [], []
    monkeypatch.setattr(head, "answer", lambda text: requests.append(json.loads(text)))
    monkeypatch.setattr("odmoe.commands.generate.run_generate", lambda *given: runs.append(given))
    settings = Settings(cluster=str(tmp_path / "c.yaml"), max_new_tokens=7)
    for output, listed in ((Output(json=True), True), (Output(quiet=True, debug=True), False)):
        assert generate.ask(settings, ["one", "two"], output, listed) == 0
        assert at_head._generate(requests[-1]) == 0
        there, prompts, *rest = runs[-1]
        assert (there.max_new_tokens, there.cluster, prompts) == (7, "auto", ["one", "two"])
        assert rest == [output, listed, "c.yaml"]


def test_an_error_at_the_main_host_is_an_object_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its standard output is passed on."""

    def failed(*given: Any) -> None:
        raise RequestFailedError("a load failed three times")

    monkeypatch.setattr("odmoe.commands.generate.run_generate", failed)
    request: dict[str, Any] = {"settings": {}, "prompts": ["one"], "listed": False}
    for as_json in (True, False):
        assert at_head._generate({**request, "output": asdict(Output(json=as_json))}) == 1
        out = capsys.readouterr().out
        assert (json.loads(out)["error"]["type"] if as_json else out) == ("RequestFailedError" if as_json else "")
