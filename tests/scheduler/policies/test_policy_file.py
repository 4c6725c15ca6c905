"""A file of policies: what is wrong with it is named, and what a policy does wrong ends requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odmoe.api.simulating import simulate
from scheduler import types as t
from scheduler.build import make_core
from scheduler.errors import ConfigError, SimulationError
from scheduler.policies import policy_file
from scheduler.policies.policy_file import load_policy_file, names_from_files, remove_policies_of
from scheduler.policies.registry import CHOICES, inexact, strategy_of
from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.policies.systems import SYSTEMS, preset_of

SHAPE = t.ModelShape((0, 1, 2), 4, 2)
HEAD = """
from scheduler.policies.placement import DeviceOnly
from scheduler.policies.precision import Full
from scheduler.policies.predictors.base import Forecast, PredictorBase
from scheduler.policies.registry import Choice
from scheduler.policies.residency.lru import LRU
from scheduler.policies.routers import TopK
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import Preset
class Router(TopK):
    exact, wants_scores = False, True
"""
MINE = 'POLICIES = {"residency": {"mine": Choice("Mine", lambda shape, c: LRU(shape))}}\n'


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    before = set(policy_file.loaded_files())
    yield
    for file in set(policy_file.loaded_files()) - before:
        remove_policies_of(file)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write(text: str, name: str = "mine.py") -> Path:
        file = tmp_path / name
        file.write_text(HEAD + text)
        load_policy_file(str(file))
        return file

    return write


def test_policies_and_presets_are_registered_as_from_the_file(load: Any) -> None:
    file = load(MINE + 'SYSTEMS = {"my-own": Preset("My own", SystemConfig("none", "mine"))}')
    assert preset_of("my-own").file == CHOICES["residency"]["mine"].file == str(file)
    assert {"--residency mine: Mine (from mine.py)", "--system my-own: My own (from mine.py)"} <= {*names_from_files()}
    assert len(strategy_of(SHAPE, SYSTEMS["my-own"].config).guarded) == 1
    assert inexact(SYSTEMS["my-own"].config) == {}
    remove_policies_of(file)
    assert "mine" not in CHOICES["residency"]
    assert "my-own" not in SYSTEMS


def test_a_file_is_run_again_if_it_has_changed(load: Any, tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('.')\n"
    for text in (MINE + count, MINE + count, MINE.replace('"mine"', '"other"') + count):
        load(text)
    assert (tmp_path / "runs").read_text() == ".."
    assert "mine" not in CHOICES["residency"]
    assert "other" in CHOICES["residency"]


def test_a_change_for_the_worse_leaves_what_there_was(load: Any) -> None:
    load(MINE)
    with pytest.raises(ConfigError, match="NameError"):
        load("nothing")
    with pytest.raises(ConfigError, match="has the name of one from odmoe itself"):
        load(MINE.replace('"mine"', '"lru"'))
    with pytest.raises(ConfigError, match="cannot be checked: TypeError"):
        load(of("residency", "LRU(shape)", ", reads=5"))
    assert "mine" in CHOICES["residency"]


def of(kind: str, made: str, more: str = "") -> str:
    return f'POLICIES = {{"{kind}": {{"mine": Choice("Mine", lambda shape, c: {made}{more})}}}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("POLICIES = {", r"cannot be run: SyntaxError: .* \(line \d+\)"),
        ("x = 1\nimport no_such_module", r"ModuleNotFoundError: No module named 'no_such_module' \(line 13\)"),
        ("raise SystemExit(3)", "cannot be run: SystemExit: 3"),
        ("x = 1", "has neither policies nor presets; give it a dict POLICIES, or SYSTEMS"),
        ("POLICIES = [1]", "POLICIES of .* is a list; allowed: a dict"),
        (of("residencies", "LRU(shape)"), "is 'residencies'; allowed: predictor, residency, router"),
        (
            'POLICIES = {"residency": {"mine": LRU}}',
            "residency 'mine' of .* allowed: scheduler.policies.registry.Choice",
        ),
        (MINE.replace('"mine"', '"My own"'), "residency 'My own' .* small letters, digits and hyphens"),
        (MINE.replace('"mine"', '"arc"'), "residency 'arc' .* has the name of one from odmoe itself; choose another"),
        (of("residency", "object()"), "has no property has_homes; scheduler/policies/residency/base.py says"),
        (of("placement", "object()"), "placement 'mine' .* has no method host; scheduler/policies/placement.py says"),
        (
            f"class Short(LRU):\n    def victim(self, evictable): pass\n{of('residency', 'Short(shape)')}",
            r"method victim that takes other arguments; wanted: victim\(worker, incoming, evictable\)",
        ),
        (of("residency", "LRU()"), "cannot be made for a model of one layer and two experts: TypeError"),
        (of("residency", "LRU(shape)", ', reads=("alhpa",)'), "reads a setting that is 'alhpa'; did you mean alpha"),
        (of("router", "Router()"), "chooses experts, which changes answers; give its Choice exact=False"),
        (of("router", "TopK()", ", exact=False"), "has exact True, and its Choice False; give both the same"),
        (of("precision", "Full()", ', forms=("int4",), exact=False'), r"has forms \('',\), and its Choice \('int4',\)"),
        (of("residency", "LRU(shape)", ", is_bound=True"), "has is_bound=True, .* told no routes to come"),
        ('SYSTEMS = {"mine": Preset("", {})}', r"has a config that is a dict; allowed: SystemConfig\(...\)"),
        ('SYSTEMS = {"mine": SystemConfig()}', "allowed: scheduler.policies.systems.Preset"),
        ('SYSTEMS = {"fate": Preset("", SystemConfig())}', "system 'fate' .* has the name of one from odmoe itself"),
        ('SYSTEMS = {"mine": Preset("", SystemConfig("oracle"))}', "predictor of system 'mine' .* is 'oracle'; "),
    ],
    ids=lambda value: value.splitlines()[-1][:60],
)
def test_what_is_wrong_is_named_and_nothing_is_registered(load: Any, text: str, says: str) -> None:
    before = {kind: list(names) for kind, names in CHOICES.items()}, list(SYSTEMS)
    with pytest.raises(ConfigError, match=says):
        load(text)
    assert before == ({kind: list(names) for kind, names in CHOICES.items()}, list(SYSTEMS))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--policy-file /none.py cannot be read: No such file or directory"):
        load_policy_file("/none.py")


def test_two_files_cannot_have_the_same_name(load: Any) -> None:
    first = load(MINE)
    with pytest.raises(ConfigError, match=f"has the name of one from {first}; choose another"):
        load(MINE + "# other", "second.py")


@pytest.mark.parametrize(
    ("kind", "base", "method", "answers"),
    [
        ("residency", "LRU", "victim", ["incoming", "1 / 0", "evictable"]),
        ("residency", "LRU", "warm", ["[0]", "None"]),
        ("residency", "LRU", "on_gate_fired", ["1 / 0"]),
        ("placement", "DeviceOnly", "host", ["[9]", "5"]),
        ("precision", "Full", "form", ["'int4'", "None"]),
        ("predictor", "PredictorBase", "on_pass_begun", ["[1]", "[Forecast(visit, (4,))]", "[Forecast(visit, 'x')]"]),
    ],
)
def test_what_a_policy_does_wrong_ends_the_simulation_by_name(
    kind: str, base: str, method: str, answers: list[str], load: Any
) -> None:
    takes = ", ".join(policy_file.methods_of(policy_file.PROTOCOLS[kind])[method].parameters)
    made = f"Bad({'' if base in ('DeviceOnly', 'Full') else 'shape'})"
    for answer in answers:
        load(f"class Bad({base}):\n    def {method}({takes}):\n        return {answer}\n{of(kind, made)}")
        chosen = {"predictor": "none", "residency": "lru", "prefill": "pipelined"} | {kind: "mine"}
        size = {"layers": 3, "experts": 4, "top_k": 2, "tokens": 6, "prompt_tokens": 3, "workers": 1, "slots": 4}
        with pytest.raises(SimulationError, match=rf"{kind} mine of mine.py: {method} (failed with|answered) "):
            simulate(profile="rtx3090-pcie3", **chosen, **size)


def test_a_policy_that_cannot_be_made_for_the_model_is_named(load: Any) -> None:
    load(of("residency", "{0: LRU(shape)}[shape.layers[-1]]"))
    with pytest.raises(ConfigError, match=r"^--residency mine of mine.py cannot be made for a model of 3 layers: Key"):
        strategy_of(SHAPE, SystemConfig("none", "mine"))


def test_a_host_that_is_a_generator_keeps_its_answer(load: Any) -> None:
    load(
        "class Own(DeviceOnly):\n    def host(self, missing, resident, costs, prefill):\n        yield from missing\n"
        + of("placement", "Own()")
    )
    placement = strategy_of(SHAPE, SystemConfig("none", placement="mine")).placement
    assert list(placement.host({1: 2, 3: 1}, {}, None, False)) == [1, 3]  # type: ignore[arg-type]


def test_a_failed_policy_fails_every_request_and_the_books_stay_whole(load: Any) -> None:
    load(
        f"class Bad(LRU):\n    def keeps(self, *args):\n        raise OSError('gone')\n{of('residency', 'Bad(shape)')}"
    )
    core = make_core(CoreConfig(SHAPE, 1, system=SystemConfig("none", "mine", prefill="pipelined")))
    core.handle(t.WorkerJoined(0, 2), 0.0)
    for request in (1, 2):
        core.handle(t.RequestOpened(request, 1), 0.0)
    core.handle(t.StepStarted((t.Pass(1, 0, 1, True), t.Pass(2, 0, 1, True))), 0.0)
    core.handle(t.GateFired(t.Visit(1, 0, 0), ((0, 1),)), 0.0)
    commands = core.handle(t.GateFired(t.Visit(2, 0, 0), ((0, 1),)), 0.0)
    failed = {one.request: one.reason for one in commands if isinstance(one, t.Fail)}
    assert failed == dict.fromkeys((1, 2), "--residency mine of mine.py: keeps failed with OSError: gone")
    core.validate()
