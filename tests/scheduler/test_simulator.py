"""The core on a virtual clock, against the figures that the OD-MoE paper reports for its testbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.profile import Profile, load_profile
from scheduler.simulator import Outcome, Simulator, predictor, random_routes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(ROOT / "scheduler" / "profiles" / "rtx3090-1gbe.yaml")


def decode(profile: Profile, periods: tuple[int, int], recall: float | None, tokens: int = 60) -> Outcome:
    routes = random_routes(profile, 0)
    predict = None if recall is None else predictor(profile, routes, recall, 1)
    return Simulator(profile, Alignment(*periods), tokens, routes, predict).run()


def test_the_papers_policy_decodes_at_the_papers_speed(profile: Profile) -> None:
    """Table 2: 3.69 tokens/s with an INT8 shadow (recall 97.34 %) aligned every token."""
    assert decode(profile, (1, 1), 0.9734).tokens_per_s == pytest.approx(3.69, rel=0.10)


def test_the_cases_of_figure_8_come_in_order(profile: Profile) -> None:
    """Aligned, never aligned (average recall ~45 %), random prefetch (~25 %), load after routing."""
    speeds = [decode(profile, (p, p), recall).tokens_per_s for p, recall in [(1, 0.97), (0, 0.45), (0, 0.25)]]
    speeds.append(decode(profile, (1, 1), None).tokens_per_s)
    assert speeds == sorted(speeds, reverse=True)


def test_load_after_routing_costs_exactly_what_the_profile_says(profile: Profile) -> None:
    """No prediction: every layer waits for its gate, a load, both hops and one expert."""
    p = profile
    layer_s = p.main_layer_s + max(p.load_s, p.hop_s) + p.expert_s + p.hop_s
    outcome = decode(profile, (1, 1), None, tokens=5)
    assert outcome.token_s == pytest.approx([n * p.layers * layer_s for n in range(1, 6)])
    assert outcome.ledger.reloads == 5 * p.layers * p.top_k


def test_perfect_foresight_stalls_by_what_equation_1_lacks(profile: Profile) -> None:
    """Once running, a layer cannot take less than its group's load and computation allow: 4 layers a round."""
    p = profile
    outcome = decode(profile, (0, 0), 1.0, tokens=40)
    round_s = p.load_s + p.hop_s + p.expert_s + p.main_layer_s + p.hop_s
    free_s = 4 * (p.main_layer_s + p.expert_s + 2 * p.hop_s)
    steady = (outcome.token_s[-1] - outcome.token_s[9]) / 30 / p.layers * 4
    assert free_s <= steady <= round_s
    assert outcome.ledger.overall.recall == 1.0


def test_late_departure_shows_in_the_first_layers_only(profile: Profile) -> None:
    """Fig 5: aligned every token, the first layers' predictions come after their gates."""
    outcome = decode(profile, (1, 1), 1.0, tokens=20)
    assert outcome.ledger.late > 0
    assert outcome.ledger.late <= 3 * 20


def test_same_seed_same_spans(profile: Profile) -> None:
    assert decode(profile, (1, 1), 0.9, 5).spans == decode(profile, (1, 1), 0.9, 5).spans


@pytest.mark.parametrize(
    ("text", "says"),
    [("name: x\n", "lacks"), ("[1, 2", "cannot be read"), ("3", "form")],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_profile(file)


def test_a_negative_duration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        (ROOT / "scheduler" / "profiles" / "rtx3090-1gbe.yaml").read_text().replace("load_ms: 25.0", "load_ms: -1")
    )
    with pytest.raises(ConfigError, match="load_ms is -1"):
        load_profile(file)
