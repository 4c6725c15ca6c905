"""`odmoe chat` without a terminal: here as Transformers answers, by URL as the official client is answered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.conversation.remote_model import RemoteModel
from odmoe.conversation.transcript import Transcript
from scheduler.errors import ConfigError, LinkError
from support.machines.cli import check_one_line
from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from odmoe.api.model import Model

CommandLine = Callable[..., Any]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERE = ("--shadow", "none", "--workers", "1", "--threads", "1", "-q")


@pytest.fixture(scope="module")
def model(demo_store: Callable[[str], Any]) -> Iterator[Model]:
    with demo_model(demo_store("float32")) as made:
        made.opened.tokenizer.chat_template = TEMPLATE
        yield made


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as made:
        yield made


@pytest.mark.slow
def test_here(cli: CommandLine, demo: Path, tmp_path: Path, expected: Any) -> None:
    chatty = shutil.copytree(demo, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("-m", str(chatty), "--system-prompt", "be brief", "-n", "8", *HERE)
    answer = cli("chat", *flags, stdin=b"hi\n")
    text = "<system>be brief</system><user>hi</user><assistant>"
    assert (answer.code, answer.out.rstrip("\n")) == (0, expected(text, 8)[1].rstrip("\n"))


def test_a_model_without_a_template_is_refused(cli: CommandLine, demo: Path, no_nodes_started: None) -> None:
    check_one_line(cli("chat", "-m", str(demo), *HERE, stdin=b"hi"), 2, "ConfigError", ["template", "--no-template"])


@pytest.fixture
def no_nodes_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odmoe.api.model.start_cluster", lambda *given: pytest.fail("a cluster was started"))


def test_plain_text_is_continued(cli: CommandLine, demo: Path, expected: Any) -> None:
    answer = cli("chat", "-m", str(demo), "--no-template", "-n", "8", *HERE, stdin=b"HAMLET")
    assert (answer.code, answer.out.rstrip("\n")) == (0, expected("HAMLET", 8)[1].rstrip("\n"))


def test_by_url(cli: CommandLine, served: Served) -> None:
    """Both turns as the official client gets them."""
    answer = cli("chat", "--url", served.url, "-n", "8", "-q", stdin=b"hi\n")
    chat: list[Any] = [{"role": "user", "content": "hi"}]
    with served.client() as client:
        whole = client.chat.completions.create(model="demo-moe", messages=chat, max_tokens=8)
    text = whole.choices[0].message.content or ""
    assert (answer.code, answer.out.rstrip("\n")) == (0, text.rstrip("\n"))
    model = RemoteModel(served.url, None, "", {"max_tokens": 8}, True)
    found = model.answer(chat)
    assert "".join(delta.text for delta in found) == text
    assert whole.usage is not None
    figures = found.figures
    assert (figures.prompt_tokens, figures.new_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert figures.finish == whole.choices[0].finish_reason
    with pytest.raises(ConfigError, match="has no model 'other'"):
        model.choose("other")
    model.close()


def test_an_answer_by_url_is_given_up(served: Served, model: Model) -> None:
    """The service is told: its answer ends, too."""
    with_end = RemoteModel(served.url, None, "", {"max_tokens": 900, "ignore_eos": True}, True)
    answer = with_end.answer([{"role": "user", "content": "hi"}])
    deltas = iter(answer)
    assert next(deltas).text
    answer.cancel()
    with pytest.raises(Exception, match="given up"):
        list(deltas)
    with_end.close()


def test_wrong_use_is_named(cli: CommandLine, served: Served, demo: Path) -> None:
    url = ("--url", served.url)
    check_one_line(cli("chat", *url, "--workers", "3", stdin=b"hi"), 2, "ConfigError", ["--workers", "--url"])
    check_one_line(cli("chat", "--url", "nowhere", stdin=b"hi"), 2, "ConfigError", ["--url is 'nowhere'", "/v1"])
    check_one_line(cli("chat", *url, stdin=b" "), 2, "PromptError", ["empty"])
    check_one_line(cli("chat", "--url", "http://127.0.0.1:9", stdin=b"hi"), 1, "LinkError", ["127.0.0.1:9", "reached"])
    check_one_line(cli("chat", "-m", str(demo), "--api-key", "k", stdin=b"hi"), 2, "ConfigError", ["--url"])
    with pytest.raises(LinkError):
        RemoteModel("http://127.0.0.1:9/v1", None, "", {}, True)


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    first = Transcript("be brief")
    first.add("user", "h\u00e9llo\u2028")
    first.add("assistant", "hi")
    first.save(tmp_path / "talk.json", "demo")
    second = Transcript()
    second.load(tmp_path / "talk.json")
    assert second.messages == first.messages
    second.reset()
    assert second.messages == [{"role": "system", "content": "be brief"}]
    (tmp_path / "wrong.json").write_text('[{"role": "cook", "content": "x"}]')
    with pytest.raises(ConfigError, match=r"message 0 of .*'cook'"):
        second.load(tmp_path / "wrong.json")
