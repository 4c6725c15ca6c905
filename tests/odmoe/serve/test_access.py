"""Who may ask: keys, origins, sizes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.cases import slow_except
from support.machines.http_service import WAIT_S, Served, serving

if TYPE_CHECKING:
    from odmoe.api.model import Model

KEYS = ("first-key-of-two-keys", "second-key-of-two-keys")
ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def locked(model: Model) -> Iterator[Served]:
    with serving(model, keys=KEYS, cors_origin=(ORIGIN,)) as made:
        yield made


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked: Served, key: str) -> None:
    client = locked.client(key)
    assert [one.id for one in client.models.list()] == ["demo-moe"]
    assert client.completions.create(model="demo-moe", prompt="a", max_tokens=1).choices


@pytest.mark.parametrize("key", ["wrong", KEYS[0][:-1], KEYS[0] + "x", "ключ"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/v1/chat/completions", "/else"])
def test_another_key_does_not(locked: Served, key: str, path: str) -> None:
    header = {"Authorization": f"Bearer {key}".encode()}
    found = httpx2.request("GET" if "completions" not in path else "POST", f"{locked.url}{path}", headers=header)
    assert found.status_code == 401
    assert found.json()["error"]["code"] == "invalid_api_key"
    assert found.headers["www-authenticate"] == "Bearer"


def test_the_client_says_so(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        locked.client("wrong").models.list()


def test_what_was_refused_is_counted(locked: Served) -> None:
    def count() -> float:
        body = httpx2.get(f"{locked.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
        samples = [one for family in text_string_to_metric_families(body) for one in family.samples]
        return sum(
            one.value
            for one in samples
            if one.name == "odmoe_refused_requests_total" and one.labels["reason"] == "invalid_api_key"
        )

    before = count()
    assert httpx2.get(f"{locked.url}/v1/models").status_code == 401
    assert count() == before + 1


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_watching_needs_no_key(locked: Served, path: str) -> None:
    assert httpx2.get(f"{locked.url}{path}").status_code == 200


def test_a_key_of_another_scheme(locked: Served) -> None:
    assert httpx2.get(f"{locked.url}/v1/models", headers={"Authorization": f"Basic {KEYS[0]}"}).status_code == 401
    assert httpx2.get(f"{locked.url}/v1/models").status_code == 401
    assert httpx2.get(f"{locked.url}/v1/models", headers={"Authorization": f"bearer  {KEYS[0]}"}).status_code == 200


def test_pages_of_other_hosts(locked: Served, served: Served) -> None:
    """A browser asks first, without the key. Without --cors-origin nothing is allowed."""
    asks = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    found = httpx2.options(f"{locked.url}/v1/completions", headers=asks)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = httpx2.options(f"{locked.url}/v1/completions", headers=asks | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in httpx2.options(f"{served.url}/v1/completions", headers=asks).headers
    refused = httpx2.get(f"{locked.url}/v1/models", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


@pytest.mark.parametrize("length", [True, False])
def test_a_body_that_is_too_large(served: Served, length: bool) -> None:
    most = served.service.limits.body_bytes
    body = b"x" * (most + 1)
    parts: object = body if length else iter([body[: 1 << 20]] * (len(body) // (1 << 20) + 1))
    found = httpx2.post(f"{served.url}/v1/completions", content=parts)  # type: ignore[arg-type]
    assert (found.status_code, found.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 200_000, b'"text"', b"null", b"NaN"])
def test_a_body_that_is_no_request(served: Served, body: bytes) -> None:
    found = httpx2.post(f"{served.url}/v1/completions", content=body)
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")


def test_paths_and_methods_that_there_are_not(served: Served) -> None:
    for method, path, status in [("GET", "/else", 404), ("GET", "/v1/completions", 405), ("GET", "/docs", 404)]:
        before = served.counted("odmoe_refused_requests_total", reason="no_route")
        found = httpx2.request(method, f"{served.url}{path}")
        assert (found.status_code, found.json()["error"]["code"]) == (status, "no_route")
        assert served.counted("odmoe_refused_requests_total", reason="no_route") == before + 1
    near = httpx2.post(f"{served.url}/v1/completion").json()["error"]["message"]
    assert near.startswith("POST /v1/completion: Not Found; did you mean /v1/completions")


def test_an_empty_prompt_is_no_matter_of_the_command_line(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt is empty; give at least one character"):
        served.client().completions.create(model="demo-moe", prompt="")


def test_another_method_is_told_which_there_is(served: Served) -> None:
    for method, path, allowed in [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET")]:
        found = httpx2.request(method, f"{served.url}{path}")
        assert (found.status_code, found.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "127.1.2.3:1", "localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"],
)
def test_names_of_this_machine(served: Served, host: str) -> None:
    assert httpx2.get(f"{served.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "192.0.2.1", "[", "::1"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions"])
def test_another_name_is_refused_without_a_key(served: Served, locked: Served, host: str, path: str) -> None:
    """A page's own name may have been made to lead to this machine (DNS rebinding)."""
    reason = {"reason": "foreign_host"}
    before = served.counted("odmoe_refused_requests_total", **reason)
    method = "POST" if path == "/v1/completions" else "GET"
    found = httpx2.request(method, f"{served.url}{path}", headers={"Host": host})
    assert (found.status_code, found.json()["error"]["code"]) == (403, "foreign_host")
    assert served.counted("odmoe_refused_requests_total", **reason) == before + 1
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    assert httpx2.get(f"{locked.url}/v1/models", headers={"Host": host} | key).status_code == 200


@pytest.mark.parametrize(
    "kind", slow_except(["text/plain"], ["text/plain", "application/json", "application/x-www-form-urlencoded"])
)
def test_pages_may_not_send_requests_without_a_key(served: Served, locked: Served, kind: str) -> None:
    """Browsers send the first and the last of these without asking."""
    body = json.dumps({"model": "demo-moe", "prompt": "a", "max_tokens": 1})

    def status(of: Served, origin: str, **more: str) -> int:
        headers = {"Origin": origin, "Content-Type": kind, **more}
        return httpx2.post(f"{of.url}/v1/completions", content=body, headers=headers).status_code

    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"https://{served.host}"):
        assert status(served, origin) == 403
    assert status(served, served.url) == 200, "a page of its own"
    assert status(locked, "https://evil.example") == 401
    assert status(locked, "https://evil.example", Authorization=f"Bearer {KEYS[0]}") == 200


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
def test_pages_that_are_allowed_to(model: Model, allowed: str) -> None:
    body = json.dumps({"model": "demo-moe", "prompt": "a", "max_tokens": 1})
    with serving(model, cors_origin=(allowed,)) as served:
        found = httpx2.post(f"{served.url}/v1/completions", content=body, headers={"Origin": ORIGIN})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, allowed)
        other = httpx2.post(f"{served.url}/v1/completions", content=body, headers={"Origin": "https://evil.example"})
        assert other.status_code == (200 if allowed == "*" else 403)


def test_every_answer_has_its_id(served: Served) -> None:
    found = [httpx2.get(f"{served.url}/health").headers["x-request-id"] for _ in range(2)]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ("4b0e-req_1:a.b", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ('a"\x1b[1m', False),
        ("", False),
    ],
)
def test_a_clients_own_id(served: Served, given: str, is_taken: bool) -> None:
    """In the answer's header and in its id, where it can do no harm in a log."""
    asked = {"model": "demo-moe", "prompt": "a", "max_tokens": 1}
    found = httpx2.post(f"{served.url}/v1/completions", json=asked, headers={b"X-Request-Id": given.encode()})
    own = found.headers["x-request-id"]
    assert (own == given) is is_taken
    assert found.json()["id"] == f"cmpl-{own}"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/api/tags"])
def test_a_key_as_anthropics_clients_send_it(locked: Served, path: str) -> None:
    for key, is_known in ((KEYS[0], True), ("wrong", False), ("", False)):
        found = httpx2.get(f"{locked.url}{path}", headers={"x-api-key": key})
        assert (found.status_code == 401) is not is_known
    error = found.json()
    if path == "/v1/messages":
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
    else:
        assert "API key is missing or wrong" in str(error["error"])


def test_a_request_in_pieces(served: Served) -> None:
    """As a slow client sends it."""
    data = json.dumps({"model": "demo-moe", "prompt": "a", "max_tokens": 1}).encode()
    with socket.create_connection(served.address) as client:
        client.settimeout(WAIT_S)
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {served.host}\r\nConnection: close\r\n".encode())
        client.sendall(f"Content-Length: {len(data)}\r\n\r\n".encode())
        for byte in data:
            client.sendall(bytes([byte]))
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 1
