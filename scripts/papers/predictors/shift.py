"""What a shift of domain costs the token-wise predictor (SMOE Fig 3), and what learning while it runs gives back.

    .venv/bin/python -m scripts.papers.predictors.shift           # three models, a quarter of an hour
    .venv/bin/python -m scripts.papers.predictors.shift --quick

Transformers answers the measured prompts of each domain, greedily and past the end of sequence. Over the decoded tokens
the predictors are: the shipped one; one trained here as `odmoe train-predictor` does it, but on the training problems
alone; and each of them where it takes a step with each token (--predictor-learning-rate). Each answer begins with the
predictor as it was trained. In brackets: recall over the first and over the last quarter of the tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from checkpoint.prediction import token_predictor
from checkpoint.prediction.token_predictor import FILE, TokenPredictor, targets
from odmoe.commands.shared.whole_model import load_whole
from odmoe.text import load_tokenizer
from odmoe.training.domains import DOMAINS, training_prompts
from odmoe.training.observed_model import ObservedModel, Rows, hits
from odmoe.training.predictor_training import Weights, collect, fit, join_samples
from scripts.lib.bench import model_flags, parse_model_flags
from scripts.lib.experiment import Cell, Experiment
from scripts.lib.ledger import digest
from scripts.lib.prompts import measured_prompts
from scripts.lib.provenance import header
from scripts.lib.tables import Column, Row, text_table

VERSION = 1
MODELS = ("models/demo-moe", "models/fine-moe", "models/many-moe")
SHIPPED, PROBLEMS, SAME = "five domains (shipped)", "problems alone", "same experts again"
RATES = {SHIPPED: (1.0, 3.0), PROBLEMS: (0.1, 1.0, 3.0, 10.0)}
TRAINED_TOKENS, TRAINED_STEPS = 100, 300
"""As `odmoe train-predictor` has them."""
Right = list[float]
"""By decoded token: the share of the experts, over all layers, that was predicted."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model with the weights of its two predictors."""

    observed: ObservedModel
    tokenizer: Any
    shipped: Weights
    problems: Weights

    @classmethod
    def of(cls, path: str) -> Opened:
        observed, tokenizer = ObservedModel(load_whole(Path(path), "float32")), load_tokenizer(Path(path))
        shipped = token_predictor.load(Path(path) / FILE, observed.gates).weights
        asked = [tokenizer(text)["input_ids"] for text in training_prompts()["problems"]]
        samples = join_samples(collect(observed, asked, TRAINED_TOKENS, lambda *_: None))
        top_k = observed.shape.top_k
        learned = {layer: fit(rows, top_k, TRAINED_STEPS) for layer, rows in samples.items()}
        # No answer of what is measured shall end: each has as many tokens to learn from.
        observed.model.generation_config.eos_token_id = None
        return cls(observed, tokenizer, shipped, learned)


def recall(rows: Rows, weights: Weights | None) -> Right:
    """Of predicting each decoded token's experts from the token before it; the first one's from the prompt's last row.
    Without weights: that they are the same again."""
    at = rows.prompt
    shares = []
    for layer, inputs in rows.inputs.items():
        scores = rows.scores[layer] if weights is None else inputs @ weights[layer].T
        index = rows.index[layer]
        shares.append([hits(scores[n - 1 : n], index[n : n + 1]) / index.shape[1] for n in range(at, len(inputs))])
    return mean(shares)


def online(rows: Rows, weights: Weights, rate: float) -> Right:
    """As `recall`, with a step after each token, as main_node/engine/foresight.py takes it: from the row before the
    token, once its gate has fired."""
    predictor = TokenPredictor({layer: weight.clone() for layer, weight in weights.items()})
    at = rows.prompt
    shares = []
    for layer, inputs in rows.inputs.items():
        index, found = rows.index[layer], []
        wanted = targets(rows.scores[layer], index.shape[1])
        for n in range(at, len(inputs)):
            before = inputs[n - 1 : n]
            found.append(hits(predictor.scores(layer, before), index[n : n + 1]) / index.shape[1])
            predictor.learn(layer, before, wanted[n : n + 1], rate)
        shares.append(found)
    return mean(shares)


def mean(shares: list[Right]) -> Right:
    """Over layers, token by token."""
    return [sum(of) / len(of) for of in zip(*shares, strict=True)]


def measure(opened: Opened, domain: str, count: int, tokens: int) -> dict[str, list[Right]]:
    """Predictor -> each answer's recall."""
    asked = [opened.tokenizer(text)["input_ids"] for text in measured_prompts()[domain][:count]]
    with torch.inference_mode():
        answers = opened.observed.answers(asked, tokens, lambda _number: None)
        found = {
            SAME: [recall(one, None) for one in answers],
        }
        for name, weights in ((SHIPPED, opened.shipped), (PROBLEMS, opened.problems)):
            found[name] = [recall(one, weights) for one in answers]
            for rate in RATES[name]:
                found[f"{name}, learning at {rate:g}"] = [online(one, weights, rate) for one in answers]
    return {name: [[round(share, 4) for share in one] for one in of] for name, of in found.items()}


def rows_of(model: str, found: dict[str, dict[str, list[Right]]], chance: float) -> list[dict[str, Any]]:
    """`found`: domain -> predictor -> answers. A row a predictor, with its recall by domain: over all tokens and over
    the first and the last quarter."""
    made = []
    for name in next(iter(found.values())):
        row: dict[str, Any] = {"model": model, "predictor": name, "chance": chance}
        for domain, by_name in found.items():
            answers = by_name[name]
            quarter = max(1, len(answers[0]) // 4)
            row[domain] = average(answers)
            row[f"{domain} first"] = average([one[:quarter] for one in answers])
            row[f"{domain} last"] = average([one[-quarter:] for one in answers])
        made.append(row)
    return made


def average(answers: list[Right]) -> float:
    return sum(map(sum, answers)) / sum(map(len, answers))


def quarters(domain: str) -> Any:
    """A cell of the table: over all tokens, and from the first quarter to the last."""

    def text(row: Row) -> str:
        whole, first, last = (f"{100 * row[key]:.1f}" for key in (domain, f"{domain} first", f"{domain} last"))
        return f"{whole} ({first} to {last})"

    return text


COLUMNS = (
    Column("model", "model"),
    Column("predictor", "predictor"),
    *(Column(domain, quarters(domain)) for domain in DOMAINS),
)


def parse() -> Any:
    parser = model_flags(__doc__ or "", prompts=(6, 2), tokens=(256, 16), default=MODELS)
    args = parse_model_flags(parser)
    least = min(map(len, measured_prompts().values()))
    if args.prompts > least:
        raise SystemExit(f"--prompts is {args.prompts}; allowed: 1 to {least}, of each domain")
    return args


def main() -> int:
    args = parse()
    header(f"Token-wise predictors after a shift of domain, {args.prompts} prompts a domain x {args.tokens} tokens")
    torch.set_num_threads(1)
    texts = {domain: of[: args.prompts] for domain, of in measured_prompts().items()}
    rows = []
    with Experiment("shift", args, VERSION, {"rates": RATES, "trained": digest(training_prompts()["problems"])}) as run:
        for path in args.models:
            name, opened = Path(path).name, Opened.of(path)
            depends = {
                "gates": opened.observed.gates.digest(),
                "shipped": digest({layer: weight.tolist() for layer, weight in opened.shipped.items()}),
            }
            wanted = [
                Cell(
                    {"model": name, **depends, "domain": domain, "texts": digest(of), "tokens": args.tokens},
                    len(opened.observed.shape.layers) * args.prompts * args.tokens / 500,
                    ("checkpoint", "odmoe"),
                )
                for domain, of in texts.items()
            ]

            def answered(params: dict[str, Any], opened: Opened = opened) -> dict[str, Any]:
                return measure(opened, params["domain"], args.prompts, args.tokens)

            found = dict(zip(texts, run.all(wanted, answered), strict=True))
            rows += rows_of(name, found, opened.observed.shape.top_k / opened.observed.shape.experts)
        run.write(rows, prompts=args.prompts, tokens=args.tokens)
        print(text_table(COLUMNS, rows))
        print(f"written: {run.folder / run.name}.csv, .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
