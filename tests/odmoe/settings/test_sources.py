"""Flags, environment, file, defaults: who wins, and what is said about a value that cannot be."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from odmoe.settings.settings import Settings
from odmoe.settings.sources import dump, effective, merge_sources, read_file
from scheduler.errors import ConfigError
from scheduler.policies.systems import SYSTEMS
from support.machines.cli import CommandLine


def file_of(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    file = file_of(tmp_path, "workers: 2\nslots: 3\nshadow: nf4\n")
    found = effective({"workers": "5"}, file, {"ODMOE_WORKERS": "4", "ODMOE_SLOTS": "6"})
    assert (found.settings.workers, found.settings.slots, found.settings.shadow) == (5, 6, "nf4")
    assert found.settings.mini_batch is None
    assert found.origin == {"workers": "--workers", "slots": "ODMOE_SLOTS", "shadow": f"shadow in {file}"}


def test_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "odmoe").mkdir()
    home = tmp_path / "odmoe" / "config.yaml"
    home.write_text("workers: 3")
    other = file_of(tmp_path, "workers: 4")
    assert effective({}, None, {"XDG_CONFIG_HOME": str(tmp_path)}).settings.workers == 3
    assert effective({}, None, {"XDG_CONFIG_HOME": str(tmp_path), "ODMOE_CONFIG": other}).settings.workers == 4
    assert effective({}, str(home), {"ODMOE_CONFIG": other}).settings.workers == 3
    assert effective({}, None, {"XDG_CONFIG_HOME": str(tmp_path / "none")}).settings.workers == 8


def test_keys_with_either_line(tmp_path: Path) -> None:
    file = file_of(tmp_path, "max-new-tokens: 7\nalign_kv: 4\nstop: END\ndtype:\n")
    found = effective({}, file, {}).settings
    assert (found.max_new_tokens, found.align_kv, found.stop, found.dtype) == (7, 4, ("END",), None)


WRONG: list[tuple[str, list[str]]] = [
    ("workers: 0", ["workers in ", "is 0", "allowed: 1, 2, ..."]),
    ("workers: many", ["'many'", "allowed: 1"]),
    ("workers: yes", ["True", "allowed: 1"]),
    ("workers: 2.5", ["2.5", "allowed: 1"]),
    ("workers: [1]", ["[1]", "allowed: 1"]),
    ("shadow: int3", ["shadow in", "'int3'", "fp16, int8, nf4, int8-nf4, int8-int2, none"]),
    ("temperature: -1", ["temperature in", "-1", "at least 0"]),
    ("temperature: .nan", ["nan", "at least 0"]),
    ("launch-timeout: 1e300", ["launch-timeout in", "1e300", "1 to 1000000"]),
    ("top_p: 1.5", ["1.5", "at most 1"]),
    ("seed: 99999999999999999999", ["seed in", "2^63"]),
    ("stop: ['']", ["stop in", "at least one character"]),
    ("chat: perhaps", ["'perhaps'", "true, false"]),
    ("slotz: 1", ["slotz in", "not a setting", "slots"]),
    ("ctx-size: 1", ["ctx-size in", "allowed: 2"]),
    ("workers: 2\ngroup-size: 3", ["group-size in", "is 3", "workers in", "(2)"]),
    ("system-prompt: be brief", ["system-prompt in", "--chat"]),
    ("cluster: nowhere", ["cluster in", "'nowhere'", "embedded, local, auto", "host:port"]),
    ("workers: 1\nworkers_: 2", ["workers- in", "not a setting"]),
    ("align-kv: 1\nalign_kv: 2", ["align_kv twice"]),
    ("- workers", ["list", "setting: value"]),
    ("workers: {", ["cannot be read"]),
    ("just words", ["str", "setting: value"]),
    ("stop: " + "[" * 5000, ["nested more than 32 deep in line 1"]),
    ("workers: 2\nslots: 1\nworkers: 3", ["workers twice, in lines 1 and 3"]),
    ("workerz: 2", ["workerz in", "did you mean workers"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_wrong_files(text: str, words: list[str], tmp_path: Path) -> None:
    file = file_of(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        effective({}, file, {})
    message = str(caught.value)
    assert [word for word in [*words, file] if word not in message] == []
    assert "\n" not in message


def test_wrong_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ODMOE_SLOTS is 'x'; allowed: 1, 2, \.\.\."):
        effective({}, None, {"ODMOE_SLOTS": "x"})
    with pytest.raises(ConfigError, match="--slots is 0; allowed"):
        effective({"slots": "0"}, None, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        effective({}, str(tmp_path / "none.yaml"), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        effective({}, str(tmp_path), {})
    with pytest.raises(ConfigError, match="~nobody-of-that-name/x cannot be read"):
        effective({}, "~nobody-of-that-name/x", {})


def test_misspelt_in_the_environment() -> None:
    with pytest.raises(
        ConfigError, match="ODMOE_WORKER is set in the environment but is not a setting; did you mean ODMOE_WORKERS"
    ):
        effective({}, None, {"ODMOE_WORKER": "3"})


def test_texts_in_the_environment() -> None:
    assert effective({}, None, {"ODMOE_STOP": "a, b"}).settings.stop == ("a, b",)
    assert effective({}, None, {"ODMOE_STOP": "[a, 'b c']"}).settings.stop == ("a", "b c")
    assert effective({}, None, {"ODMOE_CHAT": "true"}).settings.chat is True


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alpha": 0.3}, "ODMOE_ALPHA is 0.3, which neither --predictor sep nor --router top-k reads; next-layer, "),
        ({"system": "fate", "prefetch": 2}, "ODMOE_PREFETCH is 2, which --predictor cross-layer does not read"),
        ({"system": "fate", "token_predictor": "f"}, "ODMOE_TOKEN_PREDICTOR is f, which --predictor cross-layer does"),
        (
            {"system": "fate", "predictor_learning_rate": 0.1},
            "ODMOE_PREDICTOR_LEARNING_RATE is 0.1, which --predictor cr",
        ),
        (
            {"system": "smoe", "predictor_learning_rate": 11},
            "ODMOE_PREDICTOR_LEARNING_RATE is .*11.*; allowed: a number f",
        ),
        ({"system": ["fate"]}, rf"ODMOE_SYSTEM is \['fate'\]; odmoe systems lists all {len(SYSTEMS)} names"),
        ({"system": {"fate": 1}}, "ODMOE_SYSTEM is {'fate': 1}; odmoe systems lists all"),
        (
            {"system": "fate", "shadow": "nf4"},
            "ODMOE_SHADOW is nf4, which --predictor cross-layer does not read; sep does",
        ),
        ({"system": "fate", "align_kv": 2}, "ODMOE_ALIGN_KV is 2, which --predictor cross-layer does not read; sep "),
        (
            {"shadow": "none", "align_kv": 2},
            "ODMOE_ALIGN_KV is 2 with shadow none; there is nothing to align: leave it out, or give a shadow",
        ),
        ({"device_memory": "200%"}, "ODMOE_DEVICE_MEMORY is '200%'; allowed: a share of all experts .above 0%, at"),
        ({"cluster": "auto", "device_memory": "20%"}, "ODMOE_DEVICE_MEMORY is given without --workers; all workers"),
    ],
)
def test_what_would_have_no_effect_or_no_sense(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    """In a file as in the environment."""
    file = file_of(tmp_path, yaml.safe_dump(given))
    in_file = re.sub("ODMOE_([A-Z_]+)", lambda m: f"{m[1].lower().replace('_', '-')} in {re.escape(file)}", says)
    with pytest.raises(ConfigError, match=in_file):
        effective({}, file, {})
    if not isinstance(given.get("system", ""), str):
        return
    with pytest.raises(ConfigError, match=says):
        effective({}, None, {f"ODMOE_{name.upper()}": str(value) for name, value in given.items()})


@pytest.mark.parametrize(
    "given",
    [
        {"system": "importance", "alpha": 0.1},
        {"system": "adapmoe", "alpha": 0.1, "prefetch": 1},
        {"predictor": "next-layer", "alpha": 0.1},
        {"system": "smoe", "prefetch": 1, "token_predictor": "f", "predictor_learning_rate": 0.1},
        {"system": "hobbit", "prefetch": 1},
        {"system": "hybrimoe", "prefetch": 2},
        {"system": "fully-cached", "router": "expert-cache", "alpha": 0.5},
        {"system": "sep-arc", "shadow": "nf4", "align_kv": 2},
        {"system": "fate", "shadow": "none"},
    ],
)
def test_numbers_that_are_heeded(given: dict[str, Any]) -> None:
    settings = effective(given, None, {}).settings
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize("cluster", ["embedded", "local"])
def test_a_shared_retry_is_ignored_where_nodes_end_with_the_command(cluster: str, tmp_path: Path) -> None:
    """A variable or a line of the file is there for every command; a flag is for this one alone."""
    for file, environ in ((file_of(tmp_path, "retry: 3"), {}), (None, {"ODMOE_RETRY": "3"})):
        assert effective({"cluster": cluster}, file, environ).settings.retry == 0
        assert effective({"cluster": "auto"}, file, environ).settings.retry == 3
    assert effective({"cluster": cluster, "retry": 2}, None, {"ODMOE_RETRY": "3"}).settings.retry == 2


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_system_chose_is_printed_and_stays_its_choice(name: str, tmp_path: Path) -> None:
    """A file made of it says the same: what nobody said is still unsaid, and can be said otherwise."""
    found = effective({"system": name, "device_memory": "30%"}, None, {})
    text = dump(found)
    chosen = found.settings.preset.values()
    assert f"predictor: {chosen['predictor']}  # by system {name}" in text
    again = effective({}, file_of(tmp_path, text), {}).settings
    assert again == found.settings
    assert not {*chosen, "slots"} & again.model_fields_set
    assert f"system: {name}  # --system" in text


def test_the_secret_is_never_shown(tmp_path: Path) -> None:
    found = effective({}, None, {"ODMOE_SECRET": "hush-hush"})
    assert found.settings.secret == "hush-hush"
    assert "hush" not in dump(found) + repr(found.settings)
    with pytest.raises(ConfigError) as caught:
        effective({}, file_of(tmp_path, "secret: 123456"), {})
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize("line", ["@hush", "'hush", "*hush!", "!hush 1", "hush: 1", "`hush", "*hush", "%hush"])
def test_the_secret_is_not_shown_where_the_file_is_no_yaml(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: line [2-4], column \d+ is not YAML") as caught:
        effective({}, file_of(tmp_path, f"workers: 3\nsecret: {line}\nslots: 2\n"), {})
    assert "hush" not in "".join(traceback.format_exception(caught.value)).replace(str(tmp_path), "")


GIVEN: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(),
    "workers": st.integers(1, 99),
    "slots": st.integers(1, 9),
    "align_kv": st.integers(0, 9),
    "shadow": st.sampled_from(["fp16", "int8", "nf4", "none"]),
    "temperature": st.just(0.0) | st.floats(1e-4, 9),
    "top_p": st.floats(0.01, 1),
    "seed": st.integers(0, 2**63 - 1),
    "chat": st.booleans(),
    "stop": st.lists(st.text(min_size=1)),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@pytest.mark.slow
@given(st.fixed_dictionaries({}, optional=GIVEN))
def test_what_config_prints_says_the_same_again(values: dict[str, Any]) -> None:
    import tempfile

    found = merge_sources(values, None, {"XDG_CONFIG_HOME": "/nonexistent"})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump(found))
        file.flush()
        assert merge_sources({}, file.name, {}).settings == found.settings


def test_printed_lines_are_yaml_with_their_origin(cli: CommandLine, tmp_path: Path) -> None:
    answer = cli("config", "--workers", "3", "--stop", "a: b", "--stop", "#", "--no-chat")
    assert answer.code == 0
    lines = yaml.safe_load(answer.out)
    assert lines["workers"] == 3
    assert lines["stop"] == ["a: b", "#"]
    assert list(lines) == ["workers", "stop", "chat"]
    shown = [line.removeprefix("# ").partition(":")[0] for line in answer.out.splitlines()]
    assert shown == [name.replace("_", "-") for name in Settings.names()]
    assert "\nworkers: 3  # --workers\n" in answer.out
    assert "\n# slots: 1  # default\n" in answer.out
    assert "chat: false  # --chat\n" in answer.out


@pytest.mark.parametrize(
    ("lines", "environ", "flags", "ignored"),
    [
        ("shadow: nf4", {}, {"system": "smoe"}, {"shadow": "int8"}),
        ("shadow: int8", {}, {"system": "fate"}, {"shadow": "int8"}),
        ("shadow: nf4", {"ODMOE_SYSTEM": "fate"}, {}, {"shadow": "int8"}),
        ("", {"ODMOE_SHADOW": "nf4"}, {"system": "hybrimoe"}, {"shadow": "int8"}),
        ("", {"ODMOE_ALIGN_KV": "4"}, {"predictor": "none"}, {"align_kv": 1}),
        ("align-token: 4\nalign-kv: 2", {}, {"shadow": "none"}, {"align_token": 1, "align_kv": 1}),
        ("alpha: 0.2\nrouter: skip", {}, {"router": "top-k"}, {"alpha": None}),
        ("system: smoe\ntoken-predictor: f", {}, {"system": "od-moe"}, {"token_predictor": None}),
    ],
)
def test_a_file_does_not_forbid_what_a_flag_chooses(
    lines: str, environ: dict[str, str], flags: dict[str, str], ignored: dict[str, Any], tmp_path: Path
) -> None:
    found = effective(flags, file_of(tmp_path, lines), environ)
    assert {name: getattr(found.settings, name) for name in ignored} == ignored
    assert not set(ignored) & (found.settings.model_fields_set | set(found.origin))


@pytest.mark.parametrize(
    ("lines", "environ", "flags", "says"),
    [
        ("system: fate", {}, {"shadow": "int8"}, "--shadow is int8, which --predictor cross-layer does not read"),
        ("system: fate\nshadow: int8", {}, {}, "shadow in .* is int8, which --predictor cross-layer does not read"),
        ("system: fate", {"ODMOE_SHADOW": "nf4"}, {}, "ODMOE_SHADOW is nf4, which --predictor cross-layer does"),
        ("", {}, {"shadow": "int8", "system": "fate"}, "--shadow is int8, which --predictor cross-layer does not read"),
        (
            "shadow: none",
            {},
            {"align_kv": "2"},
            "--align-kv is 2 with shadow none; there is nothing to align: leave it out, or give a shadow",
        ),
        ("alpha: 0.2", {}, {}, "alpha in .* is 0.2, which neither --predictor sep nor --router top-k reads"),
    ],
)
def test_what_is_as_specific_as_the_choice_is_refused(
    lines: str, environ: dict[str, str], flags: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        effective(flags, file_of(tmp_path, lines), environ)


def test_a_printed_configuration_serves_any_system(tmp_path: Path) -> None:
    file = file_of(tmp_path, dump(merge_sources({}, None, {})))
    for name in SYSTEMS:
        found = effective({"system": name}, file, {})
        assert found.settings == effective({"system": name}, None, {}).settings


def test_config_shows_what_no_policy_reads(cli: CommandLine, tmp_path: Path) -> None:
    file = file_of(tmp_path, "shadow: nf4")
    answer = cli("config", "--config", file, "--system", "smoe")
    assert answer.code == 0, answer.err
    assert f"\nshadow: nf4  # shadow in {file}\n" in answer.out


def test_reading_nothing(tmp_path: Path) -> None:
    assert read_file(Path(file_of(tmp_path, ""))) == {}
