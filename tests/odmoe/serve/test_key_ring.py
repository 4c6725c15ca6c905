"""Keys with names and limits, and keys that change while the service runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from odmoe.serve.access_log import Record
from odmoe.serve.api_error import ApiError
from odmoe.serve.callers import Keys
from odmoe.serve.hangup import hold_hangup, on_hangup, read_keys_again
from odmoe.serve.key_ring import KeyRing
from odmoe.serve.request_fields import MOST_NAMES, Body, UnknownFields
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.serve_settings import ServeSettings
from scheduler.errors import ConfigError
from support.machines.http_service import Served, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

ANNA, CI, PLAIN = "annas-key-0123456789", "the-key-of-ci-0123456789", "a-key-without-a-name"
FILE = f"# colleagues\nanna:{ANNA} at-once=1\n\nci:{CI} per-minute=2\n{PLAIN}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


@pytest.fixture
def ring(file: Path) -> KeyRing:
    return KeyRing(ServeSettings(api_key_file=str(file)).keys())


@pytest.fixture
def served(model: Model, ring: KeyRing) -> Iterator[Served]:
    with serving(model, ring, log_format="json", forwarded_allow_ips=("127.0.0.0/8",)) as made:
        yield made


def _ask(served: Served, key: str) -> None:
    served.client(key).completions.create(model="demo-moe", prompt="a", max_tokens=1)


def test_the_log_has_the_keys_name_and_the_clients_address(served: Served) -> None:
    """That of a client of a proxy, where the proxy is believed: the last address that is not a proxy's own."""
    forwarded = {"X-Forwarded-For": "203.0.113.9, 192.0.2.7, 127.0.0.1"}
    for key, headers in ((ANNA, {}), (PLAIN, forwarded)):
        found = httpx2.get(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {key}"} | headers)
        assert found.status_code == 200
    until(lambda: len(served.lines) == 2)
    first, second = (json.loads(line) for line in served.lines)
    assert (first["client"], first["key"]) == ("127.0.0.1", "anna")
    assert (second["client"], "key" in second) == ("192.0.2.7", False)
    assert not any(key in line for line in served.lines for key in (ANNA, CI, PLAIN))


def test_a_proxy_that_is_not_trusted_is_not_believed(model: Model) -> None:
    with serving(model, log_format="json") as served:
        httpx2.get(f"{served.url}/v1/models", headers={"X-Forwarded-For": "192.0.2.7"})
        until(lambda: bool(served.lines))
        assert json.loads(served.lines[0])["client"] == "127.0.0.1"


@pytest.mark.usefixtures("endless")
def test_requests_of_a_key_at_once(served: Served) -> None:
    with served.client(ANNA).completions.create(model="demo-moe", prompt="a", max_tokens=9, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="1 requests under way, and may have 1") as told:
            _ask(served, ANNA)
        assert told.value.code == "rate_limit_exceeded"
        key = {"Authorization": f"Bearer {ANNA}"}
        assert httpx2.get(f"{served.url}/v1/models", headers=key).status_code == 200
    until(lambda: not served.service.under_way)


def test_requests_of_a_key_a_minute(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("odmoe.serve.key_ring.time.monotonic", lambda: now[0])
    _ask(served, CI)
    now[0] += 20
    _ask(served, CI)
    with pytest.raises(openai.RateLimitError, match="2 times a minute") as told:
        _ask(served, CI)
    assert told.value.response.headers["retry-after"] == "40"
    _ask(served, PLAIN)
    now[0] += 40.1
    _ask(served, CI)


def test_keys_are_read_again(served: Served, ring: KeyRing, file: Path) -> None:
    own, said = ServeSettings(api_key_file=str(file)), list[str]()
    file.write_text(f"new:{CI[::-1]}\n{PLAIN}\n")
    read_keys_again(own, ring, said.append)
    _ask(served, CI[::-1])
    with pytest.raises(openai.AuthenticationError):
        _ask(served, ANNA)
    file.write_text("short\n")
    read_keys_again(own, ring, said.append)
    _ask(served, PLAIN)
    assert said[0] == "SIGHUP: keys read again; 2 open the service"
    assert "the former keys stay in force" in said[1]
    assert "line 1 has a key of 5 characters" in said[1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"a name:{ANNA}", "line 1"),
        (f"ä:{ANNA}", "name that is not valid"),
        (":" + ANNA, "name that is not valid"),
        ("administrator:secret", "a key of 6 characters"),
        (f"anna:{ANNA} at-once=0", "words after the key"),
        (f"anna:{ANNA} often=1", "words after the key"),
        (f"anna:{ANNA}\nbert:{ANNA}", "a key twice"),
        ("# nothing", "has no key"),
    ],
)
def test_lines_that_are_not_valid(tmp_path: Path, line: str, why: str) -> None:
    """They are refused without being shown."""
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ConfigError, match=why) as told:
        ServeSettings(api_key_file=str(path)).keys()
    assert ANNA not in str(told.value)


def test_a_key_is_free_when_its_response_has_been_sent() -> None:
    """What the service does afterwards is no matter of the client."""
    key = ApiKey(CI, "ci", at_once=1)
    ring, under_way = KeyRing([key]), list[bool]()

    def is_used() -> bool:
        try:
            with ring.using(key):
                return False
        except ApiError:
            return True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for more in (True, False):
            under_way.append(is_used())
            await send({"type": "http.response.body", "body": b"a", "more_body": more})
        under_way.append(is_used())

    async def no_send(message: Message) -> None:
        pass

    scope: Any = {"type": "http", "path": "/v1/completions", "method": "POST"}
    scope |= {"headers": [(b"x-api-key", CI.encode())], "state": {"record": Record("id", "POST", "/v1/completions")}}
    no_receive: Any = None
    asyncio.run(Keys(app, ring, lambda code: None)(scope, no_receive, no_send))
    assert (under_way, is_used()) == ([True, True, False], False)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_hangup(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_before_the_service_is_held() -> None:
    """As a reload right after the start sends it. Calls do not overlap: what was read last is kept."""
    before, began, together = signal.getsignal(signal.SIGHUP), list[float](), list[int]()
    under_way = threading.Semaphore(0)

    def act() -> None:
        began.append(time.monotonic())
        together.append(len(began) - len(ended))
        time.sleep(0.05)
        ended.append(time.monotonic())
        under_way.release()

    ended: list[float] = []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        hold_hangup()
        os.kill(os.getpid(), signal.SIGHUP)
        with on_hangup(act):
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(2):
                assert under_way.acquire(timeout=10)
        os.kill(os.getpid(), signal.SIGHUP)  # while the process ends
    finally:
        signal.signal(signal.SIGHUP, before)
    assert together == [1, 1]


def test_strange_fields_without_number_are_looked_at_in_part() -> None:
    lines = list[str]()
    fields = UnknownFields(False, lines.append)
    for begin in range(0, 2000, 20):
        Body({f"field-{number}": 1 for number in range(begin, begin + 20)}).end(fields)
    assert len(lines) == MOST_NAMES
    assert "field-8 " not in "".join(lines)
