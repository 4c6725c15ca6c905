"""All of the store but its experts is removed while the service runs: what needs the tokenizer goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.stores import open_verified
from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from openai.types import Completion

ASK: dict[str, Any] = {"model": "demo-moe", "prompt": "Natalia", "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def served(demo_store: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("removed") / "store"
    shutil.copytree(demo_store("float32").path, folder)
    with demo_model(open_verified(str(folder))) as model, serving(model) as made:
        shutil.rmtree(model.opened.store.dense)
        yield made


def test_stop_texts(served: Served) -> None:
    whole: Completion = served.client().completions.create(**ASK)
    stop = whole.choices[0].text.split()[-1]
    found = served.client().completions.create(**ASK, stop=stop)
    assert found.choices[0].text == whole.choices[0].text.partition(stop)[0]


@pytest.mark.slow
def test_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    found = served.client().completions.create(**(ASK | {"max_tokens": 60}), extra_body={"response_format": form})
    assert "".join(found.choices[0].text.split()) == '{"a":"b"}'
