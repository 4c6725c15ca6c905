"""The page as a person has it: in Chromium, over a service whose workers are processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    assert "worker 1 is lost" in page.inner_text("#lines")
    cluster.nodes[1].restart()
    page.wait_for_selector(f"{row}:not(.lost)")
    page.click("#stop")
    shown.wait_answered()
    assert page.locator("article .error").count() == 0
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
