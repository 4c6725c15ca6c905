"""`odmoe stores` lists what the cache holds, and removes what is named."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.stores import prepare_store

CommandLine = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "odmoe" / "stores"


def listed(cli: CommandLine) -> list[dict[str, Any]]:
    answer = cli("stores", "--json")
    assert answer.code == 0
    found: list[dict[str, Any]] = json.loads(answer.out)["stores"]
    return found


def test_an_empty_cache(cli: CommandLine, cache: Path) -> None:
    assert listed(cli) == []
    assert cli("stores").out == f"no stores in {cache}\n"


def test_model_format_size_and_last_use(cli: CommandLine, tiny: Path, cache: Path) -> None:
    first = prepare_store(str(tiny), None, "bfloat16", forms_needed=lambda store: ("int4",))
    time.sleep(0.01)
    second = prepare_store(str(tiny), None, None)
    found = listed(cli)
    assert [one["name"] for one in found] == [second.path.name, first.path.name], "the one used last first"
    assert [one["format"] for one in found] == ["float32", "bfloat16, int4"]
    assert {one["model"] for one in found} == {str(tiny)}
    assert found[0]["bytes"] == sum(file.stat().st_size for file in second.path.rglob("*") if file.is_file())
    assert abs(found[0]["last_used"] - time.time()) < 60
    prepare_store(str(tiny), None, "bfloat16")
    assert listed(cli)[0]["name"] == first.path.name
    lines = cli("stores").out.splitlines()
    assert lines[0].split() == ["STORE", "MODEL", "FORMAT", "GB", "LAST", "USE"]
    assert first.path.name in lines[1]


def test_a_store_is_removed_and_made_again(cli: CommandLine, tiny: Path, cache: Path) -> None:
    name = prepare_store(str(tiny), None, None).path.name
    answer = cli("stores", "--remove", name)
    assert (answer.code, answer.out.split(",")[0]) == (0, f"removed {name}")
    assert listed(cli) == []
    assert prepare_store(str(tiny), None, None).path == cache / name


@pytest.mark.parametrize("name", ["nowhere", "../..", "", "/", "."])
def test_only_a_store_of_the_cache_is_removed(cli: CommandLine, tiny: Path, cache: Path, name: str) -> None:
    kept = prepare_store(str(tiny), None, None)
    answer = cli("stores", "--remove", name)
    assert (answer.code, "which is no store in" in answer.err) == (2, True)
    assert kept.verify().blobs > 0


def test_what_is_damaged_is_listed_and_can_be_removed(cli: CommandLine, tiny: Path, cache: Path) -> None:
    store = prepare_store(str(tiny), None, None)
    (store.path / "manifest.json").write_text("{")
    shutil.copytree(store.path, cache / ".half.partial")
    assert {one["name"]: one["format"] for one in listed(cli)} == {
        store.path.name: "damaged",
        ".half.partial": "unfinished",
    }
    assert cli("stores", "--remove", store.path.name).code == 0
    assert cli("stores", "--remove", ".half.partial").code == 0
    assert listed(cli) == []
