"""How often predictors are right, by layer: Fate Table 1 and Fig 7, SMOE Fig 3, importance Fig 18.

    .venv/bin/python -m scripts.papers.prediction --model models/fine-moe
    .venv/bin/python -m scripts.papers.prediction --model models/demo-moe --quick

Transformers answers prompts of five domains in turns, greedily, in float32; what gates of later layers would say is
computed beside it, and the scheduler's own predictors (the same classes that a system runs) say what they make of it.
Accuracy is the part of the experts that a gate chose which was expected, over all decoded tokens. Fate's positions: 1,
what the attention before a gate got; 2, the gate input one MoE layer earlier; 3, what the attention one layer earlier
got. Iteration-wise: all later gates on the first MoE layer's gate input. Importance: with so many of a layer's
experts resident, those of the highest scores lately; top-score is an expert whose score is over (1 + alpha) times the
best that was not chosen. Written as prediction-MODEL.csv, .json, .png.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from checkpoint.prediction import token_predictor
from checkpoint.prediction.run_ahead import RunAhead
from checkpoint.prediction.token_predictor import FILE
from checkpoint.sharding.source import open_source
from odmoe.commands.shared.whole_model import load_whole
from odmoe.text import load_tokenizer
from odmoe.training.observed_model import ObservedModel, Pass, hits
from scheduler.policies.baselines.hobbit import Stacked
from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.predictors.gate_based import CrossLayer, NextLayer
from scheduler.policies.predictors.token_wise import TokenWise
from scheduler.policies.residency.scores import ScoreWindow
from scheduler.types import Visit
from scripts.lib.experiment import Cell, Experiment
from scripts.lib.flags import experiment_flags, parse_flags
from scripts.lib.ledger import digest
from scripts.lib.paths import DEMO
from scripts.lib.prompts import mixed_prompts
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table
from scripts.papers import prediction_show as show
from scripts.papers.prediction_count import Counts, replayed

VERSION = 1
SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of each layer's experts, resident ones, for the `attention` predictor."""
ALPHA = 0.1
"""Above which an expert is top-score; importance Table 3 finds up to 0.35 harmless."""


class Importance:
    """Next layer's attention and gate on what resident experts give, for several shares at once, within a pass."""

    def __init__(self, watched: ObservedModel) -> None:
        self.told: dict[tuple[float, int], torch.Tensor] = {}
        self._watched = watched
        self.replay = RunAhead(watched.model, watched.gates, lambda: watched.cache)
        self.begin()
        for layer, module in watched.experts.items():
            module.register_forward_pre_hook(self._hook(layer, module))

    def begin(self) -> None:
        """Another answer: what scored before it is forgotten."""
        self._scored = ScoreWindow(self._watched.shape)

    def _hook(self, layer: int, module: torch.nn.Module) -> Any:
        eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]

        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not self._watched.watching:
                return
            hidden, index, weights = args
            scores = self._watched.gates.scores(layer)
            if len(hidden) == 1:
                self._watched.watching = False
                for share in SHARES:
                    known = torch.isin(index, torch.tensor(self._resident(layer, share, scores.shape[1])))
                    said = self.replay.scores(layer, eager(module, hidden, index, weights * known))
                    if said is not None:
                        self.told[share, layer] = said
                self._watched.watching = True
            experts, counts = torch.unique(index, return_counts=True)
            named = dict(zip(experts.tolist(), counts.tolist(), strict=True))
            self._scored.on_gate_fired(Visit(0, 0, layer), named, rows(scores), False)

        return hook

    def _resident(self, layer: int, share: float, experts: int) -> list[int]:
        worth = self._scored.value[layer]
        return sorted(range(experts), key=lambda e: -worth[e])[: round(share * experts)]


def rows(scores: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, scores.tolist()))


def top_score(scores: torch.Tensor, top_k: int) -> set[int]:
    """The chosen ones of one row whose score is over (1 + ALPHA) times the best that was not chosen."""
    order = scores[0].topk(min(top_k + 1, scores.shape[1]))
    least = (1 + ALPHA) * float(order.values[top_k]) if scores.shape[1] > top_k else 0.0
    return {int(e) for e, v in zip(order.indices[:top_k], order.values, strict=False) if float(v) > least}


class Judge:
    """One answer: what each predictor expected against what came."""

    def __init__(self, watched: ObservedModel, importance: Importance, predictor: Any) -> None:
        self.counts = Counts()
        self.routes: list[dict[str, Any]] = []
        self._watched, self._importance, self._predictor = watched, importance, predictor
        shape = watched.shape
        self._gate, self._cross, self._stacked = NextGate(shape), CrossLayer(shape), Stacked(shape)
        self._attention, self._token = NextLayer(shape), TokenWise(shape)
        self._before: Pass | None = None

    def see(self, one: Pass) -> None:
        layers = self._watched.shape.layers
        self.routes.append(
            {"position": one.position, "tokens": one.tokens, "experts": [one.index[n].tolist() for n in layers]}
        )
        for first, layer in itertools.pairwise(layers):
            self._positions(one, first, layer)
        if one.tokens == 1:
            self._decoded(one)
        self._before = one
        self._importance.told.clear()

    def _positions(self, one: Pass, first: int, layer: int) -> None:
        """Fate's three, in prefill and in decoding."""
        stage = "decode" if one.tokens == 1 else "prefill"
        true, index = one.inputs[layer], one.index[layer]
        for number, given in enumerate((one.before[layer], one.inputs[first], one.before[first]), 1):
            cosine = torch.nn.functional.cosine_similarity(given, true, dim=-1)
            self.counts.mean(f"cosine {number} {stage}", layer, float(cosine.mean()), len(true))
            with torch.inference_mode():
                said = self._watched.gates.ranked_at(layer, given)
            self.counts.add(f"position {number} {stage} rows", layer, hits(said, index), index.numel(), index.numel())
            if stage == "prefill":
                expected = set(said.topk(index.shape[1]).indices.flatten().tolist())
                self._expected(f"position {number} prefill", layer, index, expected)

    def _decoded(self, one: Pass) -> None:
        layers, gates = self._watched.shape.layers, self._watched.gates
        visit = Visit(1, one.position, 0)
        told = self._importance.told
        with torch.inference_mode():
            for at, first in enumerate(layers):
                for depth, layer in enumerate(layers[at + 1 : at + 4], 1):
                    said = rows(gates.ranked_at(layer, one.inputs[first]))
                    of = visit._replace(layer=layer)
                    if depth == 1:
                        self._forecast("next-gate", self._gate, of, said, one)
                        self._forecast("cross-layer, 75th percentile", self._cross, of, said, one)
                    self._stacked.on_gate_fired(visit, {}, (), False)
                    self._forecast(f"stacked, {depth} ahead", self._stacked, of, said, one)
                of = visit._replace(layer=first)
                if at:
                    said = rows(gates.ranked_at(first, one.inputs[layers[0]]))
                    self._forecast("iteration-wise", self._gate, of, said, one)
                if self._predictor is not None and self._before is not None:
                    scores = self._predictor.scores(first, self._before.inputs[first][-1:])
                    self._forecast("token-wise", self._token, of, rows(scores), one)
            for (share, first), scores in told.items():
                layer = layers[layers.index(first) + 1]
                name = f"next-layer, {100 * share:.0f} % resident"
                self._forecast(name, self._attention, visit._replace(layer=layer), rows(scores), one)
                self._top_score(name, layer, scores, one)

    def _forecast(self, kind: str, predictor: Any, visit: Visit, scores: Any, one: Pass) -> None:
        for forecast in predictor.on_foreseen(visit, scores, (), False):
            self._expected(kind, visit.layer, one.index[visit.layer], set(forecast.experts))

    def _expected(self, kind: str, layer: int, index: torch.Tensor, expected: set[int]) -> None:
        named = set(index.flatten().tolist())
        self.counts.add(kind, layer, len(named & expected), len(named), len(expected))

    def _top_score(self, kind: str, layer: int, scores: torch.Tensor, one: Pass) -> None:
        """Of those predicted top-score: how many are, and how many are active at all."""
        top_k = one.index[layer].shape[1]
        predicted = top_score(scores, top_k)
        true, active = top_score(one.scores[layer], top_k), set(one.index[layer].flatten().tolist())
        self.counts.add(f"{kind}: top-score", layer, len(predicted & true), len(predicted), len(predicted))
        self.counts.add(f"{kind}: active", layer, len(predicted & active), len(predicted), len(predicted))


COLUMNS = (
    Column("predictor", "kind"),
    Column("accuracy", "value", ".4f"),
    Column("expected a layer", "expected", ".2f"),
)


def parse() -> Any:
    return parse_flags(experiment_flags(__doc__ or "", prompts=(20, 2), tokens=(80, 12), model=DEMO))


def main() -> int:
    args = parse()
    name = Path(args.model).name
    header(f"Predictors of {name}, {args.prompts} prompts x {args.tokens} tokens")
    torch.set_num_threads(1)
    watched = ObservedModel(load_whole(Path(args.model), "float32"), attentions=True)
    tokenizer = load_tokenizer(Path(args.model))
    importance = Importance(watched)
    file = Path(args.model) / FILE
    predictor = token_predictor.load(file, watched.gates) if file.is_file() else None
    if predictor is None:
        print(f"{file} is not there, so token-wise is left out; odmoe train-predictor {args.model} makes it")
    texts = [text for _, text in mixed_prompts(args.prompts, args.seed)]

    def measure(params: dict[str, Any]) -> dict[str, Any]:
        judge = Judge(watched, importance, predictor)
        importance.begin()
        for one in watched.answer(tokenizer(texts[params["prompt"]])["input_ids"], args.tokens):
            judge.see(one)
        return {"counts": judge.counts.plain(), "routes": judge.routes}

    depends = {
        "model": open_source(Path(args.model)).fingerprint,
        "alpha": ALPHA,
        "shares": SHARES,
        "token": None if predictor is None else digest({n: w.tolist() for n, w in predictor.weights.items()}),
    }
    cost = args.tokens * len(watched.shape.layers) / 64
    wanted = [
        Cell({"prompt": n, "text": digest(text), "tokens": args.tokens}, cost, ("scheduler", "checkpoint"))
        for n, text in enumerate(texts)
    ]
    with Experiment(f"prediction-{name}", args, VERSION, depends) as run:
        found = run.all(wanted, measure)
        counts = Counts.of([one["counts"] for one in found] + replayed(watched.shape, [one["routes"] for one in found]))
        table = counts.rows(watched.shape.layers)
        run.write(
            table,
            decoded=sum(len(one["routes"]) - 1 for one in found),
            experts=watched.shape.experts,
            top_k=watched.shape.top_k,
            alpha=ALPHA,
        )
        print(text_table(COLUMNS, [row for row in table if row["layer"] == "all"]))
        print(run.written([show.draw(run, counts, watched.shape, args, name)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
