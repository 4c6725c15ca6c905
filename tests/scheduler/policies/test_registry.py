"""What a name stands for, which settings a policy reads, and what is answered to a name that does not exist."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from scheduler.errors import ConfigError
from scheduler.policies.registry import (
    CHOICES,
    PRECISIONS,
    RESIDENCIES,
    ROUTERS,
    Choice,
    check,
    forms_of,
    inexact,
    is_exact,
    is_read,
    readers,
    strategy_of,
)
from scheduler.policies.routers import TopK
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS, preset_of
from scheduler.types import ModelShape

SHAPE = ModelShape((0, 1, 2, 3), 8, 2)
NUMBERS = ("alpha", "prefetch")


class Watched:
    """A configuration that keeps which of its fields were read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(SystemConfig(), name)


@pytest.mark.parametrize(("field", "name"), [(field, name) for field, names in CHOICES.items() for name in names])
def test_a_policy_reads_the_numbers_that_it_declares(field: str, name: str) -> None:
    choice, watched = CHOICES[field][name], Watched()
    choice.make(SHAPE, watched)
    assert watched.read & set(NUMBERS) == set(choice.reads) & set(NUMBERS)


@pytest.mark.parametrize(
    ("field", "name"), [("router", one) for one in ROUTERS] + [("precision", p) for p in PRECISIONS]
)
def test_a_policy_is_as_exact_as_its_choice_declares(field: str, name: str) -> None:
    assert CHOICES[field][name].make(SHAPE, SystemConfig()).exact == CHOICES[field][name].exact
    for alpha in (None, 0, 0.1):
        system = SystemConfig(**{field: name}, alpha=alpha)
        assert inexact(system) == ({} if strategy_of(SHAPE, system).exact else {field: name})


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_has_the_forms_that_it_declares(name: str) -> None:
    assert PRECISIONS[name].make(SHAPE, SystemConfig()).forms == PRECISIONS[name].forms
    assert forms_of(SystemConfig(precision=name)) == PRECISIONS[name].forms


class Own(TopK):
    """A router that reads the shape."""

    exact = False

    def __init__(self, shape: ModelShape) -> None:
        self.layers = len(shape.layers)


def test_a_policy_of_ones_own_may_read_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "own", Choice("Reads the shape", lambda shape, c: Own(shape), exact=False))
    system = SystemConfig(router="own")
    assert not is_exact(system)
    assert inexact(system) == {"router": "own"}
    assert not strategy_of(SHAPE, system).exact


def test_readers() -> None:
    assert readers("shadow") == readers("align_kv") == ("sep",)
    assert readers("alpha") == ("next-layer", "expert-cache", "skip")
    assert readers("workers") == ()
    assert is_read("workers", SystemConfig())
    assert is_read("shadow", SystemConfig())
    assert not is_read("shadow", SYSTEMS["fate"].config)
    assert is_read("alpha", SystemConfig(router="skip"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_as_exact_as_its_policies(name: str) -> None:
    config = SYSTEMS[name].config
    assert is_exact(config) == strategy_of(SHAPE, config).exact


@pytest.mark.parametrize(
    ("system", "says"),
    [
        (SystemConfig(predictor="next-gates"), "--predictor is 'next-gates'; did you mean next-gate"),
        (SystemConfig(residency="lur"), rf"--residency is 'lur'; did you mean lru.* all {len(RESIDENCIES)} names"),
        (SystemConfig(residency="zzz"), f"--residency is 'zzz'; odmoe systems lists all {len(RESIDENCIES)} names"),
        (SystemConfig(router="topk"), "--router is 'topk'; allowed: top-k, expert-cache, skip"),
        (SystemConfig(prefill="never"), "--prefill is 'never'; allowed: ahead, pipelined, in-turn"),
        (SystemConfig(alpha=1.5), "--alpha is 1.5; allowed: a number from 0 to 1"),
        (SystemConfig(alpha=float("nan")), "--alpha is nan; allowed: a number from 0 to 1"),
        (SystemConfig(prefetch=0), "--prefetch is 0; allowed: 1 to 65536"),
        (SystemConfig(prefetch=99999999), "--prefetch is 99999999; allowed: 1 to 65536"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(system: SystemConfig, says: str) -> None:
    for refuse in (lambda: check(system), lambda: strategy_of(SHAPE, system)):
        with pytest.raises(ConfigError, match=says):
            refuse()


def test_a_system_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=rf"--system is 'faet'; did you mean fate\? .* all {len(SYSTEMS)} names"):
        preset_of("faet")


def test_every_choice_is_described() -> None:
    assert {field.name for field in fields(SystemConfig)} == {*CHOICES, *NUMBERS}
    for names in CHOICES.values():
        assert len({choice.about for choice in names.values()}) == len(names)
        assert all(choice.about for choice in names.values())
