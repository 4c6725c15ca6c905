"""`generation_config.json` that people have in their models, and what is said of it before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from checkpoint.dense import load_dense
from checkpoint.sharding.generation_file import FILE, check_generation_file
from scheduler.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token_id": []}', r"eos_token_id is \[\]; allowed: a token id, or a list of at least one"),
        ('{"eos_token_id": "2"}', r"eos_token_id is '2'"),
        ('{"eos_token_id": -1}', r"eos_token_id is -1"),
        ('{"eos_token_id": 1.5}', r"eos_token_id is 1\.5"),
        ('{"eos_token_id": true}', r"eos_token_id is True"),
        ('{"eos_token_id": [[1]]}', r"eos_token_id is \[\[1\]\]"),
        ('{"eos_token_id": [1, null]}', r"eos_token_id is \[1, None\]"),
        ('{"eos_token_id": {"a": 1}}', r"eos_token_id is {'a': 1}"),
        ("", "is no JSON"),
        ("{bad", "is no JSON"),
        ("\xff\xfe", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", r"is \[\]; allowed: a JSON object"),
        ("null", "is None; allowed: a JSON object"),
        ('"text"', "is 'text'; allowed: a JSON object"),
        ('{"top_p": 0.5, "pad_token_id": "x"}', "pad_token_id is 'x', which Transformers refuses"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0, which Transformers refuses"),
        ('{"suppress_tokens": 5}', "suppress_tokens is 5, which Transformers refuses"),
        ('{"cache_implementation": "none"}', "cache_implementation is 'none', which Transformers refuses"),
        ('{"to_dict": 5}', "to_dict is 5, which Transformers refuses"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said) as raised:
        check_generation_file(tmp_path)
    assert str(tmp_path / FILE) in str(raised.value)
    assert "correct that file" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"eos_token_id": null}',
        '{"eos_token_id": 2}',
        '{"eos_token_id": [2, 2, 999999999]}',
        '{"max_length": null}',
        '{"temperature": 0}',
        '{"temperature": "1.0"}',
        '{"unknown": [1], "do_sample": true, "top_k": 5}',
    ],
)
def test_files_that_transformers_takes(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    GenerationConfig.from_pretrained(tmp_path)
    check_generation_file(tmp_path)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    check_generation_file(tmp_path)


def test_it_is_looked_at_before_the_weights(tmp_path: Path) -> None:
    import torch

    (tmp_path / FILE).write_text('{"eos_token_id": []}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_dense(tmp_path, {"model_type": "mixtral"}, torch.float32)
