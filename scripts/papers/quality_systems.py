"""What approximate systems cost in answers: by alpha of the expert-cache router, and by the form experts are loaded in.

    .venv/bin/python -m scripts.papers.quality_systems           # alpha 0 to 0.6 as Table 3 of importance, and forms
    .venv/bin/python -m scripts.papers.quality_systems --quick   # some minutes
    .venv/bin/python -m scripts.papers.quality_systems --alphas 0 0.3 --forms full --models models/demo-moe

Tokens that are the same as those of Transformers with all experts, final answers of GSM8K problems, and perplexity.
An answer of these systems depends on what is resident, so perplexity is that of the engine: half of each window is
taken as a prompt, the rest is forced on it, a decode pass a token. Every figure is of a cluster begun for it. The
difference to Transformers in nats is paired, token by token; +- is its standard error times 1.96.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

from odmoe.quality.passages import losses, perplexity, windows
from odmoe.quality.readers import forced_logits, until_end
from odmoe.quality.tasks import final_answer
from scripts.lib import quality
from scripts.lib.bench import Bench, parse_system_flags, system_flags
from scripts.lib.clusters import KeptCluster, answer
from scripts.lib.experiment import Cell, Experiment
from scripts.lib.flags import positive
from scripts.lib.plots import AMBER, BLUE, DARK, RED, canvas
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

VERSION = 1
TRANSFORMERS = "Transformers"
ALPHAS = tuple(n / 20 for n in range(13))
FORMS = ("full", "int4", "int2", "popular", "mixed")
QUICK_ALPHAS, QUICK_FORMS = (0.0, 0.3, 0.6), ("full", "int4", "popular")
BOUND = 0.01
"""Of perplexity, up to alpha 0.3."""


def variants(args: Any) -> dict[str, dict[str, Any]]:
    """Importance with each alpha; a system that differs from an exact one in the form alone."""
    plain = {"system": "mixtral-offloading", "predictor": "none"}
    return {f"alpha {alpha:g}": {"system": "importance", "alpha": alpha} for alpha in args.alphas} | {
        f"form {form}": plain | {"precision": form} for form in args.forms
    }


def plan(bench: Bench, args: Any) -> list[Cell]:
    """Transformers first; of each variant both parts."""
    wanted = []
    for model in args.models:
        of = {**bench.identity(model), "path": model, "dtype": args.dtype}
        answers = {"part": "answers", "problems": args.problems, "tokens": args.tokens}
        text = {"part": "perplexity", "text_tokens": args.text_tokens, "window": args.window}
        passes = args.problems * args.tokens
        for name, settings in {TRANSFORMERS: {}, **bench.variants}.items():
            more = {} if name == TRANSFORMERS else {"budget": args.budget, **settings}
            second = 0.01 if name == TRANSFORMERS else 0.06
            wanted += [
                Cell({**of, "variant": name, **more, **answers}, second * passes),
                Cell({**of, "variant": name, **more, **text}, second * args.text_tokens / 2),
            ]
    return wanted


class Measure:
    """Computes any cell, on a cluster of its own."""

    def __init__(self, bench: Bench, args: Any) -> None:
        self._bench, self._args = bench, args

    def __call__(self, params: dict[str, Any]) -> dict[str, Any]:
        model, variant = params["path"], params["variant"]
        if variant == TRANSFORMERS:
            peer = self._bench.peer(model)
            if params["part"] == "answers":
                return {"token_ids": [peer.answer(ids, self._args.tokens).token_ids for ids in self._asked(model)]}
            return self._scored(model, lambda window, given: peer.logits(window)[given - 1 :])
        with KeptCluster(self._bench.opened(model)[0]) as kept:
            cluster = kept.cluster(self._bench.settings(model, variant, self._args.budget))
            if params["part"] == "answers":
                reports = [answer(cluster, ids, self._args.tokens) for ids in self._asked(model)]
                hits = sum(one.hits for one in reports) / sum(one.named for one in reports)
                return {"token_ids": [one.token_ids for one in reports], "exact": reports[0].exact, "hit_rate": hits}
            return self._scored(model, lambda window, given: forced_logits(cluster, window, given))

    def _asked(self, model: str) -> list[list[int]]:
        tokenizer = self._bench.opened(model)[1]
        return [tokenizer(text)["input_ids"] for text, _ in quality.problems(self._args.problems)]

    def _scored(self, model: str, logits: Any) -> dict[str, Any]:
        """Nats of each token of the second half of each window."""
        ids = quality.held_out(self._bench.opened(model)[1], self._args.text_tokens)
        nats: list[float] = []
        for window in windows(ids, self._args.window):
            given = len(window) // 2
            if given:
                nats += losses(logits(window, given), window[given - 1 :])
        return {"nats": nats}


def rows(wanted: list[Cell], results: list[dict[str, Any]], bench: Bench, args: Any) -> list[Any]:
    """One row a model and variant."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    paths = {}
    for one, result in zip(wanted, results, strict=True):
        found.setdefault((one.params["model"], one.params["variant"]), {})[one.params["part"]] = result
        paths[one.params["model"]] = one.params["path"]
    made = []
    for (model, variant), parts in found.items():
        truth = found[model, TRANSFORMERS]
        tokens, theirs = parts["answers"]["token_ids"], truth["answers"]["token_ids"]
        same, total = quality.agreement(tokens, theirs)
        mine, solved = _finals(bench.opened(paths[model])[1], tokens), quality.problems(args.problems)
        finals = _finals(bench.opened(paths[model])[1], theirs)
        right = sum(a is not None and a == final_answer(b) for a, (_, b) in zip(mine, solved, strict=True))
        made.append(
            {
                "model": model,
                "variant": variant,
                "exact": parts["answers"].get("exact", True),
                "hit_rate": parts["answers"].get("hit_rate"),
                "same_tokens": same,
                "tokens": total,
                "same_until": statistics.mean(_alike(a, b) for a, b in zip(tokens, theirs, strict=True)),
                "right_answers": right,
                "problems": len(solved),
                "same_answers": sum(a == b for a, b in zip(mine, finals, strict=True)),
                **_perplexity(parts["perplexity"]["nats"], truth["perplexity"]["nats"]),
            }
        )
    return made


def _finals(tokenizer: Any, answers: list[list[int]]) -> list[Any]:
    ends = {tokenizer.eos_token_id}
    texts = [tokenizer.decode(until_end(one, ends), skip_special_tokens=True) for one in answers]
    return [final_answer(text) for text in texts]


def _alike(a: list[int], b: list[int]) -> int:
    """Tokens until the first that differs."""
    return next((n for n, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def _perplexity(nats: list[float], truth: list[float]) -> dict[str, Any]:
    more = [a - b for a, b in zip(nats, truth, strict=True)]
    error = 1.96 * statistics.stdev(more) / math.sqrt(len(more))
    return {
        "perplexity": perplexity(nats),
        "scored_tokens": len(nats),
        "perplexity_ratio": math.exp(statistics.mean(more)),
        "ratio_error": error,
    }


def finding(rows: list[dict[str, Any]]) -> list[str]:
    """Whether alpha up to 0.3 costs at most 1 % of perplexity, as far as so few tokens can say."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        few = [
            row for row in rows if row["model"] == model and row["variant"].startswith("alpha") and _alpha(row) <= 0.3
        ]
        if not few:
            continue
        over = [row for row in few if row["perplexity_ratio"] - 1 > BOUND]
        most = max(few, key=lambda row: float(row["perplexity_ratio"]))
        said = ", ".join(
            f"{row['perplexity_ratio'] - 1:+.2%} +- {row['ratio_error']:.2%} at {_alpha(row):g}"
            for row in over or [most]
        )
        what = "costs more than" if over else "costs at most"
        text = f"{model}: alpha up to 0.3 {what} {BOUND:.0%} of perplexity: {said}"
        sure = not over and all(row["perplexity_ratio"] - 1 + row["ratio_error"] <= BOUND for row in few)
        sure |= any(row["perplexity_ratio"] - 1 - row["ratio_error"] > BOUND for row in over)
        found.append(text if sure else f"{text}; too few tokens to be sure")
    return found


def _alpha(row: dict[str, Any]) -> float:
    return float(row["variant"].split()[1])


COLUMNS = (
    Column("model", "model"),
    Column("variant", "variant"),
    Column("tokens", lambda row: row["same_tokens"] / row["tokens"], ".1%"),
    Column("until", "same_until", ".1f"),
    Column("finals", lambda row: f"{row['same_answers']}/{row['problems']}", ">"),
    Column("right", "right_answers", "d"),
    Column("perplexity", "perplexity", ".3f"),
    Column("more", lambda row: row["perplexity_ratio"] - 1, "+.2%"),
    Column("+-", "ratio_error", ".2%"),
    Column("hit rate", "hit_rate", ".1%"),
)


def picture(rows: list[dict[str, Any]], args: Any) -> Any:
    """Left by alpha, right by form; of each model perplexity above, what is the same as Transformers' beneath."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = canvas(
        10.5, 4.6 * len(names) + 0.7, 2 * len(names), 2, sharex="col", sharey="row", width_ratios=(3, 2)
    )
    for m, model in enumerate(names):
        mine = [row for row in rows if row["model"] == model and row["variant"] != TRANSFORMERS]
        alphas = [row for row in mine if row["variant"].startswith("alpha")]
        forms = [row for row in mine if row["variant"].startswith("form")]
        above, below = panels[4 * m : 4 * m + 2], panels[4 * m + 2 : 4 * m + 4]
        for place, (of, at, style) in enumerate(
            ((alphas, [_alpha(row) for row in alphas], "-"), (forms, list(range(len(forms))), "none"))
        ):
            _more(above[place], of, at, style)
            _same(below[place], of, at, style)
        above[0].set_title(f"{model}: importance, device memory {args.budget} % of the experts", fontsize=10)
        above[1].set_title(f"{model}: experts in smaller forms, LRU", fontsize=10)
        above[0].set_ylabel("perplexity: more than\nTransformers', %")
        below[0].set_ylabel("as Transformers, %")
        below[0].legend(fontsize=8, loc="best", framealpha=0.85, edgecolor="none")
        below[0].set_xlabel("alpha of the expert-cache router")
        below[1].set_xticks(range(len(forms)), [row["variant"].removeprefix("form ") for row in forms])
        below[1].set_xlabel("form in which experts are loaded")
    figure.suptitle(
        f"What approximation costs: {rows[0]['scored_tokens']} forced tokens, {rows[0]['problems']} GSM8K "
        f"answers of {args.tokens} tokens",
        fontsize=11,
    )
    return figure


def _more(panel: Any, rows: list[dict[str, Any]], at: list[float], style: str) -> None:
    more = [100 * (row["perplexity_ratio"] - 1) for row in rows]
    error = [100 * row["ratio_error"] for row in rows]
    panel.axhline(0, color=DARK, lw=0.8)
    panel.axhline(100 * BOUND, color=RED, lw=1, ls=":")
    panel.errorbar(at, more, error, color=RED, ls=style, marker="o", ms=5, capsize=3, lw=1.6)


def _same(panel: Any, rows: list[dict[str, Any]], at: list[float], style: str) -> None:
    for key, of, colour, mark, label in (
        ("same_tokens", "tokens", BLUE, "s", "tokens"),
        ("same_answers", "problems", AMBER, "^", "final answers"),
    ):
        shares = [100 * row[key] / row[of] for row in rows]
        panel.plot(at, shares, color=colour, ls=style, marker=mark, ms=6, lw=1.5, label=label)
    panel.set_ylim(0, 104)


def parse() -> Any:
    parser = system_flags(__doc__ or "", prompts=(1, 1), tokens=(96, 24), budgets=(25,))
    parser.add_argument("--alphas", type=float, nargs="*", help="0 to 0.6 in steps of 0.05 unless said")
    parser.add_argument("--forms", nargs="*", choices=FORMS, help="all unless said")
    parser.add_argument("--problems", type=positive, help="of GSM8K; 12 unless said")
    parser.add_argument("--text-tokens", type=positive, help="of held-out text; 1024 unless said")
    parser.add_argument("--window", type=positive, default=128, help="tokens, half of them scored together")
    parser.get_default("sizes").update(problems=(12, 2), text_tokens=(1024, 256))
    args = parse_system_flags(parser)
    args.alphas = list(QUICK_ALPHAS if args.quick else ALPHAS) if args.alphas is None else args.alphas
    args.forms = list(QUICK_FORMS if args.quick else FORMS) if args.forms is None else args.forms
    args.budget = args.budgets[0]
    if len(args.budgets) > 1:
        parser.error("--budgets is one here")
    if args.window < 4 or args.text_tokens < 8:
        parser.error("--window must be at least 4, --text-tokens at least 8")
    return args


def main() -> int:
    args = parse()
    header(f"What approximation costs, device memory {args.budget} % of the experts")
    with Bench(args, variants(args)) as bench:
        note = f"one worker, device memory {args.budget} % of the experts; {args.dtype}"
        with Experiment("quality_systems", args, VERSION, {}, note) as run:
            wanted = plan(bench, args)
            found = rows(wanted, run.all(wanted, Measure(bench, args)), bench, args)
            said = finding(found)
            run.write(found, finding=said)
            print(text_table(COLUMNS, found))
            print("\n".join(said))
            print(run.written([run.save(picture(found, args))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
