"""Which forms a worker loads: by the times of its own loader, and of restoring."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.expert import ExpertArithmetic
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from worker_node import form_choice
from worker_node.form_choice import FormChoice, choose_forms
from worker_node.loaders.disk import DiskLoader
from worker_node.loaders.make import make_loader

FATE = FormChoice(("int4", "int2"), 9)
HOBBIT = FormChoice(("", "int4"), 9)


@pytest.fixture(scope="module")
def formed(store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The session's store with both forms."""
    copied = shutil.copytree(store.path, tmp_path_factory.mktemp("choice") / "store")
    return add_forms(ExpertStore.open(Path(copied)), ("int4", "int2"))


class Counted(DiskLoader):
    """Counts how many of its kind are open."""

    opened = 0

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        type(self).opened += 1

    def close(self) -> None:
        type(self).opened -= 1
        super().close()


@pytest.fixture
def choose(formed: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FormChoice]:
    """`choose(asked, full_slots, seconds of each form's load, seconds of restoring)`."""

    def chosen(asked: FormChoice, full_slots: int, loads: dict[str, float], restoring: float) -> FormChoice:
        rates = {form: formed.manifest.form_bytes(form) / loads[form] for form in loads}
        monkeypatch.setattr(form_choice, "load_bandwidth", lambda store, loader, slots, form: rates[form])
        monkeypatch.setattr(form_choice, "restoring_seconds", lambda *_: restoring)
        arithmetic = ExpertArithmetic(formed.manifest.config, formed.manifest.dtype)
        found = choose_forms(formed, arithmetic, Counted(formed), asked, full_slots)
        assert Counted.opened == 0
        return found

    return chosen


def times(found: FormChoice) -> dict[str, float]:
    return {cost.form: cost.load_s for cost in found.costs}


@pytest.mark.parametrize("asked", [FATE, HOBBIT])
def test_forms_that_pay_are_kept(choose: Callable[..., FormChoice], asked: FormChoice) -> None:
    loads = {"": 0.04, "int4": 0.01, "int2": 0.005}
    found = choose(asked, 4, loads, 0.002)
    assert (found.forms, found.slots) == (asked.forms, asked.slots)
    assert times(found) == pytest.approx({form: loads[form] for form in {"", *asked.forms}})
    assert {cost.form: cost.fits for cost in found.costs} == {form: form in asked.forms for form in times(found)}
    assert {cost.restore_s for cost in found.costs if cost.form} == {0.002}
    assert next(cost for cost in found.costs if not cost.form).restore_s == 0


@pytest.mark.parametrize("asked", [FATE, HOBBIT])
def test_where_int4_does_not_pay_all_is_full(choose: Callable[..., FormChoice], asked: FormChoice) -> None:
    found = choose(asked, 4, {"": 0.02, "int4": 0.01, "int2": 0.001}, 0.05)
    assert (found.forms, found.slots) == (("",), 4)
    assert [cost.form for cost in found.costs if cost.fits] == [""]
    assert {cost.form for cost in found.costs} == {"", *asked.forms}


def test_without_room_for_the_full_form_smaller_ones_stay(choose: Callable[..., FormChoice]) -> None:
    found = choose(FATE, 0, {"": 0.01, "int4": 0.01, "int2": 0.01}, 0.05)
    assert (found.forms, found.slots) == (FATE.forms, FATE.slots)


@pytest.mark.parametrize("loader", ["disk", "memory"])
def test_measured_with_a_real_loader(formed: ExpertStore, loader: str) -> None:
    """Experts as small as these take longer to restore than to load."""
    arithmetic = ExpertArithmetic(formed.manifest.config, formed.manifest.dtype)
    found = choose_forms(formed, arithmetic, make_loader(loader, formed, forms=FATE.forms), FATE, 3)
    assert all(cost.load_s > 0 for cost in found.costs)
    assert all(cost.restore_s > 0 for cost in found.costs if cost.form)
    pays = found.costs[1].load_s + found.costs[1].restore_s < found.costs[0].load_s
    assert (found.forms, found.slots) == ((FATE.forms, FATE.slots) if pays else (("",), 3))


def test_unknown_where_no_load_ends_in_time(formed: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_choice, "load_bandwidth", lambda *_: 0.0)
    arithmetic = ExpertArithmetic(formed.manifest.config, formed.manifest.dtype)
    assert choose_forms(formed, arithmetic, DiskLoader(formed), FATE, 3) == FATE
