"""A loaded model: its answers are those of Transformers; what is wrong is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import odmoe
from odmoe.clusters.embedded import EmbeddedCluster
from scheduler.errors import ClusterError, ConfigError, RequestError

Expected = Callable[[str, int], tuple[list[int], str]]
PROMPT = "HAMLET: To be, or not"
LIMIT_S = 60.0


def test_the_whole_answer(model: odmoe.Model, expected: Expected) -> None:
    ids, text = expected(PROMPT, 12)
    found = model.generate(PROMPT, max_new_tokens=12)
    assert (found.token_ids, found.text, str(found)) == (ids, text, text)
    assert (found.finish, found.new_tokens) == ("length", 12)
    assert found.report is not None
    assert found.report.exact
    assert found.prompt_tokens == found.report.prompt_tokens == len(model.opened.encode(PROMPT))


def test_a_prompt_of_token_ids(model: odmoe.Model, expected: Expected) -> None:
    ids = model.opened.encode(PROMPT)
    assert model.generate(ids, max_new_tokens=5).token_ids == expected(PROMPT, 5)[0]


def test_chunks_as_they_come(model: odmoe.Model, expected: Expected) -> None:
    ids, text = expected(PROMPT, 12)
    stream = model.stream(PROMPT, max_new_tokens=12)
    first = next(stream)
    assert first.token_id == ids[0]
    assert stream.text == first.text
    with pytest.raises(RequestError, match="has not ended: 1 chunks came"):
        _ = stream.completion
    rest = list(stream)
    assert [first.token_id, *(chunk.token_id for chunk in rest)] == ids
    assert first.text + "".join(map(str, rest)) == text == stream.completion.text


def test_several_at_once(model: odmoe.Model, expected: Expected) -> None:
    prompts = [PROMPT, "ROMEO:", "JULIET: O"]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: model.generate(prompt, max_new_tokens=6).token_ids, prompts))
    assert found == [expected(prompt, 6)[0] for prompt in prompts]


def test_a_chat_is_the_prompt_that_the_template_makes(chats: odmoe.Model) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Romeo?"}]
    as_prompt = chats.opened.encode("system: Be brief.\nuser: Who is Romeo?\nassistant:", special=False)
    asked = chats.chat(messages, max_new_tokens=6)
    assert asked.prompt_tokens == len(as_prompt)
    assert asked.token_ids == chats.generate(as_prompt, max_new_tokens=6).token_ids
    assert "".join(map(str, chats.stream_chat(messages, max_new_tokens=6))) == asked.text
    with pytest.raises(ConfigError, match="template refuses this chat: no tools"):
        chats.chat([{"role": "tool", "content": ""}])
    with pytest.raises(ConfigError, match="allowed: a list such as"):
        chats.chat("Who is Romeo?")  # type: ignore[arg-type]


def test_a_model_without_a_chat_template(model: odmoe.Model) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        model.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.slow
def test_draws_follow_the_seed(model: odmoe.Model) -> None:
    one, other, again = (
        model.generate(PROMPT, max_new_tokens=12, temperature=1.5, seed=seed).token_ids for seed in (1, 2, 1)
    )
    assert one == again != other


def test_stop_texts_one_or_several(model: odmoe.Model, expected: Expected) -> None:
    text = expected(PROMPT, 12)[1]
    word = text.split()[1]
    for stop in (word, [word], ["no such text", word]):
        found = model.generate(PROMPT, max_new_tokens=12, stop=stop)
        assert (found.text, found.finish) == (text[: text.index(word)], "stop_text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "temprature is not an option of an answer; did you mean temperature?"),
        ({"temperature": -1}, "temperature is -1; allowed: a number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; allowed: 1, 2, "),
        ({"logit_bias": [5]}, "logit_bias is \\[5\\]; allowed: a dict"),
        ({"presence_penalty": "much"}, "presence_penalty is 'much'; allowed: a number"),
        ({"schema": 5}, "schema is 5; allowed: a JSON schema"),
    ],
)
def test_wrong_options_are_named(model: odmoe.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.generate(PROMPT, **options)


def test_an_answer_is_given_up_from_another_thread(model: odmoe.Model) -> None:
    stream = model.stream(PROMPT, max_new_tokens=900, ignore_eos=True)
    next(stream)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    with pytest.raises(RequestError):
        for _ in stream:
            pass
    canceller.join()
    assert model.generate(PROMPT, max_new_tokens=1).new_tokens == 1


def test_the_end_of_a_with_block_gives_it_up(model: odmoe.Model) -> None:
    with model.stream(PROMPT, max_new_tokens=900, ignore_eos=True) as stream:
        next(stream)
    assert list(stream) == []
    assert isinstance(model.cluster, EmbeddedCluster)
    assert model.cluster.main.admission.counts() == (0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workrs": 2}, "workrs is not a setting; did you mean workers?"),
        ({"workers": 0}, "workers is 0; allowed: 1, 2, "),
        ({"shadow": "int9"}, "shadow is 'int9'; allowed: fp16, int8"),
        ({"chat": True}, "chat is a setting of the command line; call model.chat"),
        ({"cluster": "lan.yaml"}, "odmoe serve --cluster auto there"),
        ({"retry": 2}, "retry is 2 with cluster embedded"),
        ({"cache_window": 3}, "cache_window is"),
        ({"align_kv": 2, "shadow": "none"}, "align_kv is 2 with shadow none"),
        ({"record": "/nowhere/file"}, "/nowhere/file"),
    ],
)
def test_wrong_settings_are_named(demo: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        odmoe.load(demo, **settings)


def test_a_model_is_needed_unless_a_cluster_runs() -> None:
    with pytest.raises(ConfigError, match="model is not given, and cluster embedded needs one"):
        odmoe.load()


def test_settings_hold_for_answers_and_files_are_written_at_the_end(
    demo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], expected: Expected
) -> None:
    before = set(threading.enumerate())
    record = tmp_path / "record"
    loaded = odmoe.load(demo, shadow="none", threads=1, max_new_tokens=3, record=str(record))
    with loaded:
        ids = loaded.generate(PROMPT).token_ids
    loaded.close()  # a second time
    assert ids == expected(PROMPT, 3)[0]
    assert odmoe.replay(record).difference is None
    with pytest.raises(ClusterError, match="the model is closed"):
        loaded.generate(PROMPT)
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(LIMIT_S)
    assert [thread.name for thread in left if thread.is_alive()] == []
    assert capfd.readouterr() == ("", ""), "progress is shown only where it is asked for"
