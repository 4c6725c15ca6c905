"""`odmoe serve` over nodes that last, on a Ray that runs already: a worker and the main node are killed while an
answer streams to the official client, and what the client sees.

One start of Ray, two of the service.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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

START_S = 300.0
KNOWN, LONG = 24, 600
"""Tokens that Transformers' answer has; tokens of an answer that is under way when a node is killed."""


@dataclass
class Service:
    """A running `odmoe serve`."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str
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

    def stream(self, count: int = LONG, meanwhile: Callable[[], None] = lambda: None) -> str:
        """The text of an answer. `meanwhile` is called when some of it has come."""
        parts: list[str] = []
        with client_of(self.url).with_options(timeout=HANG_S) as client:
            (served,) = client.models.list()
            for event in client.completions.create(
                model=served.id, prompt=self.prompt, max_tokens=count, stream=True, extra_body={"ignore_eos": True}
            ):
                parts.append(event.choices[0].text)
                if len(parts) == 4:
                    meanwhile()
        return "".join(parts)

    def kill(self, actor: str) -> None:
        """The first process of Ray's actors of this name, which must be there."""
        pid = min(int(line.split()[0]) for line in marked(self.mark) if f"ray::{actor}" in line)
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(reference: Callable[[str, int, int], Any]) -> Any:
    return reference("float32", 0, KNOWN)


@pytest.fixture(scope="module")
def serve(head: str, environment: dict[str, str], expected: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`with serve(flags) as service`: it is ended by SIGTERM, and must end well."""

    @contextmanager
    def run(*flags: str) -> Iterator[Service]:
        log = tmp_path_factory.mktemp("serve") / "stderr"
        command = [*WITH_CTRL_C, sys.executable, "-m", "odmoe", "serve", "--bind", "127.0.0.1:0", *flags]
        with log.open("wb") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment | {"RAY_ADDRESS": head}, stderr=err, start_new_session=True
            )
        service = Service(process, log, environment[MARK], expected.prompt)
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


@pytest.fixture(scope="module")
def nodes(demo_store: Callable[[str], Any]) -> list[str]:
    """The flags that start the nodes, where they do not run."""
    store = str(demo_store("float32").path)
    return ["-m", store, "--shadow", "none", "--threads", "1", "--launch-timeout", "240"]


def test_killed_nodes_as_a_client_sees_them(serve: Any, head: str, nodes: list[str], expected: Any) -> None:
    """First with nodes that the service starts, then with a second service that finds them."""
    with serve("--cluster", head, *nodes) as service:
        known = AutoTokenizer.from_pretrained(DEMO).decode(expected.tokens)
        assert service.stream(KNOWN) == known
        whole = service.stream()
        assert whole.startswith(known)

        assert service.stream(meanwhile=lambda: service.kill("NodeActor")) == whole, "a lost worker is a pause"
        service.wait_to_say(r"^(\S+Z )?worker \d is lost")

        with pytest.raises(openai.APIError, match="main node") as found:
            service.stream(meanwhile=lambda: service.kill("Main"))
        body: Any = found.value.body
        assert (body["code"], body["type"]) == ("main_node_lost", "server_error")
        service.wait_to_say(r" 200 .* finish=main_node_lost$")

    with serve("--cluster", "auto", "--retry", "3", "--launch-timeout", "240") as service:
        assert service.stream(meanwhile=lambda: service.kill("Main")) == whole
        service.wait_to_say(r"^(\S+Z )?main node lost after \d+ tokens; retry 1 of 3$")
