"""Settings as keywords: what type checkers are told is what the tables take, and errors speak of keywords."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

import odmoe
from odmoe.api.names import keywords, named_as_keywords
from odmoe.settings.keywords import File, Rate, Size
from odmoe.settings.plan_settings import PlanSettings
from odmoe.settings.settings import Settings
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.table import Table
from scheduler.errors import ConfigError, LaunchError

WIDER: dict[str, Any] = {
    **dict.fromkeys(
        ("store", "token_predictor", "tls", "trace", "record", "profile", "routes", "kv_disk", "policy_file"), File
    ),
    **dict.fromkeys(("device_memory", "memory", "worker_memory", "kv_memory", "kv_disk_size"), Size),
    **dict.fromkeys(("load_bandwidth", "link"), Rate),
    "stop": str | Sequence[str],
}
"""Settings that take more than what they become."""


def kinds(annotation: Any) -> set[Any]:
    """The types of a union, without notes."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in kinds(one)}
    return {annotation}


@pytest.mark.parametrize(
    ("told", "table", "elsewhere"),
    [
        (odmoe.LoadKeywords, Settings, {"model", "cluster", "chat", "system_prompt"}),
        (odmoe.PlanKeywords, PlanSettings, {"model", "machine", "cluster"}),
        (odmoe.SimulateKeywords, SimulateSettings, {"replay"}),
    ],
)
def test_type_checkers_know_every_setting(told: Any, table: type[Table], elsewhere: set[str]) -> None:
    assert told.__total__ is False
    hints = get_type_hints(told)
    assert set(hints) | elsewhere == set(table.model_fields)
    for name, hint in hints.items():
        field = table.model_fields[name].annotation
        wanted = kinds(field) & {NoneType} | kinds(WIDER.get(name, field))
        assert kinds(hint) == wanted, name


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ("--slots is 3; allowed: 1 to 2", "slots is 3; allowed: 1 to 2"),
        ("give --worker-memory, or fewer --workers", "give worker_memory, or fewer workers"),
        (
            "start one (odmoe up FILE --yes), or use --cluster local",
            "start one (odmoe up FILE --yes), or use cluster local",
        ),
        (
            "record a run: odmoe generate --record FILE ..., with --draft 2",
            "record a run: odmoe generate --record FILE ..., with draft 2",
        ),
        ("start Ray with --resources='{}'; see --prompts", "start Ray with --resources='{}'; see --prompts"),
        ("a--slots and ---slots", "a--slots and ---slots"),
    ],
)
def test_flags_become_keywords(told: str, meant: str) -> None:
    assert keywords(told) == meant


def test_an_error_stays_the_same_error() -> None:
    error = LaunchError("--cluster is auto")
    with pytest.raises(LaunchError) as caught, named_as_keywords():
        raise error
    assert caught.value is error
    assert str(error) == "cluster is auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace": "same", "record": "same"}, "^trace and record are both 'same'"),
        ({"slots": 5000}, "^slots is 5000; allowed: 1 to"),
        ({"shadow": "none", "device_memory": "1kB"}, "^device_memory 1kB is"),
    ],
)
def test_a_load_speaks_of_keywords(
    demo: Path, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        odmoe.load(demo, **settings)


def test_plans_and_simulations_speak_of_keywords(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^group_size is 9; allowed: 1 to workers "):
        odmoe.plan(demo, workers=4, group_size=9)
    with pytest.raises(ConfigError, match=r"^context is 2000000; allowed"):
        odmoe.plan(demo, context=2_000_000)
    with pytest.raises(ConfigError, match=r"^top_k is 9 with 4 experts"):
        odmoe.simulate(top_k=9, experts=4)
    with pytest.raises(ConfigError, match=r"^trace is .*; allowed: a file in a directory"):
        odmoe.simulate(trace=tmp_path / "none" / "trace")


@pytest.mark.parametrize("wrong", [5, 1.5, b"path", ["models"], 1j], ids=repr)
def test_what_is_no_path_is_named(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model is .*; allowed: a model directory"):
        odmoe.load(wrong)
    with pytest.raises(ConfigError, match=r"^model is .*; allowed: a directory"):
        odmoe.plan(wrong)
    with pytest.raises(ConfigError, match=r"^recording is .*; allowed: a file"):
        odmoe.replay(wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster": 5},
        {"workers": []},
        {"shadow": None},
        {"system": 3},
        {"device_memory": {}},
        {"stop": 5},
        {"record": 5},
    ],
    ids=repr,
)
def test_wrong_types_of_settings_are_named(demo: Path, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name} is "):
        odmoe.load(demo, **settings)


def test_paths_may_be_of_pathlib(tmp_path: Path) -> None:
    class Somewhere(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "nothing")

    for path in (tmp_path / "nothing", Somewhere()):
        with pytest.raises(ConfigError, match="nothing"):
            odmoe.simulate(routes=path)
        with pytest.raises(ConfigError, match="nothing"):
            odmoe.simulate(profile=path)
