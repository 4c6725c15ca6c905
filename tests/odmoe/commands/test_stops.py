"""Stop texts: what is shown, and where the answer ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from odmoe.chat import chat_text
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from odmoe.text import StoppedText, make_stopper
from scheduler.errors import ConfigError
from support.machines.cli import CommandLine

COUNT = 48


class Letters:
    """A tokenizer of whole texts: token n stands for `parts[n]`."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.parts[i] for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.parts[token]


few = st.text("ab\n", min_size=1, max_size=4)


@given(parts=st.lists(few, max_size=12), stop=st.lists(few, min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_the_text_before_the_first_stop_and_no_more(parts: list[str], stop: list[str]) -> None:
    """Stop texts cut by tokens in every way; what is shown never has to be taken back."""
    text = StoppedText(Letters(parts), tuple(stop))
    shown, whole, ends = "", "", None
    for number, part in enumerate(parts):
        shown += text.push(number)
        whole += part
        places = [at for at in map(whole.find, stop) if at >= 0]
        if places and ends is None:
            ends = min(places)
        assert text.stopped is (ends is not None)
        assert whole[:ends].startswith(shown)
        longest = max(len(one) for one in stop)
        assert ends is not None or len(whole) - len(shown) < longest
    assert shown + text.flush() == whole[:ends]


def test_without_stops_nothing_waits() -> None:
    text = StoppedText(Letters(["a", "b"]), ())
    assert [text.push(0), text.push(1), text.flush()] == ["a", "b", ""]


@pytest.fixture(scope="module")
def cluster(demo_store: Callable[[str], Any]) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(Settings(model="demo", shadow="none", workers=2, threads=1), demo_store("float32"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def greedy(demo: Path, gsm8k: list[str], cluster: EmbeddedCluster) -> tuple[list[int], list[int], str]:
    """A prompt, its answer, and the answer's text."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    prompt = tokenizer(gsm8k[1])["input_ids"]
    *_, last = cluster.generate(prompt, COUNT, ignore_eos=True)
    assert last.report is not None
    return prompt, last.report.token_ids, tokenizer.decode(last.report.token_ids)


@pytest.fixture(scope="module")
def model(demo: Path) -> Any:
    """Transformers' own."""
    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, experts_implementation="eager")


@pytest.mark.slow
@pytest.mark.parametrize(("start", "length"), [(3, 1), (30, 12)])
def test_as_generate_ends(
    start: int, length: int, cluster: EmbeddedCluster, greedy: Any, model: Any, demo: Path
) -> None:
    """The same tokens as Transformers' own `stop_strings`, most of which begin and end inside tokens."""
    prompt, _, whole = greedy
    stop = whole[start : start + length]
    tokenizer = AutoTokenizer.from_pretrained(demo)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=1,
            stop_strings=[stop],
            tokenizer=tokenizer,
        )
    *_, last = cluster.generate(prompt, COUNT, stop=("never there", stop))
    assert last.report is not None
    assert last.report.token_ids == out[0, len(prompt) :].tolist()
    assert last.report.finish == "stop_text"


def test_the_stopper_reads_the_model(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    stopped = make_stopper(demo)(("two",), [])
    assert [stopped(token) for token in tokenizer("one two")["input_ids"]][-1] is True


# --- chat -------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat_is_the_models_template(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat_text(tokenizer, chat[1:]) == "<user>hi</user><assistant>"
    assert chat_text(tokenizer, chat) == "<system>be brief</system><user>hi</user><assistant>"
    tokenizer.chat_template = "{{ raise_exception('no system message, please') }}"
    with pytest.raises(ConfigError, match="no system message, please"):
        chat_text(tokenizer, chat)


def test_chat_from_the_command_line(cli: CommandLine, demo: Path, tmp_path: Path, expected: Any) -> None:
    """The template's text is the prompt, with no beginning-of-text token but that of the template."""
    model = shutil.copytree(demo, tmp_path / "chatty")
    (model / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    flags = ["-q", "-n", "8", "--shadow", "none", "--workers", "1", "--threads", "1"]
    answer = cli("generate", "-m", str(model), "--chat", "--system-prompt", "be brief", *flags, "hi")
    text = "<system>be brief</system><user>hi</user><assistant>"
    assert (answer.code, answer.out) == (0, expected(text, 8)[1] + "\n")
    plain = cli("generate", "-m", str(demo), "--chat", *flags, "hi")
    assert plain.code == 2
    assert "no chat template" in plain.err
