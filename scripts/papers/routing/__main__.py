"""What gates choose: scores, reuse, popularity. Importance Figs 4 and 11, SMOE Figs 5 and 6, Fate Fig 8.

    .venv/bin/python -m scripts.papers.routing                                   # the models in models/, some minutes
    .venv/bin/python -m scripts.papers.routing --models models/fine-moe --quick

Transformers answers prompts of five kinds of text greedily. Counted are decoded tokens: what share of its scores a gate
gives to each rank (the highest score is rank 1), how often the next token uses the expert of each rank, how much of all
uses falls on the quarter of a layer's experts that is used most, in all texts and in those of one kind, and how many
experts are top-score (over 1.1 times the best that was not chosen).
"""

from __future__ import annotations

import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch

from checkpoint.sharding.source import open_source
from odmoe.commands.shared.whole_model import load_whole
from odmoe.text import load_tokenizer
from odmoe.training.observed_model import ObservedModel
from scripts.lib.bench import model_flags, parse_model_flags
from scripts.lib.experiment import Cell, Experiment
from scripts.lib.ledger import digest
from scripts.lib.prompts import mixed_prompts
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table
from scripts.papers.routing import show
from scripts.papers.routing.counts import Layer, counted, figures

VERSION = 1
MODELS = ("models/many-moe", "models/fine-moe", "models/demo-moe", "models/deep-moe")
COLUMNS = (
    Column("model", "model"),
    Column("layer", "layer"),
    Column("first rank, of the chosen scores", "first", ".0%"),
    Column("last chosen", "last_chosen", ".0%"),
    Column("best not chosen", "best_left", ".0%"),
    Column("top-score experts", "top_score", ".1f"),
    Column("used again: first rank", "reused_first", ".0%"),
    Column("last chosen", "reused_last_chosen", ".0%"),
    Column("best not chosen", "reused_best_left", ".0%"),
    Column("chance", lambda row: row["top_k"] / row["experts"], ".0%"),
    Column("uses of the most used quarter", "popular", ".0%"),
    Column("in one kind of text", "popular_in_domain", ".0%"),
)


class Watched:
    """A model, opened when it is first asked."""

    def __init__(self, path: Path) -> None:
        self.model = ObservedModel(load_whole(path, "float32"))
        self.tokenizer = load_tokenizer(path)

    def answer(self, text: str, tokens: int) -> dict[str, Any]:
        """By layer what is counted, and what a middle layer's gate chose."""
        shape = self.model.shape
        middle = shape.layers[len(shape.layers) // 2]
        scores, chosen = [], []
        for one in self.model.answer(self.tokenizer(text)["input_ids"], tokens):
            if one.tokens == 1:
                scores.append({layer: of[0].tolist() for layer, of in one.scores.items()})
                chosen.append(one.index[middle][0].tolist())
        layers = counted(scores, shape.experts, shape.top_k)
        counts = {str(layer): of.plain() for layer, of in layers.items()}
        return {"layers": counts, "chosen": chosen, "experts": shape.experts, "top_k": shape.top_k}


def rows(name: str, results: list[dict[str, Any]], domains: list[str]) -> list[dict[str, Any]]:
    """One of all layers, then one a layer."""
    of = {"model": name, "experts": results[0]["experts"], "top_k": results[0]["top_k"]}
    known = [(domain, one["layers"]) for domain, one in zip(domains, results, strict=True) if one["layers"]]
    found = []
    for layer in known[0][1]:
        by_answer = [(domain, Layer(**layers[layer])) for domain, layers in known]
        whole = reduce(add, (one for _, one in by_answer))
        kinds = [
            reduce(add, (one for kind, one in by_answer if kind == domain)).used
            for domain in dict.fromkeys(dict(by_answer))
        ]
        found.append({**of, "layer": layer, **figures(whole, kinds, of["top_k"])})
    return [{**of, "layer": "all", **mean(found)}, *found]


def mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all layers: of numbers, and of lists place by place; `used` is of a layer alone."""
    made: dict[str, Any] = {}
    for name, value in found[0].items():
        if isinstance(value, list) and name != "used":
            made[name] = [sum(values) / len(found) for values in zip(*(row[name] for row in found), strict=True)]
        elif isinstance(value, float):
            made[name] = sum(row[name] for row in found) / len(found)
    return made


def parse() -> Any:
    parser = model_flags(__doc__ or "", prompts=(20, 5), tokens=(64, 12), default=MODELS)
    return parse_model_flags(parser)


def main() -> int:
    args = parse()
    header(f"What gates choose: {args.prompts} prompts x {args.tokens} tokens")
    torch.set_num_threads(1)
    texts = mixed_prompts(args.prompts, args.seed)
    opened: dict[str, Watched] = {}

    def measure(params: dict[str, Any]) -> dict[str, Any]:
        if params["path"] not in opened:
            opened.clear()
            opened[params["path"]] = Watched(Path(params["path"]))
        return opened[params["path"]].answer(texts[params["prompt"]][1], args.tokens)

    with Experiment("routing", args, VERSION, {}) as run:
        found, routes = [], {}
        for path in args.models:
            of = {"path": path, "weights": open_source(Path(path)).fingerprint, "tokens": args.tokens}
            cells = [
                Cell({**of, "prompt": n, "text": digest(text)}, args.tokens / 16, ("checkpoint",))
                for n, (_, text) in enumerate(texts)
            ]
            results = run.all(cells, measure)
            name = Path(path).name
            found += rows(name, results, [domain for domain, _ in texts])
            routes[name] = max((one["chosen"] for one in results), key=len)
        run.write(found)
        print(text_table(COLUMNS, found))
        print(run.written([run.save(show.draw(found, routes, args.prompts))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
