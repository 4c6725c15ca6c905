"""The page's files and its feed, over HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from main_node.engine import activity_watch
from odmoe.serve.page import feed as feeding
from odmoe.serve.page.static_files import STATIC, static_files
from scheduler.errors import LinkError
from support.machines.http_service import Served, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

KEY = "a key of sixteen and more"


@contextmanager
def updates(served: Served, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with httpx2.stream("GET", f"{served.url}/cluster/events", headers=headers, timeout=10.0) as stream:
        assert stream.status_code == 200, stream.read()
        yield (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "odmoe-page"]


class Addresses(HTMLParser):
    """What a page would fetch, or run in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [str(given[name]) for name in ("src", "href", "action") if given.get(name)]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "script" and "src" not in given:
            self.inline.append(tag)


def test_every_file_that_the_page_names_is_there(served: Served) -> None:
    page = httpx2.get(f"{served.url}/")
    assert page.headers["content-type"].startswith("text/html")
    reader = Addresses()
    reader.feed(page.text)
    assert reader.inline == []
    wanted = {f"/{address}" for address in reader.found}
    for file in STATIC.glob("*.js"):
        wanted |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', file.read_text())}
    assert wanted | {"/"} == set(static_files()), "a file that nothing asks for, or one that is not there"
    for path in sorted(wanted):
        assert httpx2.get(served.url + path).status_code == 200, path


@pytest.mark.parametrize("path", sorted(static_files()))
def test_files_are_strict_and_kept_by_browsers(path: str, served: Served) -> None:
    found = httpx2.get(served.url + path)
    policy = dict(part.strip().split(" ", 1) for part in found.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
    assert found.headers["x-content-type-options"] == "nosniff"
    again = httpx2.get(served.url + path, headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx2.head(served.url + path).status_code == 200
    assert httpx2.post(served.url + path).status_code == 405


def test_with_a_key_the_page_is_open_and_what_it_shows_is_not(model: Model) -> None:
    with serving(model, keys=(KEY,)) as served:
        for path in static_files():
            assert httpx2.get(served.url + path).status_code == 200
        for path in ("/cluster", "/cluster/events", "/v1/models"):
            assert httpx2.get(served.url + path).status_code == 401
        with updates(served, Authorization=f"Bearer {KEY}") as found:
            assert next(found)["nodes"][0]["name"] == "main"


def test_the_cluster_is_described(served: Served) -> None:
    found = httpx2.get(f"{served.url}/cluster").json()
    config = json.loads((served.service.model.opened.store.dense / "config.json").read_text())
    assert len(found["layers"]) == config["num_hidden_layers"]
    assert set(found["experts"]) == {config["num_local_experts"]}
    assert (found["model"], found["chat"]) == ("demo-moe", True)


def test_the_feed_has_what_gates_choose(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_watch, "ACCESSES_S", 1e9)
    with updates(served) as found:
        first = next(found)
        client = served.client()
        client.completions.create(model="demo-moe", prompt="HAMLET", max_tokens=4, extra_body={"ignore_eos": True})
        chosen, last = 0, first
        end = time.monotonic() + 5
        while last["T"][1] < first["T"][1] + 4 and time.monotonic() < end:
            last = next(found)
            chosen += sum(last["a"][4::5])
    named = httpx2.get(f"{served.url}/cluster").json()["totals"].index("named")
    assert last["T"][1] == first["T"][1] + 4
    assert chosen >= last["T"][named] - first["T"][named] == 3 * 8 * 2
    assert [row[0] for row in last["w"]] == [0, 1]


def test_nobody_asks_the_cluster_when_the_last_viewer_has_gone(served: Served) -> None:
    with updates(served) as one, updates(served) as other:
        next(one)
        next(other)
        assert len(watchers()) == 1
    until(lambda: not watchers())


def test_viewers_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "VIEWERS", 2)
    with ExitStack() as stack:
        viewers = [stack.enter_context(updates(served)) for _ in range(2)]
        assert [next(one)["w"][0][0] for one in viewers] == [0, 0]
        refused = httpx2.get(f"{served.url}/cluster/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
        assert "Retry-After" in refused.headers
    until(lambda: not watchers())


def test_a_viewer_does_not_hold_up_a_drain(model: Model) -> None:
    with serving(model) as served, updates(served) as found:
        next(found)
        began = time.monotonic()
        served.server.stop()
        assert list(found)[-1] == {"end": "the service is stopping"}
        until(lambda: bool(served.code))
        assert time.monotonic() - began < 4
    assert served.code == [0]


def test_a_main_node_that_does_not_answer_is_no_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = threading.Event()
    activity = served.service.model.cluster.activity

    def read(since: int | None) -> Any:
        if lost.is_set():
            raise LinkError("10.0.0.7 is gone")
        return activity(since)

    monkeypatch.setattr(served.service.model.cluster, "activity", read)
    with updates(served) as found:
        next(found)
        lost.set()
        told = next(one for one in found if "lost" in one)
        assert "10.0.0.7" not in json.dumps(told)
        lost.clear()
        assert next(one for one in found if "lost" not in one)["w"]


def test_one_who_reads_slowly_gets_the_latest(served: Served) -> None:
    import asyncio

    async def main() -> list[bytes]:
        viewer = feeding.Viewer()
        for number in range(10):
            viewer.offer(str(number).encode())
        return [viewer.updates.get_nowait() for _ in range(viewer.updates.qsize())]

    assert asyncio.run(main()) == [b"6", b"7", b"8", b"9"]
