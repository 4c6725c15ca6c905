"""Schemas that are refused, tokenizers that cannot be read, and what a guide allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odmoe import json_schema
from odmoe.json_schema import JsonGuides, make_guides
from odmoe.text import load_tokenizer
from scheduler.errors import ConfigError, NoTokenizerError
from support.paths import DEMO

EOS, SIZE = 1, 2048
ENDS = frozenset([EOS])


@pytest.fixture(scope="module")
def guides() -> JsonGuides:
    return JsonGuides(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("nonsense", "the schema is no JSON"),
        ('{"const": NaN}', "NaN is no number of JSON"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, "the schema is no JSON"),
        ("[1]", r"the schema is \[1\]; give a JSON object"),
        ("true", "the schema is true; give a JSON object"),
        ('{"type": "objec"}', "Invalid type: objec"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
        ('{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ('{"type": "string", "pattern": "(?=a)"}', "look-ahead"),
        ('{"$ref": "http://example.org/schema"}', "does not fetch resources"),
        ('{"$ref": "#"}', "no token to begin a text that follows it"),
        ('{"enum": ["\\ud800"]}', "the schema is refused"),
    ],
)
def test_refused_with_the_reason_on_one_line(schema: str, message: str, guides: JsonGuides) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        guides(schema, ENDS, SIZE)
    assert "\n" not in str(caught.value)
    assert "<" not in str(caught.value).partition("look-ahead")[0]


def test_what_is_allowed(guides: JsonGuides, tokenizer: Any) -> None:
    """Against every token's own text."""
    guide = guides('{"enum": ["abc", "abd", "x"], "type": "string"}', ENDS, SIZE)
    texts = [tokenizer.decode([token]) for token in range(SIZE)]
    special = set(tokenizer.all_special_ids)
    before = ""
    for piece in ('"', "ab", "d", '"'):
        wanted = [
            token not in special and any(full.startswith(before + texts[token]) for full in ('"abc"', '"abd"', '"x"'))
            for token in range(SIZE)
        ]
        assert guide.allowed_tokens().tolist() == wanted
        assert not guide.complete
        (token,) = tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert wanted[token]
        guide.take(token)
        before += piece
    assert guide.complete
    assert guide.allowed_tokens().nonzero().flatten().tolist() == [EOS]


@pytest.mark.parametrize("ends", [ENDS, frozenset({EOS, 0}), frozenset[int]()], ids=str)
def test_ends_are_the_models(ends: frozenset[int], guides: JsonGuides, tokenizer: Any) -> None:
    """Whatever the tokenizer takes for the end of a sequence."""
    guide = guides('{"type": "integer"}', ends, SIZE)
    (one,) = tokenizer("1", add_special_tokens=False)["input_ids"]
    assert not {*guide.allowed_tokens().nonzero().flatten().tolist()} & {0, EOS}
    guide.take(one)
    assert {*guide.allowed_tokens().nonzero().flatten().tolist()} & {0, EOS} == ends


def test_a_vocabulary_that_was_padded(guides: JsonGuides) -> None:
    """Many models have more rows of logits than their tokenizer has tokens."""
    allowed = guides("{}", ENDS, SIZE + 100).allowed_tokens()
    assert allowed.shape == (SIZE + 100,)
    assert allowed.any()
    assert not allowed[SIZE:].any()


def test_blanks_come_to_an_end(guides: JsonGuides, tokenizer: Any) -> None:
    blank = tokenizer.convert_tokens_to_ids("Ġ")
    guide, count = guides('{"type": "object"}', ENDS, SIZE), 0
    guide.take(tokenizer.convert_tokens_to_ids("{"))
    while guide.allowed_tokens()[blank]:
        guide.take(blank)
        count += 1
    assert count == 4
    assert guide.allowed_tokens().any()


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "array"}, '[\n        {\n            "a": [1, 2]\n        }\n]', True),
        ({"type": "array"}, "[\r\n\t\t1\r\n]", True),
        ({"type": "array"}, "[\n\n1]", False),
        ({"type": "array", "x-guidance": {"whitespace_flexible": False}}, "[1, 2]", False),
        ({"type": "array", "x-guidance": {"whitespace_flexible": False}}, "[1,2]", True),
        ({"type": "array", "x-guidance": {"whitespace_pattern": "_"}}, "[1,_2]", True),
    ],
    ids=str,
)
def test_blanks_between_the_parts(schema: Any, text: str, fits: bool, guides: JsonGuides, tokenizer: Any) -> None:
    guide, tokens = guides(json.dumps(schema), ENDS, SIZE), tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in tokens:
        if not guide.allowed_tokens()[token]:
            assert not fits
            return
        guide.take(token)
    assert guide.complete
    assert fits


def test_the_tokenizer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reading(folder: Path) -> Any:
        read.append(folder)
        return load_tokenizer(folder)

    monkeypatch.setattr(json_schema, "load_tokenizer", reading)
    made = make_guides(DEMO)
    for schema in ({"type": "object"}, {"type": "array"}):
        made(json.dumps(schema), ENDS, SIZE)
    assert read == [DEMO]


def test_a_tokenizer_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Slow:
        eos_token_id = 0
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 8

    with pytest.raises(NoTokenizerError):
        make_guides(tmp_path)("{}", ENDS, SIZE)
    monkeypatch.setattr(json_schema, "load_tokenizer", lambda folder: Slow())
    with pytest.raises(ConfigError, match=r"llguidance cannot read its tokenizer, a Slow \(Only fast tokenizers"):
        make_guides(DEMO)("{}", ENDS, SIZE)
