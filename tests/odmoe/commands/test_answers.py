"""The command line as a person uses it: answers on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from main_node.answer import Answer, Step
from odmoe.commands.generate import Job
from odmoe.commands.shared.prompts import read_prompts
from scheduler.errors import RequestFailedError
from support.cases import slow_except
from support.machines.cli import CommandLine

Expected = Callable[[str, int], tuple[list[int], str]]
PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"
LITTLE = ["--shadow", "none", "--threads", "1"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*?\b(?:3[0-9]|9[0-7])(?:;[0-9;]*)?m")


def test_the_answer_alone_is_on_standard_output(cli: CommandLine, demo: Path, expected: Expected) -> None:
    _, text = expected(PROMPT, 8)
    answer = cli("generate", "-m", str(demo), "-n", "8", *LITTLE, PROMPT)
    assert (answer.code, answer.out) == (0, text + "\n")
    assert "\x1b" not in answer.err
    for word in ("od-moe (embedded)", "speed", "first token", "exact", "tokens", "loads", "memory", "each worker"):
        assert word in answer.err


def test_quiet_says_nothing_but_the_answer(cli: CommandLine, demo: Path, expected: Expected) -> None:
    answer = cli("generate", "-q", "-m", str(demo), "-n", "8", *LITTLE, PROMPT)
    assert (answer.code, answer.out, answer.err) == (0, expected(PROMPT, 8)[1] + "\n", "")


def test_the_answer_streams(cli: CommandLine, demo: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown comes with the tokens, as they are computed."""
    ids, text = expected(PROMPT, 24)
    tokens = 0
    shown: list[tuple[int, str]] = []
    take = Answer.__next__

    def counted(answer: Answer) -> Step:
        nonlocal tokens
        step = take(answer)
        tokens += step.token_id is not None
        return step

    class Out(io.StringIO):
        def flush(self) -> None:
            shown.append((tokens, self.getvalue()))

    monkeypatch.setattr(Answer, "__next__", counted)
    assert cli("generate", "-q", "-m", str(demo), "-n", "24", *LITTLE, PROMPT, stdout=Out()).code == 0
    assert tokens == len(ids)
    assert shown[-1] == (len(ids), text + "\n")
    assert len({count for count, so_far in shown if so_far}) > len(ids) / 3
    assert all(text.startswith(so_far) for _, so_far in shown[:-1])


@pytest.mark.parametrize("shadow", slow_except(["none"], ["none", "int8"]))
def test_json_is_one_object(shadow: str, cli: CommandLine, demo: Path, expected: Expected) -> None:
    ids, text = expected(PROMPT, 8)
    cluster = ("--workers", "3", "--slots", "2", "--shadow", shadow, "--threads", "1")
    answer = cli("generate", "--json", "-m", str(demo), "-n", "8", *cluster, PROMPT)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("\n") == 1
    found = json.loads(answer.out)
    assert (found["text"], found["token_ids"]) == (text, ids)
    assert (found["prompt_tokens"], found["new_tokens"]) == (22, len(ids))
    assert found["ttft_s"] > 0
    assert found["decode_tokens_per_s"] > 0
    assert found["loads"] >= found["reloads"] >= 0
    assert found["stall_s"] >= 0
    memory = found["memory_bytes"]
    assert memory["main"] > 1 << 20
    assert len(memory["workers"]) == len(found["resident_experts_max"]) == 3
    assert all(count > 0 for count in memory["workers"])
    assert max(found["resident_experts_max"]) <= 2
    assert found["emulated"] is None
    if shadow == "none":
        assert (found["recall"], memory["shadow"]) == (None, 0)
    else:
        assert found["recall"] > 0.9
        assert memory["shadow"] > 1 << 20


def test_the_prompt_may_come_from_standard_input(cli: CommandLine, demo: Path, expected: Expected) -> None:
    prompt = "Question: Łódź 你好?\nAnswer:"
    answer = cli("generate", "-m", str(demo), "-n", "8", *LITTLE, stdin=prompt.encode())
    assert (answer.code, answer.out) == (0, expected(prompt, 8)[1] + "\n")


def test_an_answer_that_ends_at_the_default_limit_says_so(cli: CommandLine, demo: Path) -> None:
    line = "the answer ends at 128 tokens, the default limit; -n N sets another one"
    common = ("generate", "-m", str(demo), *LITTLE, "--ignore-eos", PROMPT)
    assert cli(*common).err.splitlines()[-1] == line
    assert line not in cli(*common, "-n", "2").err


def test_a_budget_keeps_room_for_one_request(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    """A prompt alone needs one KV cache; prompts of a file may need all that --parallel allows."""
    file = tmp_path / "prompts.txt"
    file.write_text("HAMLET\n")
    few = ("generate", "--json", "-m", str(demo), "-n", "1", "--threads", "1", "--shadow", "none", "--memory", "60MB")
    alone, listed = (json.loads(cli(*few, *more).out)["memory_budget"] for more in (["A"], ["--prompts", str(file)]))
    assert listed["kv"] == 8 * alone["kv"]
    assert listed["total"] == alone["total"]


def test_a_store_may_be_the_model(cli: CommandLine, demo_store: Any, expected: Expected) -> None:
    store = demo_store("bfloat16")
    answer = cli("generate", "-q", "-m", str(store.path), "-n", "8", *LITTLE, PROMPT)
    assert (answer.code, answer.out) == (0, expected(PROMPT, 8)[1] + "\n")


@pytest.mark.parametrize("command", [[], ["generate"], ["shard"]])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(flag: str, command: list[str], cli: CommandLine) -> None:
    answer = cli(*command, flag)
    assert (answer.code, answer.err) == (0, "")
    text = ESCAPE.sub("", answer.out)
    wanted = {
        "": ["generate", "shard"],
        "generate": ["--model", "--max-new-tokens", "--json", "--cluster", "--quiet"],
        "shard": ["MODEL", "STORE", "--dtype", "--json"],
    }
    assert [word for word in wanted["".join(command)] if word.lower() not in text.lower()] == []


def test_without_anything_the_help_is_shown(cli: CommandLine) -> None:
    answer = cli()
    assert (answer.code, answer.err) == (2, "")
    assert "generate" in answer.out


# --- what a terminal shows --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_what_is_done(
    no_color: bool, cli: CommandLine, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    answer = cli("shard", str(tiny), str(tmp_path / "store"), tty=True)
    assert (answer.code, answer.out) == (0, "")
    assert "writing experts" in answer.err
    assert bool(COLOUR.search(answer.err)) is not no_color
    assert cli("shard", "-q", str(tiny), str(tmp_path / "other"), tty=True).err == ""


# --- output that cannot be written ------------------------------------------------------------------------------------


def test_standard_output_that_is_full(cli: CommandLine, demo: Path) -> None:
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    answer = cli("generate", "-m", str(demo), "-n", "20", *LITTLE, PROMPT, stdout=full)
    assert answer.code == 1
    assert answer.err == "odmoe: OSError: No space left on device; free some space\n"


# --- many prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_prompts(cli: CommandLine, demo: Path, tmp_path: Path, expected: Expected) -> None:
    """Answered three at a time, printed in their own order, each as if it were alone."""
    asked = [PROMPT, "HAMLET", "My fellow Americans,\nwe", "Mr. Speaker,", "Question: how many"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(json.dumps(one) if "\n" in one else one for one in asked))
    common = ["generate", "-m", str(demo), "-n", "4", *LITTLE, "--prompts", str(file), "--parallel", "3"]
    answer = cli(*common, "--json")
    assert answer.code == 0
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [line["prompt"] for line in lines] == [1, 2, 3, 4, 5]
    assert [(line["token_ids"], line["text"]) for line in lines] == [expected(one, 4) for one in asked]
    texts = "".join(f"[{number}]\n{expected(one, 4)[1]}\n\n" for number, one in enumerate(asked, 1))
    quiet = cli(*common, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, texts, "")
    answer = cli(*common, tty=True)
    assert (answer.code, answer.out) == (0, texts), "the same where standard error is a terminal"
    assert "5 of 5 prompts answered" in answer.err
    assert "\n  3  My fellow Americans, we\n" in answer.err


@pytest.mark.slow
def test_one_of_many_that_fails(
    cli: CommandLine, demo: Path, tmp_path: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are answered, and no number changes."""
    asked = [PROMPT, "HAMLET", "Mr. Speaker,"]
    answer = Job.answer

    def doomed(job: Job, ids: list[int], show: Any) -> Any:
        if job.model.opened.tokenizer.decode(ids, skip_special_tokens=True).strip() == "HAMLET":
            raise RequestFailedError("a load failed three times")
        return answer(job, ids, show)

    monkeypatch.setattr(Job, "answer", doomed)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(json.dumps(one) for one in asked))
    common = ["generate", "-m", str(demo), "-n", "3", *LITTLE, "--prompts", str(file)]
    found = cli(*common)
    texts = [expected(one, 3)[1] for one in asked]
    assert (found.code, found.out) == (1, f"[1]\n{texts[0]}\n\n[3]\n{texts[2]}\n\n")
    lines = found.err.splitlines()
    assert lines[0] == "prompt 2: RequestFailedError: a load failed three times"
    assert "od-moe (embedded), 2 of 3 prompts answered" in lines
    assert lines[-1].endswith("1 of 3 prompts failed; prompt 2: a load failed three times")
    objects = [json.loads(line) for line in cli(*common, "--json").out.splitlines()]
    assert [one["prompt"] for one in objects] == [1, 2, 3]
    assert objects[1]["error"] == {"type": "RequestFailedError", "message": "a load failed three times"}


def test_a_prompt_ends_where_a_line_of_the_file_ends(tmp_path: Path) -> None:
    asked = ["one\u2028still one", "two\x0cstill two\x85"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join([asked[0], json.dumps(asked[1], ensure_ascii=False)]).encode())
    assert read_prompts(None, file) == asked
