"""What the main model tells beside its gates' choices: nothing of it stays, and rows that fewer experts compute."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import family as families
from checkpoint.dense import dispatch_experts
from checkpoint.gates import Gates
from checkpoint.prediction import token_predictor
from checkpoint.prediction.token_predictor import TokenPredictor
from main_node.engine.gate_watch import GateWatch
from main_node.engine.layer import LayerWork
from main_node.engine.prediction_trial import PredictionTrial
from scheduler import types as t
from scheduler.build import make_core
from scheduler.policies.strategy import Strategy
from support.models.families import build_dispatching
from support.scheduling.scenarios import core_config_of
from wire.lent_threads import LentThreads

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60]


@pytest.fixture
def model() -> Any:
    """A tiny Mixtral with random weights, whose experts are computed by `dispatch_experts`; new, since watches leave
    their hooks."""
    return build_dispatching("mixtral")


def shape_of(model: Any) -> t.ModelShape:
    return t.ModelShape(tuple(families.experts_modules(model)), 8, model.config.num_experts_per_tok)


def strategy(model: Any, **names: str) -> Strategy:
    return make_core(core_config_of(shape_of(model), 2, **names)).strategy  # type: ignore[arg-type]


def eager(model: Any, layer: int, *rows: torch.Tensor) -> torch.Tensor:
    module = families.experts_modules(model)[layer][1]
    found: torch.Tensor = type(module).forward.__wrapped__(module, *rows)  # type: ignore[attr-defined]
    return found


def passing(model: Any, watch: GateWatch, seen: Callable[[t.Visit, LayerWork], None]) -> None:
    """A prefill whose layers are watched, as the engine does it."""

    def experts_of(layer: int) -> Any:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            visit, work = t.Visit(1, 0, layer), LayerWork(hidden, index, weights, LentThreads())
            watch.keep_scores(visit, work)
            seen(visit, work)
            list(watch.ahead(visit, work))
            return eager(model, layer, hidden, index, weights)

        return experts

    dispatch_experts(model, experts_of)
    with torch.inference_mode():
        model(input_ids=torch.tensor([PROMPT]), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("names", [{"router": "skip"}, {"predictor": "next-gate"}, {"predictor": "next-layer"}])
def test_of_what_gates_said_nothing_is_held_once_their_layer_is_over(model: Any, names: dict[str, str]) -> None:
    said: list[weakref.ref[torch.Tensor]] = []
    gates = [module for path, module in model.named_modules() if path.endswith("mlp.gate")]
    assert len(gates) == len(shape_of(model).layers)

    def hear(_module: Any, _args: Any, out: tuple[torch.Tensor, ...]) -> None:
        said.append(weakref.ref(out[0]))

    watch = GateWatch(model, strategy(model, **names), shape_of(model), lambda: None, None)
    handles = [gate.register_forward_hook(hear) for gate in gates]
    passing(model, watch, lambda visit, work: None)
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(said) == len(gates)
    assert [one for one in said if one() is not None] == []


def test_a_row_that_fewer_experts_compute_is_sent_to_each_of_them_once(model: Any) -> None:
    """Of several rows some do with one expert: as many rows as the scheduler counts, and eager's sum."""
    found: list[int] = []

    def reroute(visit: t.Visit, work: LayerWork) -> None:
        chosen = tuple(row[:1] if number % 2 else row for number, row in enumerate(work.chosen))
        wanted = torch.zeros_like(work.hidden)
        scores = torch.tensor(work.scores)
        work.route(chosen, ())
        assert work.rows == tuple(sorted(Counter(e for row in chosen for e in row).items()))
        for call, (expert, count) in enumerate(work.rows):
            command = t.Compute(0, 0, t.ExpertId(visit.layer, expert), call, visit, 0, count, False)
            hidden, weights = work.rows_of(command)
            output = eager(model, visit.layer, hidden, torch.full((count, 1), expert), weights[:, None])
            work.keep(command, output)
        for number, row in enumerate(chosen):  # a Mixtral's weights sum up to 1, whoever computes
            index, one = torch.tensor([row]), scores[number, list(row)]
            wanted[number] = eager(model, visit.layer, work.hidden[number][None], index, (one / one.sum())[None])[0]
        assert torch.allclose(work.combine(), wanted, atol=1e-5)
        found.append(visit.layer)

    passing(model, GateWatch(model, strategy(model, router="skip"), shape_of(model), lambda: None, None), reroute)
    assert found == list(shape_of(model).layers)


def test_a_predictors_weights_count_as_memory(model: Any, tmp_path: Path) -> None:
    gates, layers = Gates(model), shape_of(model).layers
    hidden = model.config.hidden_size
    token_predictor.save(TokenPredictor({n: torch.zeros(8, hidden) for n in layers}), gates, tmp_path / "weights")
    made = strategy(model, predictor="token-wise")
    watch = GateWatch(model, made, shape_of(model), lambda: None, tmp_path / "weights")
    assert watch.nbytes == len(layers) * 8 * hidden * 4
    assert GateWatch(model, strategy(model, router="skip"), shape_of(model), lambda: None, None).nbytes == 0


def test_a_trial_leaves_out_what_decoding_predicts_and_not_what_a_prompt_does(model: Any) -> None:
    trial = PredictionTrial(weighs=True)
    made = strategy(model, predictor="next-gate")
    watch = GateWatch(model, made, shape_of(model), lambda: None, None, trial=trial)

    def told(rows: int) -> int:
        hidden = torch.ones(rows, model.config.hidden_size)
        work = LayerWork(hidden, torch.tensor([[1, 2]] * rows), torch.ones(rows, 2), LentThreads())
        return len(list(watch.ahead(t.Visit(1, 0, 0), work)))

    assert (told(1), told(3)) == (1, 1)
    trial.predicts = False
    assert (told(1), told(3)) == (0, 1)
