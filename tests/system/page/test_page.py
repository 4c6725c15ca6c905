"""The page as a person has it: in Chromium, over a service whose workers are processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.machines.http_service import Served, demo_model, serving, until
from support.machines.process_cluster import ProcessCluster, process_model

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make env installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
LOOKS = (Path(__file__).parent / "looks.js").read_text()
MARKDOWN = """# A heading

Some `code`, **strong**, [a link](https://example.com) and a list:

- one
- two

```python
def f(x):  # a comment
    return "text" + str(1)
```

> a quotation

| a | b |
| --- | --- |
| 1 | 2 |
"""
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
KEY = "a key of sixteen and more"
WAIT_MS = 20_000


@dataclass
class Opened:
    """A page, and what it has done that it should not."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Of its console, and those of scripts."""
    foreign: list[str] = field(default_factory=list)
    """Addresses of other hosts that it has asked."""

    def ask(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def wait_answered(self) -> None:
        self.page.wait_for_selector("article.assistant:last-child:not(.writing) footer button")

    def answers(self) -> list[str]:
        return [str(one) for one in self.page.locator("article.assistant .body").all_inner_texts()]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens the page of a service in a browser of its own, and closes it."""
    contexts = []

    def open_page(served: Served, **how: Any) -> Opened:
        context = chromium.new_context(**how)
        contexts.append(context)
        made = Opened(context.new_page())
        made.page.set_default_timeout(WAIT_MS)
        made.page.on("console", lambda said: made.errors.append(said.text) if said.type == "error" else None)
        made.page.on("pageerror", lambda error: made.errors.append(str(error)))
        made.page.on(
            "request", lambda asked: None if asked.url.startswith(served.url) else made.foreign.append(asked.url)
        )
        made.page.goto(f"{served.url}/")
        return made

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def on_processes(demo_store: Callable[[str], Any]) -> Iterator[tuple[Served, ProcessCluster]]:
    with process_model(demo_store("float32")) as (model, cluster):
        model.opened.tokenizer.chat_template = TEMPLATE
        with serving(model) as served:
            yield served, cluster


def test_a_chat_lasts_and_asks_nobody_else(
    on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]
) -> None:
    chat = opened(on_processes[0])
    page = chat.page
    page.click("#options-open")
    page.fill("#most", "12")
    page.wait_for_selector("#model:has-text('demo-moe')")
    chat.ask("HAMLET <img src=x onerror=alert(1)>")
    chat.wait_answered()
    client = on_processes[0].client()
    expected = client.chat.completions.create(
        model="demo-moe", messages=[{"role": "user", "content": "HAMLET <img src=x onerror=alert(1)>"}], max_tokens=12
    )
    (answer,) = chat.answers()
    assert answer.split() == (expected.choices[0].message.content or "").split()
    assert "tokens/s" in page.inner_text("article.assistant .speed")
    assert page.locator("#messages img").count() == 0

    page.click("article.assistant button:has-text('Again')")
    chat.wait_answered()
    assert chat.answers() == [answer]
    page.click("article.user button:has-text('Edit')")
    page.fill("article.user textarea", "My fellow Americans,")
    page.click("article.user button:has-text('Send')")
    page.wait_for_selector("article.user .body:has-text('My fellow')")
    chat.wait_answered()
    answers = chat.answers()
    page.click("#new")
    chat.ask("KING RICHARD")
    chat.wait_answered()

    page.reload()
    page.wait_for_selector("article.assistant")
    assert "KING RICHARD" in page.inner_text("article.user .body")
    page.select_option("#conversations", label="My fellow Americans,")
    assert chat.answers() == answers
    assert (chat.errors, chat.foreign) == ([], [])


def test_an_answer_is_stopped(on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]) -> None:
    served, _ = on_processes
    chat = opened(served)
    chat.ask("HAMLET")
    chat.page.wait_for_selector("article.assistant .body:not(:empty)")
    chat.page.click("#stop")
    chat.wait_answered()
    assert "stopped" in chat.page.inner_text("article.assistant footer")
    until(lambda: not served.service.under_way)
    assert chat.errors == []


def test_a_killed_worker_is_red_until_it_is_back(
    on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]
) -> None:
    served, cluster = on_processes
    page = (shown := opened(served)).page
    row = "[data-node='worker 1']"
    page.wait_for_selector(f"{row}:not(.lost)")
    shown.ask("HAMLET")
    page.wait_for_selector(f"{row} .does:has-text('computes')")
    cluster.nodes[1].kill()
    page.wait_for_selector(f"{row}.lost .why:not(:empty)")
    page.wait_for_selector("#lines:has-text('worker 1 is lost')", state="attached")
    cluster.nodes[1].restart()
    page.wait_for_selector(f"{row}:not(.lost)")
    page.click("#stop")
    shown.wait_answered()
    assert page.locator("article .error").count() == 0
    assert shown.errors == []


def with_answer(page: Any, text: str, **more: Any) -> None:
    """Opens the page with a conversation that has this answer already."""
    messages = [{"role": "user", "content": "HAMLET"}, {"role": "assistant", "content": text, **more}]
    kept = json.dumps([{"id": "1", "title": "HAMLET", "changed": 1, "messages": messages}])
    page.evaluate("kept => localStorage.setItem('odmoe.conversations', kept)", kept)
    page.reload()
    page.wait_for_selector("#link[data-state='live']", state="attached")
    page.wait_for_selector("#plan:not([hidden])", state="attached")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_person_without_mouse_or_good_eyes_can_use_it(
    theme: str, on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]
) -> None:
    shown = opened(on_processes[0], color_scheme=theme)
    page = shown.page
    with_answer(page, MARKDOWN, error="An error.", reasoning="Some thought.", figures="5 tokens/s", stopped=True)
    for name in ("h3", "strong", "a", "li", "pre code .k", "blockquote", "td"):
        assert page.locator(f"article.assistant .body {name}").count(), name
    page.click("#options-open")
    page.evaluate("document.querySelector('.node').classList.add('lost')")
    page.evaluate(LOOKS)
    assert page.evaluate("faintTexts()") == []
    assert page.evaluate("namelessControls()") == []
    page.focus("#grid")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.inner_text("#cell").startswith("layer 0, expert 2")
    assert page.get_attribute("#cell", "role") == "status"
    page.focus("#new")
    reached = {}
    while page.evaluate("document.activeElement !== document.body") and len(reached) < 40:
        name = page.evaluate("document.activeElement.id || document.activeElement.textContent")
        reached[name] = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        page.keyboard.press("Tab")
    assert {"conversations", "Copy", "Edit", "Again", "input", "send", "colour", "grid"} <= set(reached)
    assert set(reached.values()) == {"solid"}
    assert shown.errors == []


def test_what_goes_wrong_is_said_and_can_be_tried_again(
    demo_store: Callable[[str], Any], opened: Callable[..., Opened]
) -> None:
    with demo_model(demo_store("float32"), parallel=1, queue=0) as model:
        model.opened.tokenizer.chat_template = TEMPLATE
        with serving(model) as served:
            shown = opened(served)
            page = shown.page
            page.wait_for_selector("#model:has-text('demo-moe')")
            shown.ask("HAMLET " * served.service.context)
            page.wait_for_selector(f"article .error:has-text('{served.service.context} tokens')")
            page.click("#new")
            client = served.client()
            with client.completions.create(
                model="demo-moe", prompt="A", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            ) as held:
                next(iter(held))
                shown.ask("HAMLET")
                page.wait_for_selector("article .error:has-text('the queue is full')")
            until(lambda: not served.service.under_way)
            page.click("#options-open")
            page.fill("#most", "4")
            page.click("article.assistant button:has-text('Again')")
            page.wait_for_selector("article.assistant .speed:has-text('4 tokens')")
            assert page.locator("article .error").count() == 0
        page.wait_for_selector("#trouble:not([hidden])")
        assert page.get_attribute("#link", "data-state") == "lost"
        shown.ask("HAMLET")
        page.wait_for_selector("article .error:has-text('does not answer')")
        assert page.is_visible("#send")


def test_the_plan_stands_beside_what_is(
    on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]
) -> None:
    page = (shown := opened(on_processes[0])).page
    page.wait_for_selector("#plan:has-text('compute on a processor')")
    assert page.locator("#memory .memory-bar").count() == 2
    assert page.locator("#memory .key > span").count() == page.locator(".node").count() > 1
    plan = {"memory": {}, "tokens_per_s": 12.34, "hardware": "some-machines", "why": ""}
    page.route("**/cluster/plan", lambda route: route.fulfill(json=plan))
    page.reload()
    page.wait_for_selector("#plan:has-text('12.3 tokens/s for one request, with the times of some-machines')")
    page.wait_for_selector("#memory .memory-bar")
    assert page.inner_text("#plots .plot:first-child .plan") == "plan 12"
    assert page.locator("#memory .memory-bar").count() == 1
    assert shown.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_large_model_is_lit_cell_by_cell(
    width: int, on_processes: tuple[Served, ProcessCluster], opened: Callable[..., Opened]
) -> None:
    """61 layers of 256 experts, as DeepSeek-V3 has, told by a feed of our own."""
    shown = opened(on_processes[0], viewport={"width": width, "height": 844}, device_scale_factor=2)
    page, layers, experts = shown.page, 61, 256
    described = page.evaluate("fetch('cluster').then((found) => found.json())")
    described |= {"layers": list(range(layers)), "experts": [experts] * layers}
    lit = [(layer, (37 * layer) % experts, layer % 5, layer % 8) for layer in range(layers)]
    first = {
        **{"s": 1.0, "p": 0, "q": [1, 0], "T": [0] * len(described["totals"]), "t": 0},
        "a": [value for one in lit for value in (*one, 1)],
        "w": [[number, 1, 0, 0, 0, 0] for number in range(8)],
        "lines": [],
        "nodes": [
            {"name": f"worker {number}", "role": "worker", "number": number, "up": True, "host": "h", "device": "cpu"}
            | {"slots": 1, "memory": 1, "loads": 0, "bytes": 0, "load_s": 0, "lost": 0, "rejoined": 0, "suspect": False}
            for number in range(8)
        ],
    }
    body = f"data: {json.dumps(first)}\n\n"
    page.route("**/cluster", lambda route: route.fulfill(json=described))
    page.route("**/cluster/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.reload()
    if width < 900:
        page.click("nav button[data-show='cluster']")
    page.wait_for_selector(".node:nth-child(8)")
    assert page.inner_text("#axis") == "layers 0 to 60 ↓, experts 0 to 255 →"
    page.evaluate(LOOKS)
    found: list[Any] = []
    until(lambda: bool(found.append(page.evaluate(f"litCells({layers}, {experts})")) or len(found[-1]) == layers))
    assert [tuple(one) for one in found[-1]] == [one[:2] for one in lit]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert shown.errors == []


def test_the_key_is_asked_for_once(demo_store: Callable[[str], Any], opened: Callable[..., Opened]) -> None:
    """And without a chat template, the model continues a text."""
    with demo_model(demo_store("float32")) as model, serving(model, keys=(KEY,)) as served:
        shown = opened(served, viewport={"width": 390, "height": 844})
        page = shown.page
        page.fill("#key", "a wrong key of sixteen")
        page.click("#key-form button")
        page.wait_for_selector("#key-why:has-text('wrong')")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_selector("#plain:not([hidden])")
        page.click("#options-open")
        page.fill("#most", "8")
        shown.ask("HAMLET")
        shown.wait_answered()
        expected = served.client(KEY).completions.create(model="demo-moe", prompt="HAMLET", max_tokens=8)
        assert shown.answers()[0].strip() == expected.choices[0].text.strip()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.reload()
        page.wait_for_selector("#link[data-state='live']", state="attached")
        assert not page.is_visible("#key-dialog")
        assert all("401" in error for error in shown.errors), shown.errors
