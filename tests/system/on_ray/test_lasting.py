"""Nodes that go on when whoever started them has gone: found again, made anew, and ended, whoever was killed. A Python
program, lasting.py, sees it first, all of it once; then a client of `odmoe serve`, and `odmoe generate`.

One start of Ray. The later tests use the nodes that the first service starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from support.machines.processes import HANG_S, MARK, WITH_CTRL_C, marked, wait_until
from support.machines.served_process import client_of
from support.paths import DEMO, ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("lasting.py")
START_S = RESTART_S = 300.0
LONG, DRAWN = 64, 160
"""Tokens of answers that are under way when a node is killed, greedy and drawn."""
END_S = 60.0
"""Most time from a kill to the end of a command on busy cores. The error is there after two seconds."""


@pytest.fixture(scope="module")
def wanted(reference: Callable[[str, int, int], Any]) -> Any:
    return reference("float32", 0, LONG)


@pytest.fixture(scope="module")
def text(wanted: Any) -> str:
    """Transformers' answer, of `LONG` tokens."""
    return str(AutoTokenizer.from_pretrained(DEMO).decode(wanted.tokens))


@pytest.fixture(scope="module")
def told(head: str, environment: dict[str, str], demo_store: Callable[[str], Any], wanted: Any) -> dict[str, Any]:
    command = [sys.executable, SCRIPT, head, str(demo_store("float32").path), json.dumps(wanted.prompt)]
    environment = environment | {"RAY_ADDRESS": head}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert found, f"{done.stdout}\n{done.stderr}"
    answer: dict[str, Any] = json.loads(found[0].removeprefix("told "))
    return answer


def test_the_next_one_finds_the_nodes_that_run(told: dict[str, Any], wanted: Any) -> None:
    """Whether it names the model and Ray's address, or takes what is served."""
    assert told["answers"] == [wanted.tokens[:6]] * 3
    assert told["pids again"] == [told["pids"]] * 2


def test_the_dtype_that_is_served_may_be_asked_for_by_its_name(told: dict[str, Any]) -> None:
    same, other = told["dtype"]
    assert same == ""
    assert "serves with --dtype float32, not bfloat16" in other


def test_a_main_node_that_was_killed_starts_by_itself_and_keeps_its_workers(told: dict[str, Any], wanted: Any) -> None:
    assert told["states"]
    assert told["third"] == wanted.tokens[:6]
    assert told["pids after"][0] != told["pids"][0]
    assert told["pids after"][1:] == told["pids"][1:]


def test_workers_of_a_main_node_that_is_gone_do_not_serve_the_next(told: dict[str, Any], wanted: Any) -> None:
    assert len(told["orphans"]) == 2
    assert told["slots"] == [2, 2]
    assert told["fourth"] == wanted.tokens[:6]


def test_a_worker_that_is_gone_for_good_is_made_anew(told: dict[str, Any], wanted: Any) -> None:
    assert told["made anew"] == wanted.tokens[:6]


def test_ending_ends_all_even_those_that_the_main_node_does_not_know(told: dict[str, Any]) -> None:
    assert told["left"] == []


def test_a_start_that_is_refused_leaves_nothing(told: dict[str, Any]) -> None:
    assert told["refused"].startswith("ConfigError: ctx-size is 1073741824")
    assert told["left of refused"] == []


def kill(mark: str, actor: str) -> Callable[[], None]:
    """Kills the first process of Ray's actors of this name, which must be there now."""
    pid = min(int(line.split()[0]) for line in marked(mark) if f"ray::{actor}" in line)
    return lambda: os.kill(pid, signal.SIGKILL)


@dataclass
class Service:
    """A running `odmoe serve`."""

    log: Path
    prompt: list[int]

    def said(self) -> str:
        """On standard error, so far."""
        return self.log.read_text()

    def wait_to_say(self, pattern: str) -> None:
        """Raises AssertionError where no line of standard error matches in time."""
        wait_until(lambda: re.search(pattern, self.said(), re.MULTILINE), f"{pattern} in {self.said()}")

    @property
    def url(self) -> str:
        found = re.search(r"^serving (\S+) at (http://\S+/v1)$", self.said(), re.MULTILINE)
        assert found, self.said()
        return found[2]

    def stream(self, meanwhile: Callable[[], None]) -> str:
        """The text of an answer. `meanwhile` is called when some of it has come."""
        parts: list[str] = []
        with client_of(self.url).with_options(timeout=HANG_S) as client:
            (served,) = client.models.list()
            for event in client.completions.create(
                model=served.id, prompt=self.prompt, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
            ):
                parts.append(event.choices[0].text)
                if len(parts) == 4:
                    meanwhile()
        return "".join(parts)


@pytest.fixture(scope="module")
def nodes(demo_store: Callable[[str], Any]) -> list[str]:
    """The flags that start the nodes, if they do not run."""
    return ["-m", str(demo_store("float32").path), "--shadow", "none", "--threads", "1", "--launch-timeout", "240"]


@pytest.fixture(scope="module")
def serve(head: str, environment: dict[str, str], wanted: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`with serve(flags) as service`: it is ended by SIGTERM, and must end well."""

    @contextmanager
    def run(*flags: str) -> Iterator[Service]:
        service = Service(tmp_path_factory.mktemp("serve") / "stderr", wanted.prompt)
        command = [*WITH_CTRL_C, sys.executable, "-m", "odmoe", "serve", "--bind", "127.0.0.1:0", *flags]
        with service.log.open("wb") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment | {"RAY_ADDRESS": head}, stderr=err, start_new_session=True
            )
        try:
            wait_until(
                lambda: process.poll() is not None or "\nserving " in f"\n{service.said()}", "it serves", START_S
            )
            assert process.poll() is None, service.said()
            yield service
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_S) == 0, service.said()
        finally:
            process.kill()
            process.wait(HANG_S)

    return run


def test_killed_nodes_as_a_client_of_the_service_sees_them(
    serve: Any, head: str, environment: dict[str, str], nodes: list[str], text: str
) -> None:
    with serve("--cluster", head, *nodes) as service:
        assert service.stream(kill(environment[MARK], "NodeActor")) == text, "a lost worker is a pause"
        service.wait_to_say(r"^(\S+Z )?worker \d is lost")
        with pytest.raises(openai.APIError, match="main node") as found:
            service.stream(kill(environment[MARK], "Main"))
        body: Any = found.value.body
        assert (body["code"], body["type"]) == ("main_node_lost", "server_error")
        service.wait_to_say(r" 200 .* finish=main_node_lost$")


def test_with_retry_a_client_of_the_service_sees_nothing(serve: Any, environment: dict[str, str], text: str) -> None:
    """Of a main node that is killed. This service finds the nodes of the one before, and takes what they serve."""
    with serve("--cluster", "auto", "--retry", "3", "--launch-timeout", "240") as service:
        assert service.stream(kill(environment[MARK], "Main")) == text
        service.wait_to_say(r"^(\S+Z )?main node lost after \d+ tokens; retry 1 of 3$")


@pytest.fixture(scope="module")
def generate(head: str, environment: dict[str, str], nodes: list[str]) -> Any:
    """`generate(kills, flags)`: the exit code of `odmoe generate`, its answer, its lines on standard error, and the
    seconds from the last kill to the end. `kills`: after how many bytes of the answer the main node is killed."""

    def run(kills: tuple[int, ...], *flags: str) -> tuple[int, str, list[str], float]:
        command = [sys.executable, "-m", "odmoe", "generate", "--cluster", head, *nodes, "--ignore-eos", *flags]
        command.append("Question: How many apples does Tom have?")
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        out, killed = b"", time.monotonic()
        try:
            for at in kills:
                while len(out) < at:
                    out += os.read(process.stdout.fileno(), 1) or pytest.fail(f"it ended after {out!r}")
                kill(environment[MARK], "Main")()
                killed = time.monotonic()
            rest, err = process.communicate(timeout=RESTART_S)
        finally:
            process.kill()
        return process.returncode, (out + rest).decode(), err.decode().splitlines(), time.monotonic() - killed

    return run


def test_a_drawn_answer_of_the_command_line_goes_on_twice(generate: Any) -> None:
    """The text is that of an undisturbed run with the same seed, no token twice."""
    how = ["-n", str(DRAWN), "--temperature", "0.9", "--seed", "7"]
    code, whole, lines, _ = generate((), *how)
    assert code == 0, lines
    code, out, lines, _ = generate((5, 60), "--retry", "3", *how)
    assert (code, out) == (0, whole), lines
    lines = [line for line in lines if line.startswith("main node lost after ")]
    assert [line.partition("; ")[2] for line in lines] == ["retry 1 of 3", "retry 2 of 3"]


def test_without_retry_the_command_line_names_the_cause(generate: Any) -> None:
    code, out, lines, seconds = generate((5,), "-n", "800")
    assert (code, bool(out)) == (1, True)
    assert lines[-1].startswith("odmoe: MainNodeLostError: the main node "), lines
    assert seconds < END_S
