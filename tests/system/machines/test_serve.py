"""`odmoe serve` on a cluster file, over a real sshd; the nodes are embedded in the service on the main host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pexpect
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.machines.processes import HANG_S, ODMOE, Running, Starter, marked, starter, wait_until
from support.machines.served_process import address_of, client_of
from support.machines.ssh_hosts import SshHosts

pytestmark = pytest.mark.system

AT_HEAD = """
import os, sys
from odmoe import at_head
from odmoe.settings.sources import merge_sources
nodes = {"cluster": "embedded", "model": %r, "shadow": "none", "workers": 2, "threads": 1}
at_head.prepare_ray = lambda cluster: None
at_head.settings_here = lambda given: merge_sources({**given, **nodes}).settings
print("a line of a library", flush=True)
try:
    code = at_head.main()
except KeyboardInterrupt:
    code = 130
sys.stdout.flush()
os._exit(code)
"""
HERE = """
from odmoe.machines import head, ssh
ssh.PORT, head.AT_HEAD = %d, %r
"""


@pytest.fixture
def start() -> Iterator[Starter]:
    with starter() as made:
        yield made


@dataclass
class World:
    """A main host, and this machine."""

    folder: Path
    start: Starter

    @property
    def program(self) -> Path:
        """What the main host runs."""
        return self.folder / "at_head.py"

    def serve(self, *more: str) -> Running:
        return self.run("serve", "--bind", "127.0.0.1:0", *more)

    def run(self, command: str, *more: str, stdin: int = subprocess.DEVNULL) -> Running:
        here = {"HOME": str(self.folder / "home"), "PYTHONPATH": str(self.folder / "here")}
        return self.start(command, "--cluster", str(self.folder / "cluster.yaml"), *more, stdin=stdin, **here)

    def runs_there(self) -> bool:
        """Whether anything of it does."""
        found = False
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found |= str(self.program).encode() in file.read_bytes()
            except OSError:
                continue
        return found


@pytest.fixture
def world(hosts: SshHosts, tmp_path: Path, start: Starter, demo: Path) -> World:
    made = World(tmp_path, start)
    hosts.cluster(tmp_path)
    made.program.write_text(AT_HEAD % str(demo))
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    command = f"exec {sys.executable} {made.program}"
    (tmp_path / "here" / "sitecustomize.py").write_text(HERE % (hosts.port, command))
    return made


def stream_of(running: Running, tokens: int) -> Callable[[], list[str | None]]:
    return stream_at(address_of(running), tokens)


def stream_at(url: str, tokens: int, key: str = "none") -> Callable[[], list[str | None]]:
    """A stream that has given its first token; call it for why it ended."""
    client = client_of(url).with_options(api_key=key)
    stream = client.completions.create(
        model="demo-moe", prompt="Natalia", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    return lambda: [event.choices[0].finish_reason for event in stream]


def test_it_is_here_and_its_end_too(world: World, tmp_path: Path) -> None:
    """Its keys do not appear on command lines."""
    key = "a-key-that-is-long-enough"
    (tmp_path / "keys").write_text(f"{key}\n")
    running = world.serve("--api-key-file", str(tmp_path / "keys"))
    url = address_of(running)
    assert httpx2.get(f"{url}/models").status_code == 401
    header = {"Authorization": f"Bearer {key}"}
    assert httpx2.get(f"{url}/models", headers=header).json()["data"][0]["id"] == "demo-moe"
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert key.encode() not in file.read_bytes()
    rest = stream_at(url, 30, key)
    running.interrupt(signal.SIGTERM)
    assert rest()[-1] == "length"
    code, out, err = running.finish()
    assert (code, out) == (0, b""), err.decode()
    assert b" tokens=30 " in err
    assert not world.runs_there()


def test_a_second_signal_ends_it_at_once(world: World) -> None:
    running = world.serve()
    rest = stream_of(running, 900)
    running.interrupt(signal.SIGTERM)
    assert running.process.stderr is not None
    wait_until(lambda: b"stopping: 1 request" in running.process.stderr.readline())  # type: ignore[union-attr]
    running.interrupt(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="was stopped before the answer was complete"):
        rest()
    code, _, err = running.finish()
    assert code == 128 + signal.SIGTERM, err.decode()
    assert not world.runs_there()


def test_the_service_there_ends_with_the_command_here(world: World) -> None:
    running = world.serve()
    stream_of(running, 900)
    os.kill(running.process.pid, signal.SIGKILL)
    wait_until(lambda: not world.runs_there(), "the service on the main host", HANG_S)


def test_it_ends_when_nobody_reads_its_log_any_more(world: World) -> None:
    running = world.serve()
    client = client_of(address_of(running))
    assert running.process.stderr is not None
    running.process.stderr.close()

    def asked() -> bool:
        with contextlib.suppress(openai.APIError):
            client.models.list()
        return running.process.poll() is not None

    wait_until(asked, "the command has ended")
    assert not world.runs_there()


def sessions(hosts: SshHosts) -> list[int]:
    """The host's processes for open ssh connections."""
    config = str(hosts.folder / "config")
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if config in line and "[listener]" in line:
            return [session.pid for session in process.children()]
    raise AssertionError("sshd does not run")


def connections(running: Running) -> list[int]:
    """The numbers of ssh's processes for the command."""
    return [int(line.split()[0]) for line in marked(running.mark) if re.match(r"\d+ ssh[ :]", line)]


def error_of(rest: Callable[[], object]) -> openai.APIError:
    with pytest.raises(openai.APIError) as found:
        rest()
    return found.value


def test_the_connection_is_lost_and_it_comes_back(world: World, hosts: SshHosts) -> None:
    """Twice: open streams get an error event, requests meanwhile an error of the API, and the cause is ssh's, not a
    line of the service's log. First the host closes the connections, then ssh is killed here."""
    running = world.serve("--retry", "1", "--launch-timeout", "60")
    url = address_of(running)
    client = client_of(url)
    rest = stream_at(url, 900)
    for number in sessions(hosts):
        os.kill(number, signal.SIGKILL)
    assert "the connection to the cluster's main host was lost before the answer was complete" in str(error_of(rest))
    assert isinstance(error_of(lambda: client.models.list()), openai.InternalServerError | openai.APIConnectionError)
    assert running.process.stderr is not None
    said = b""
    while not said.endswith(b"serving demo-moe at " + url.encode() + b"\n"):
        said += running.process.stderr.readline() or pytest.fail(said.decode())
    assert [model.id for model in client.models.list()] == ["demo-moe"]
    for number in connections(running):
        os.kill(number, signal.SIGKILL)
    code, _, err = running.finish()
    assert code == 1
    last = err.decode().splitlines()[-1]
    assert re.search(r"odmoe: HostError: main \(127.0.99.1\): .* was ended here by signal 9; try again", last)
    cause = r"(it closed the ssh connection|the ssh connection ended)"
    assert re.search(rf"Z main \(127.0.99.1\): {cause}.*; retry 1 of 1\n", said.decode())
    wait_until(lambda: not world.runs_there(), "the services on the main host", HANG_S)


def test_a_link_that_passes_nothing_is_the_cause(world: World, hosts: SshHosts) -> None:
    running = world.serve()
    url = address_of(running)
    rest = stream_at(url, 900)
    held = sessions(hosts)
    for number in held:
        os.kill(number, signal.SIGSTOP)
    try:
        assert "was lost before the answer was complete" in str(error_of(rest))
        code, _, err = running.finish()
    finally:
        for number in held:
            os.kill(number, signal.SIGCONT)
    assert code == 1
    assert "main (127.0.99.1): it does not answer ssh; see that it is switched on" in err.decode().splitlines()[-1]


def test_the_service_there_is_killed(world: World) -> None:
    running = world.serve()
    rest = stream_at(address_of(running), 900)
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes().split(b"\0")[1:2] == [str(world.program).encode()]:
                os.kill(int(file.parent.name), signal.SIGKILL)
    assert "was lost" in str(error_of(rest))
    code, _, err = running.finish()
    assert code == 1
    assert "main (127.0.99.1): the service there was ended by SIGKILL; see dmesg" in err.decode().splitlines()[-1]


def test_an_address_in_use(world: World) -> None:
    """It is told before anything runs on the main host."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        running = world.serve("--bind", f"127.0.0.1:{other.getsockname()[1]}")
        code, _, err = running.finish()
    assert code == 2
    assert b"in use" in err


def test_a_conversation(world: World, demo: Path) -> None:
    """It is Transformers' own answer, and leaves no service on the main host."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    inputs = tokenizer("HAMLET", return_tensors="pt")
    whole = AutoModelForCausalLM.from_pretrained(demo).generate(**inputs, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    running = world.run("chat", "--no-template", "-n", "8", stdin=subprocess.PIPE)
    out, err = running.process.communicate(b"HAMLET", timeout=HANG_S)
    assert (running.process.returncode, out.decode().rstrip("\n")) == (0, text.rstrip("\n")), err.decode()
    assert b"POST" not in err, "the service there logs no requests of this conversation"
    wait_until(lambda: not world.runs_there(), "the service on the main host", HANG_S)


def test_a_conversation_outlives_its_service(world: World, hosts: SshHosts, tmp_path: Path) -> None:
    """An answer that is cut off is an error, and the next message is answered by a new service."""
    here = {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "here"), "TERM": "dumb", "NO_COLOR": "1"}
    flags = ["chat", "--cluster", str(tmp_path / "cluster.yaml"), "--no-template", "-n", "8"]
    chat = pexpect.spawn(str(ODMOE), flags, env=os.environ | here, timeout=HANG_S, encoding="utf-8")
    try:
        chat.expect("demo-moe - /help")
        chat.expect(">>>")
        for number in sessions(hosts):
            os.kill(number, signal.SIGKILL)
        wait_until(lambda: not world.runs_there(), "the service on the main host")
        chat.send("HAMLET\r")
        chat.expect(r"cut at the most tokens")
        chat.expect(">>>")
        chat.sendeof()
        chat.expect(pexpect.EOF)
    finally:
        chat.close(force=True)
    assert chat.exitstatus == 0
