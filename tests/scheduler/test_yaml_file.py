"""YAML that a person wrote, and what no person wrote: bounded, with each error in one line."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from scheduler.yaml_file import MAX_BYTES, MAX_DEPTH, key_line, parse_yaml, read_yaml
from support.paths import ROOT

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))

LONG = [
    *("1" * 6000, "-" + "1" * 65, "0x" + "f" * 6000, "0b" + "1" * 60_000, "0" + "7" * 9000, "1_" * 3000 + "1"),
    *(":".join(["1"] * 100_000), ":".join(["1"] * 1000) + ".5", "1" * 400 + ".5", "!!int " + "1" * 6000),
]
"""Numbers that Python would refuse to show, or that take time which grows with the square of their length."""

WRONG = [
    ("a: 1\nb: 2\na: 3", "f has a twice, in lines 1 and 3; keep one"),
    ("x:\n  - {k: 1,\n     k: 2}", "f has k twice, in lines 2 and 3"),
    ("yes: 1\ntrue: 2", "f has true twice, in lines 1 and 2"),
    ("[" * (MAX_DEPTH + 1), "nested more than 32 deep in line 1"),
    ("{a: " * 100_000, "nested more than 32 deep in line 1"),
    ("- " * 100_000, "nested more than 32 deep in line 1"),
    (LAUGHS, "more than 32,768 values up to line 6"),
    ("- a\n" * 40_000, "more than 32,768 values"),
    ("a: &a [*a]", "in line 1, a value contains itself"),
    ("a: *hunter2", "line 1, column 4 is not YAML"),
    ("---\na: 1\n---\nb: 1", "a second document, from line 3 on"),
    ("? [a]\n: 1", "line 1, column 3 is not YAML"),
    ("!!python/object/apply:os.getpid []", "line 1, column 1 is not YAML"),
    ("a: \0", "is not YAML"),
    ("a: 2024-02-31", "a date, number or tag that is not valid in line 1"),
    ("b:\n- a: !!bool hunter2", "a date, number or tag that is not valid in line 2"),
    ("a: !!timestamp hunter2", "a date, number or tag that is not valid in line 1"),
    ('a: !!int ""', "a date, number or tag that is not valid in line 1"),
    *[(f"b: 1\na: {number}", "a number of more than 64 characters in line 2") for number in LONG],
    ("b: 1\n? " + "1" * 100 + "\n: 1", "a number of more than 64 characters in line 2"),
    ("? " + "k" * 900 + "\n: 1\n? " + "k" * 900 + "\n: 2", "has " + "k" * 40 + "... twice, in lines 1 and 3"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:20] for text, _ in WRONG])
def test_wrong_texts(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_numbers() -> None:
    """64 characters, with their sign; texts may be longer, and so may hexadecimal digits in quotes."""
    assert parse_yaml("a: " + "9" * 64 + "\nb: '" + "9" * 6000 + "'", "f") == {"a": 10**64 - 1, "b": "9" * 6000}
    assert parse_yaml("a: 190:20:30", "f") == {"a": 685_230}, "base 60"


def test_the_line_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a: 1\nb:\n  c: {d: 2,\n      e: 3}\n")
    lines = [key_line(tmp_path / "f", *keys) for keys in (("a",), ("b",), ("b", "c"), ("b", "c", "e"))]
    assert lines == [1, 2, 3, 4]
    assert key_line(tmp_path / "f", "b", "e") is key_line(tmp_path / "none", "a") is None


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="f cannot be read: No such file or directory; check the path"):
        read_yaml(tmp_path / "none", "f")
    with pytest.raises(ConfigError, match="f cannot be read: Is a directory"):
        read_yaml(tmp_path, "f")
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)
    with pytest.raises(ConfigError, match=f"f cannot be read: it has more than {MAX_BYTES:,} bytes"):
        read_yaml(large, "f")
    large.write_bytes(b"a: \xff\n")
    os.truncate(large, 5)
    with pytest.raises(ConfigError, match="f cannot be read: byte 3 is not UTF-8 text"):
        read_yaml(large, "f")


def test_what_is_allowed() -> None:
    assert parse_yaml("# nothing\n", "f") is None
    assert parse_yaml("a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  k: 3\nc: [*x, *x]", "f") == {
        "a": {"k": 1, "l": 2},
        "b": {"k": 3, "l": 2},
        "c": [{"k": 1, "l": 2}] * 2,
    }
    assert parse_yaml("a: 2024-02-29\nb: .5\nc: ~", "f") == {"a": datetime.date(2024, 2, 29), "b": 0.5, "c": None}
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f") is not None


@pytest.mark.parametrize("file", ["cluster.yaml", *map(str, (ROOT / "scheduler/timing/profiles").glob("*.yaml"))])
def test_the_project_s_own_files_as_yaml_itself_reads_them(file: str) -> None:
    assert read_yaml(ROOT / file, "f") == yaml.safe_load((ROOT / file).read_text())


plain = st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=8)


@given(st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)))
def test_any_value_as_yaml_itself_reads_it(value: object) -> None:
    text = yaml.safe_dump(value)
    assert parse_yaml(text, "f") == yaml.safe_load(text)


@given(st.text(alphabet="ab:-[]{}&*!?|>'\"%@#, \n\t~1.<=", max_size=60))
def test_any_text_gives_a_value_or_an_error_of_ours(text: str) -> None:
    try:
        parse_yaml(text, "f")
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most texts raise nothing
