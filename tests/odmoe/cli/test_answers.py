"""The command line as a person uses it: answers on standard output, one clear line about everything that is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.cli.prompts import read_prompts

ODMOE = Path(sys.executable).with_name("odmoe")
PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"
LITTLE = ["--shadow", "none", "--threads", "1"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*?\b(?:3[0-9]|9[0-7])(?:;[0-9;]*)?m")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours forced from outside."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a cluster is started."""

    def started(*args: Any) -> None:
        pytest.fail("a cluster was started")

    monkeypatch.setattr("odmoe.commands.generate.start_cluster", started)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_answer_alone_is_on_standard_output(cli: Any, demo: Path, expected: Any) -> None:
    _, text = expected(PROMPT, 24)
    said = cli("generate", "-m", str(demo), "-n", "24", *LITTLE, PROMPT)
    assert (said.code, said.out) == (0, text + "\n")
    assert "\x1b" not in said.err
    for word in ("od-moe, embedded, exact", "tokens", "speed", "recall", "loads", "memory", "residents"):
        assert word in said.err


def test_quiet_says_nothing_but_the_answer(cli: Any, demo: Path, expected: Any) -> None:
    said = cli("generate", "-q", "-m", str(demo), "-n", "12", *LITTLE, PROMPT)
    assert (said.code, said.out, said.err) == (0, expected(PROMPT, 12)[1] + "\n", "")


@pytest.mark.parametrize("shadow", ["none", "int8"])
def test_json_is_one_object(shadow: str, cli: Any, demo: Path, expected: Any) -> None:
    ids, text = expected(PROMPT, 16)
    said = cli(
        "generate", "--json", "-m", str(demo), "-n", "16", "--workers", "3", "--slots", "2", "--shadow", shadow,
        "--threads", "1", PROMPT,
    )  # fmt: skip
    assert (said.code, said.err) == (0, "")
    assert said.out.count("\n") == 1
    found = json.loads(said.out)
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


def test_the_prompt_may_come_from_standard_input(cli: Any, demo: Path, expected: Any) -> None:
    prompt = "Question: Łódź 你好?\nAnswer:"
    said = cli("generate", "-m", str(demo), "-n", "8", *LITTLE, stdin=prompt.encode())
    assert (said.code, said.out) == (0, expected(prompt, 8)[1] + "\n")


def test_a_store_may_be_the_model(cli: Any, demo_store: Any, expected: Any) -> None:
    store = demo_store("bfloat16")
    said = cli("generate", "-q", "-m", str(store.path), "-n", "8", *LITTLE, PROMPT)
    assert (said.code, said.out) == (0, expected(PROMPT, 8)[1] + "\n")


def test_shard(cli: Any, tiny: Path, tmp_path: Path) -> None:
    where = tmp_path / "store"
    first = cli("shard", str(tiny), str(where))
    assert (first.code, first.out) == (0, "")
    for word in (str(where), "mixtral", "float32"):
        assert word in first.err.replace("\n", "")
    again = cli("shard", "--json", str(tiny), str(where))
    assert (again.code, again.err) == (0, "")
    facts = json.loads(again.out)
    assert (facts["store"], facts["dtype"], facts["moe_layers"], facts["experts"]) == (str(where), "float32", 2, 3)
    assert facts["all_expert_bytes"] == 6 * facts["expert_bytes"]


@pytest.mark.parametrize("command", [[], ["generate"], ["shard"]])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(flag: str, command: list[str], cli: Any) -> None:
    said = cli(*command, flag)
    assert (said.code, said.err) == (0, "")
    text = ESCAPE.sub("", said.out)
    wanted = {
        "": ["generate", "shard"],
        "generate": ["--model", "--max-new-tokens", "--json", "--cluster", "--quiet"],
        "shard": ["MODEL", "STORE", "--dtype", "--json"],
    }
    assert [word for word in wanted["".join(command)] if word.lower() not in text.lower()] == []


def test_without_anything_the_help_is_shown(cli: Any) -> None:
    said = cli()
    assert (said.code, said.err) == (2, "")
    assert "generate" in said.out


# --- what a terminal shows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_what_is_done(
    no_color: bool, cli: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    said = cli("shard", str(tiny), str(tmp_path / "store"), tty=True)
    assert (said.code, said.out) == (0, "")
    assert "writing experts" in said.err
    assert bool(COLOUR.search(said.err)) is not no_color
    assert cli("shard", "-q", str(tiny), str(tmp_path / "other"), tty=True).err == ""


# --- what is wrong: usage ---------------------------------------------------------------------------------------------

USAGE: list[tuple[list[str], list[str]]] = [
    (["-n", "0"], ["--max-new-tokens", "0", "allowed: 1"]),
    (["-n", "many"], ["--max-new-tokens", "'many'", "allowed: 1, 2, ..."]),
    (["--workers", "0"], ["--workers", "0", "allowed: 1"]),
    (["--slots", "0"], ["--slots", "0", "allowed: 1"]),
    (["--group-size", "0"], ["--group-size", "0", "allowed: 1, 2, ..."]),
    (["--group-size", "9"], ["--group-size", "9", "1 to --workers (8)"]),
    (["--align-token", "-1"], ["align-token", "-1", "0 (never)"]),
    (["--align-kv", "-1"], ["align-kv", "-1", "0 (never)"]),
    (["--shadow", "int3"], ["--shadow", "'int3'", "nf4"]),
    (["--loader", "tape"], ["--loader", "'tape'", "disk"]),
    (["--dtype", "int4"], ["--dtype", "'int4'", "bfloat16"]),
    (["--cluster", "somewhere"], ["--cluster", "'somewhere'", "embedded", "local", "host:port"]),
    (["--threads", "0"], ["--threads", "0", "allowed: 1"]),
    (["--mini-batch", "0"], ["--mini-batch", "0", "allowed: 1"]),
    (["--nonsense"], ["--nonsense", "odmoe --help"]),
    (["-n"], ["-n", "argument", "odmoe --help"]),
    (["one", "two"], ["extra argument", "two", "odmoe --help"]),
]


def one_line(said: Any, code: int, kind: str, words: list[str]) -> None:
    """Nothing on standard output; one line on standard error: the class, and each of `words`."""
    assert (said.code, said.out) == (code, ""), said.err
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith(f"odmoe: {kind}: ")
    assert [word for word in words if word not in said.err] == [], said.err


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("flags", "words"), USAGE, ids=[" ".join(flags) for flags, _ in USAGE])
def test_usage(flags: list[str], words: list[str], cli: Any, demo: Path) -> None:
    began = time.monotonic()
    one_line(cli("generate", "-m", str(demo), *flags, stdin=b"hello"), 2, "ConfigError", words)
    assert time.monotonic() - began < 2.0


def test_usage_of_the_rest(cli: Any, tmp_path: Path) -> None:
    one_line(cli("generate", "hello"), 2, "ConfigError", ["--model", "models/demo-moe"])
    one_line(cli("nonsense"), 2, "ConfigError", ["nonsense", "odmoe --help"])
    one_line(cli("shard", "here"), 2, "ConfigError", ["'store'", "odmoe --help"])
    one_line(cli("shard", "here", str(tmp_path / "s"), "--dtype", "int4"), 2, "ConfigError", ["'int4'", "bfloat16"])


# --- what is wrong: prompts -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (None, ["no prompt", "standard input"]),
        (b"", ["empty", "standard input"]),
        (b"caf\xe9", ["not utf-8 text", "convert"]),
        (b"word " * 1100, ["the model's context is 1024", "shorten"]),
    ],
    ids=["none", "empty", "not text", "too long"],
)
def test_prompts(stdin: bytes | None, words: list[str], cli: Any, demo: Path) -> None:
    one_line(cli("generate", "-m", str(demo), stdin=stdin), 1, "PromptError", words)


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize(("prompt", "words"), [("", ["empty"]), ("caf\udce9", ["not UTF-8 text", "character 3"])])
def test_prompts_as_arguments(prompt: str, words: list[str], cli: Any, demo: Path) -> None:
    one_line(cli("generate", "-m", str(demo), prompt), 1, "PromptError", words)


# --- what is wrong: models --------------------------------------------------------------------------------------------


def flip(file: Path, where: float = 0.5) -> None:
    with file.open("r+b") as stream:
        stream.seek(int(file.stat().st_size * where))
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def weights(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


BROKEN: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "truncated": (lambda m: cut(weights(m)), "CorruptCheckpointError", ["model.safetensors", "bytes", "fetch it"]),
    "a bit": (lambda m: flip(weights(m)), "CorruptCheckpointError", ["model.safetensors", "SHA-256", "fetch it"]),
    "empty file": (lambda m: weights(m).write_bytes(b""), "CorruptCheckpointError", ["model.safetensors", "fetch it"]),
    "no weights": (lambda m: weights(m).unlink(), "MissingShardError", ["model.safetensors"]),
    "no config": (lambda m: (m / "config.json").unlink(), "MissingShardError", ["config.json is missing"]),
    "cut config": (lambda m: cut_text(m / "config.json"), "CorruptCheckpointError", ["config.json", "fetch it"]),
    "published tokenizer": (
        lambda m: cut_text(m / "tokenizer.json"),
        "CorruptCheckpointError",
        ["tokenizer.json", "SHA-256", "fetch it"],
    ),
    "no tokenizer": (
        lambda m: (unpublish(m), (m / "tokenizer.json").unlink()),
        "CorruptStoreError",
        ["no tokenizer", "whole?"],
    ),
    "cut tokenizer": (
        lambda m: (unpublish(m), cut_text(m / "tokenizer.json")),
        "CorruptStoreError",
        ["no tokenizer", "whole?"],
    ),
}


def cut_text(file: Path) -> None:
    file.write_text(file.read_text()[:-60])


def unpublish(model: Path) -> None:
    (model / "SHA256SUMS").unlink()


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(name: str, cli: Any, demo: Path, tmp_path: Path) -> None:
    change, kind, words = BROKEN[name]
    model = Path(shutil.copytree(demo, tmp_path / "model"))
    change(model)
    one_line(cli("generate", "-m", str(model), "hello"), 1, kind, words)


@pytest.mark.usefixtures("no_nodes")
def test_a_missing_shard(cli: Any, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    lost = weights(model)
    lost.unlink()
    one_line(cli("generate", "-m", str(model), "hello"), 1, "MissingShardError", [lost.name, "index.json", "fetch it"])


@pytest.mark.usefixtures("no_nodes")
def test_a_dense_model(cli: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    words = ["LlamaForCausalLM has no experts", "give a Mixture-of-Experts checkpoint"]
    one_line(cli("generate", "-m", str(tmp_path / "llama"), "hello"), 1, "NotMoEError", words)


@pytest.mark.usefixtures("no_nodes")
def test_no_such_model(cli: Any, demo: Path, tmp_path: Path) -> None:
    for model in (str(tmp_path / "nowhere"), str(demo / "config.json"), "nowhere"):
        one_line(cli("generate", "-m", model, "hello"), 1, "CheckpointError", [model, "not a directory", "config.json"])
    one_line(cli("generate", "-m", "nobody/nothing", "hello"), 1, "CheckpointError", ["nobody/nothing", "Hub"])


# --- what is wrong: stores --------------------------------------------------------------------------------------------


@pytest.fixture
def store(demo_store: Any, tmp_path: Path) -> Path:
    """A copy of the demo model's store, to damage."""
    return Path(shutil.copytree(demo_store("bfloat16").path, tmp_path / "store"))


def first_layer(store: Path) -> Path:
    return store / "layer-00000.experts"


STORES: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "truncated": (lambda s: cut(first_layer(s)), "CorruptStoreError", ["layer-00000.experts", "bytes", "again"]),
    "a bit": (lambda s: flip(first_layer(s)), "CorruptStoreError", ["of layer 0", "checksum", "again"]),
    "no layer": (lambda s: first_layer(s).unlink(), "CorruptStoreError", ["layer-00000.experts is missing", "again"]),
    "cut manifest": (lambda s: cut_text(s / "manifest.json"), "CorruptStoreError", ["manifest.json", "again"]),
    "a bit of the rest": (
        lambda s: flip(min((s / "dense").glob("*.safetensors"))),
        "CorruptStoreError",
        ["dense-00000.safetensors", "checksum", "again"],
    ),
}


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("name", STORES)
def test_broken_stores(name: str, cli: Any, demo: Path, store: Path) -> None:
    change, kind, words = STORES[name]
    change(store)
    one_line(cli("generate", "-m", str(demo), "--store", str(store), "hello"), 1, kind, words)
    one_line(cli("generate", "-m", str(store), "hello"), 1, kind, words)


@pytest.mark.usefixtures("no_nodes")
def test_stores_of_another(cli: Any, demo: Path, tiny: Path, tmp_path: Path, store: Path) -> None:
    other = tmp_path / "other"
    assert cli("shard", str(tiny), str(other)).code == 0
    given = ["generate", "-m", str(demo), "--store"]
    one_line(cli(*given, str(other), "hello"), 1, "StoreMismatchError", [str(other), "another checkpoint", "--store"])
    words = [str(store), "bfloat16", "float32", "odmoe shard"]
    one_line(cli(*given, str(store), "--dtype", "float32", "hello"), 1, "StoreMismatchError", words)
    one_line(cli("shard", str(demo), str(other)), 1, "StoreMismatchError", [str(other), "another checkpoint"])


@pytest.mark.usefixtures("no_nodes")
def test_places_that_cannot_be_written(cli: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "store")
    one_line(cli("shard", str(demo), str(tmp_path / "file")), 1, "StoreWriteError", ["file", "another place"])
    one_line(cli("shard", str(demo), below), 1, "StoreWriteError", [str(tmp_path / "file"), "--store"])
    monkeypatch.setenv("XDG_CACHE_HOME", below)
    said = cli("generate", "-m", str(demo), "hello")
    one_line(said, 1, "StoreWriteError", [below, "--store", "XDG_CACHE_HOME"])


def test_a_full_disk(demo: Path, tmp_path: Path) -> None:
    """Files may not grow past a megabyte: the store is not left half-written."""
    import resource

    command = [ODMOE, "shard", demo, tmp_path / "here" / "store"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("odmoe: StoreWriteError: ")
    assert list((tmp_path / "here").iterdir()) == []


# --- in a process of its own ------------------------------------------------------------------------------------------


def finish(running: Any, timeout: float = 60.0) -> tuple[int, bytes, bytes]:
    out, err = running.process.communicate(timeout=timeout)
    return running.process.returncode, out, err


def gone(running: Any, within: float) -> None:
    """Nothing that the command started is left."""
    deadline = time.monotonic() + within
    while left := running.left_behind():
        assert time.monotonic() < deadline, "\n".join(left)
        time.sleep(0.1)


def test_the_answer_streams(start: Any, demo: Path, expected: Any) -> None:
    ids, text = expected(PROMPT, 60)
    running = start("generate", "-m", str(demo), "-n", "60", "--shadow", "nf4", "--threads", "1", PROMPT)
    came: list[tuple[float, bytes]] = []
    while piece := os.read(running.process.stdout.fileno(), 65536):
        came.append((time.monotonic(), piece))
        if len(came) == 1:
            assert running.process.poll() is None
    code, _, err = finish(running)
    assert code == 0
    assert b"".join(piece for _, piece in came).decode() == text + "\n"
    assert b"\x1b" not in err
    assert b"Warning" not in err
    assert len(came) > len(ids) / 3
    assert came[-1][0] - came[0][0] > 0.3


def test_a_reader_that_goes_away(start: Any, demo: Path) -> None:
    """As `odmoe generate ... | head -c1`."""
    running = start("generate", "-m", str(demo), "-n", "900", PROMPT)
    assert os.read(running.process.stdout.fileno(), 1)
    running.process.stdout.close()
    assert running.process.stderr.read() == b""
    assert running.process.wait(30) == 1


def test_standard_output_that_is_full(demo: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [ODMOE, "generate", "-m", demo, "-n", "20", PROMPT],
            stdout=full, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("shadow", ["none", "nf4"])
def test_interrupted_while_it_answers(shadow: str, start: Any, demo: Path) -> None:
    running = start("generate", "-m", str(demo), "-n", "900", "--shadow", shadow, PROMPT)
    assert os.read(running.process.stdout.fileno(), 1)
    interrupt(running, 10.0)


@pytest.mark.parametrize("after", [0.0, 0.8, 1.6, 2.4])
def test_interrupted_while_it_starts(after: float, start: Any, demo: Path) -> None:
    """`after` seconds from the moment that it loads torch."""
    running = start("generate", "-m", str(demo), "-n", "900", PROMPT)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{running.process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(after)
    interrupt(running, 10.0)


def interrupt(running: Any, within: float, again: bool = False) -> None:
    """Ctrl-C, as a terminal sends it: to the whole group. It ends soon, says so, and leaves nothing."""
    began = time.monotonic()
    os.killpg(running.process.pid, signal.SIGINT)
    if again:
        time.sleep(0.25)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGINT)
    code, _, err = finish(running, within)
    ended = time.monotonic() - began
    assert (code, err) == (130, b"interrupted\n")
    gone(running, 10.0)
    print(f"ended {ended:.2f} s after Ctrl-C, all of it {time.monotonic() - began:.2f} s")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "answering"])
def test_interrupted_local_cluster_leaves_no_process(when: str, start: Any, demo: Path) -> None:
    running = start(
        "generate", "-m", str(demo), "-n", "900", "--cluster", "local", "--workers", "2", "--shadow", "none", PROMPT
    )
    if when == "answering":
        assert os.read(running.process.stdout.fileno(), 1), running.process.stderr.read()
    else:
        deadline = time.monotonic() + 60
        while not any("raylet" in line for line in running.left_behind()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    interrupt(running, 40.0, again=True)


def test_debug_shows_where_it_came_from(start: Any) -> None:
    code, out, err = finish(start("generate", "--debug", "-m", "nowhere", "hello"))
    assert (code, out) == (1, b"")
    assert b"Traceback" in err
    assert err.splitlines()[-1].startswith(b"odmoe: CheckpointError: ")


def test_nothing_answers_at_the_address(start: Any, demo: Path) -> None:
    """Ray itself would try for minutes."""
    code, out, err = finish(start("generate", "-m", str(demo), "--cluster", "127.0.0.1:1", "hello"))
    assert (code, out, err.count(b"\n")) == (1, b"", 1)
    assert err.startswith(b"odmoe: LaunchError: no Ray cluster answers at 127.0.0.1:1 within")


def test_the_published_digests_are_the_demos_own(demo: Path) -> None:
    """What the test of a flipped bit rests on."""
    sums = dict(reversed(line.split()) for line in (demo / "SHA256SUMS").read_text().splitlines())
    assert sums["model.safetensors"] == hashlib.sha256((demo / "model.safetensors").read_bytes()).hexdigest()


# --- many prompts -----------------------------------------------------------------------------------------------------


def test_many_prompts(cli: Any, demo: Path, tmp_path: Path, expected: Any) -> None:
    """Answered three at a time, printed in their own order, each as if it were alone."""
    asked = [PROMPT, "HAMLET", "My fellow Americans,\nwe", "Mr. Speaker,", "Question: how many"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(json.dumps(one) if "\n" in one else one for one in asked))
    common = ["generate", "-m", str(demo), "-n", "10", *LITTLE, "--prompts", str(file), "--parallel", "3"]
    said = cli(*common, "--json")
    assert said.code == 0
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["prompt"] for line in lines] == list(range(5))
    assert [(line["token_ids"], line["text"]) for line in lines] == [expected(one, 10) for one in asked]
    said = cli(*common, "-q")
    assert (said.code, said.out) == (0, "".join(expected(one, 10)[1] + "\n" for one in asked))


def test_a_prompt_ends_where_a_line_of_the_file_ends(tmp_path: Path) -> None:
    asked = ["one\u2028still one", "two\x0cstill two\x85"]
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join([asked[0], json.dumps(asked[1], ensure_ascii=False)]).encode())
    assert read_prompts(None, file) == asked


@pytest.mark.usefixtures("no_nodes")
def test_many_prompts_that_cannot_be(cli: Any, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    missing = cli("generate", "-m", str(demo), "--prompts", str(file))
    one_line(missing, 1, "PromptError", [str(file), "cannot be read"])
    file.write_text("\n \n")
    one_line(cli("generate", "-m", str(demo), "--prompts", str(file)), 1, "PromptError", ["empty"])
    file.write_text("one\n" + "word " * 1100)
    one_line(cli("generate", "-m", str(demo), "--prompts", str(file)), 1, "PromptError", ["context is 1024"])
    one_line(cli("generate", "-m", str(demo), "--prompts", str(file), "two"), 2, "ConfigError", ["both"])
    one_line(
        cli("generate", "-m", str(demo), "--prompts", str(file), "--parallel", "0"), 2, "ConfigError", ["--parallel"]
    )
