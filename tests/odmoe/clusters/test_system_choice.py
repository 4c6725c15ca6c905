"""What `--system auto` becomes: exact decisions for given memory, and what the engine then does on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import odmoe
from odmoe.clusters import system_choice
from odmoe.clusters.system_choice import Choice, Facts, choose_system, facts_of
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.table import flag
from scheduler.errors import ConfigError
from support.machines.cli import CommandLine

GB = 10**9
QWEN = dict(dense=4 * GB, experts=57 * GB, least=100 * 10**6, shadow=32 * GB)
"""About those of Qwen3-30B-A3B in bfloat16."""


@pytest.mark.parametrize(
    ("room", "system", "memory", "words"),
    [
        (64 * GB, "fully-cached", None, ["57.00 GB", "fit into 60.00 GB"]),
        (61 * GB, "fully-cached", None, ["57.00 GB"]),
        (61 * GB - 1, "lrfu-prefetch", 57 * GB - 1, ["all experts need 57.00 GB"]),
        (40 * GB, "lrfu-prefetch", 36 * GB, ["a shadow 32.00 GB", "shares this processor", "--system od-moe"]),
        (36 * GB, "lrfu-prefetch", 32 * GB, ["a shadow 32.00 GB", "does not fit", "--system od-moe"]),
        (5 * GB, "lrfu-prefetch", GB, ["does not fit"]),
        (3 * GB, "lrfu-prefetch", 100 * 10**6, ["1.10 GB more than there is room for"]),
    ],
)
def test_the_choice_follows_the_memory(room: int, system: str, memory: int | None, words: list[str]) -> None:
    found = choose_system(Facts(room=room, **QWEN))
    assert found == Choice(system, memory, found.why)
    for word in words:
        assert word in found.why


GIVEN = {"workers": 2, "slots": 2, "device_memory": "25%", "shadow": "nf4", "residency": "lru"}


@pytest.mark.parametrize(("name", "value"), [*GIVEN.items(), ("loader", "memory"), ("worker_device", "cpu")])
def test_an_explicit_choice_is_kept(name: str, value: Any) -> None:
    given = effective({"model": "m", name: value}, None, {}).settings
    assert given.system == "od-moe"
    assert getattr(given, name) == value
    with pytest.raises(ConfigError, match=f"--system is auto with {flag(name)}"):
        effective({"model": "m", "system": "auto", name: value}, None, {})


def test_it_is_for_a_model_in_this_process() -> None:
    assert effective({"model": "m"}, None, {}).settings.system == "auto"
    assert effective({"model": "m", "system": "od-moe"}, None, {}).settings.has_shadow
    assert effective({"model": "m", "cluster": "local"}, None, {}).settings.system == "od-moe"
    assert effective({"cluster": "lan.yaml"}, None, {}).settings.system == "od-moe"
    with pytest.raises(ConfigError, match="--system is auto with --cluster local"):
        effective({"model": "m", "cluster": "local", "system": "auto"}, None, {})
    with pytest.raises(ConfigError, match="--system is auto, which only commands that answer"):
        effective({"model": "m", "system": "auto"}, None, {}, chooses=False)


@pytest.mark.parametrize(
    ("free", "system"),
    [
        (10**9, "fully-cached"),
        (25 * 10**6, "lrfu-prefetch"),
        pytest.param(10**6, "lrfu-prefetch", marks=pytest.mark.slow),
    ],
)
def test_the_model_answers_with_what_was_chosen(
    demo: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, expected: Any, free: int, system: str
) -> None:
    monkeypatch.setattr(system_choice, "available_memory", lambda: free)
    answer = cli("generate", "-m", str(demo), "-n", "6", "--ctx-size", "64", "--json", "HAMLET")
    facts = json.loads(answer.out)
    assert answer.code == 0
    assert facts["text"] == expected("HAMLET", 6)[1]
    assert facts["system"] == system
    assert facts["exact"]
    assert facts["shadow"] == "none"
    assert f"chose {system}" in answer.err
    assert ("--system od-moe" in answer.err) == (system != "fully-cached")
    if free == 25 * 10**6:
        assert 0 < int(facts["device_memory"]) < 20 * 10**6


def test_caches_have_room_for_the_whole_context_in_an_eighth_of_the_memory(
    demo_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model has 1,024 tokens, and for each 8 layers of keys and values, 2 heads of 32 in bfloat16."""
    store, token = demo_store("bfloat16"), 8 * 2 * 2 * 32 * 2
    monkeypatch.setattr(system_choice, "CONTEXT", 64)

    def beyond_64(free: int, **given: int) -> int:
        monkeypatch.setattr(system_choice, "available_memory", lambda: free)
        asked = Settings(model=str(store.dense), parallel=3, **given)
        return facts_of(asked, store).dense - facts_of(asked.replace(ctx_size=64), store).dense

    assert beyond_64(10**9) == 3 * (1024 - 64) * token
    assert beyond_64(10**7) == 10**6 - 3 * 64 * token
    assert beyond_64(10**6) == 0


def test_a_budget_is_followed(demo: Path, cli: CommandLine) -> None:
    flags = ("-n", "3", "--json", "--ctx-size", "64", "HAMLET")
    small = json.loads(cli("generate", "-m", str(demo), "--memory", "15MB", *flags).out)
    large = json.loads(cli("generate", "-m", str(demo), "--memory", "60MB", *flags).out)
    assert (small["system"], large["system"]) == ("lrfu-prefetch", "fully-cached")
    assert small["memory"] == "15MB"
    assert small["memory_budget"]["experts"] < 15 * 10**6


def test_load_chooses_too(demo: Path) -> None:
    with odmoe.load(demo, threads=1) as model:
        assert model.cluster.serves().system == "fully-cached"
        assert not model.cluster.serves().has_shadow
