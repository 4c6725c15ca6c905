"""Recall of the predictions: OD-MoE Fig 3 (by token, equation (2)) and Fig 6 (over alignment periods, equation (3)).

    .venv/bin/python -m scripts.papers.recall                # models/deep-moe, half an hour
    .venv/bin/python -m scripts.papers.recall --quick        # a minute
    .venv/bin/python -m scripts.papers.recall --model models/demo-moe --prompts 20 --tokens 64 --figures 3

Fig 3: each precision of the shadow, aligned in token and KV rows, in one of them, in none; and predictors that are no
shadow. Fig 6: periods 1, 2, 4, 8, 16 of the token with KV rows aligned every token, of the KV rows with the token
aligned every token, and of both; on the first half of the prompts. Greedy answers of a real cluster in this process,
which end where the model ends them; an answer that has ended does not count any more, as the equations say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from main_node.shape import model_shape
from odmoe.settings.settings import Settings
from odmoe.text import encode
from scheduler.alignment import LATE
from scripts.lib import recorded_runs
from scripts.lib.clusters import KeptCluster, open_model, predicted
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import SHADOWS, common_flags, experiment_flags, parse_flags
from scripts.lib.ledger import digest
from scripts.lib.plots import AMBER, BLUE, DARK, PALE, PURPLE, RED, canvas
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

VERSION = 2
ALIGNMENTS = {"token and KV": (1, 1), "token only": (1, 0), "KV only": (0, 1), "unaligned": (0, 0)}
LOOKS = {"token and KV": (BLUE, "-"), "token only": (AMBER, "-"), "KV only": (PURPLE, "--"), "unaligned": (RED, "-")}
PREDICTORS = {"random": (DARK, ":")}
"""Predictors that are no shadow, by their settings' name, and how they are drawn."""
PERIODS = (1, 2, 4, 8, 16)
SERIES = {
    "token period (KV rows every token)": (AMBER, "o", lambda p: (p, 1)),
    "KV period (token every token)": (BLUE, "s", lambda p: (1, p)),
    "both": (RED, "^", lambda p: (p, p)),
}


def cell(args: Any, index: int, shadow: str, token: int, kv: int, predictor: str = "sep") -> Cell:
    """One answer."""
    return Cell(
        {
            "prompt": index,
            "text": digest(gsm8k_prompts(index + 1)[index]),
            "tokens": args.tokens,
            "shadow": shadow,
            "token": token,
            "kv": kv,
            "predictor": predictor,
        },
        args.tokens / recorded_runs.TOKENS_PER_S,
    )


def fig3(args: Any) -> list[Cell]:
    kinds = [(shadow, *periods) for shadow in args.shadows for periods in ALIGNMENTS.values()]
    found = [cell(args, n, *kind) for kind in kinds for n in range(args.prompts)]
    return found + [cell(args, n, "none", 0, 0, name) for name in args.predictors for n in range(args.prompts)]


def fig6(args: Any) -> list[Cell]:
    pairs = dict.fromkeys(periods(p) for _, _, periods in SERIES.values() for p in PERIODS)
    few = range(max(1, args.prompts // 2))
    return [cell(args, n, shadow, *pair) for shadow in args.shadows for pair in pairs for n in few]


def by_token(curves: Iterable[list[float | None]]) -> list[float]:
    """Equation (2): the mean over the prompts that have a token there. `curves`: each prompt's recall by token."""
    curves = list(curves)
    columns = [[c[n] for c in curves if n < len(c)] for n in range(max(map(len, curves), default=0))]
    return [sum(known) / len(known) for column in columns if (known := [v for v in column if v is not None])]


def overall(curves: Iterable[list[float | None]]) -> float:
    """Equation (3): over all tokens of all prompts."""
    known = [v for curve in curves for v in curve if v is not None]
    return sum(known) / len(known)


class Found:
    """Every cell's result, and the means of them."""

    def __init__(self, wanted: list[Cell], results: list[dict[str, Any]]) -> None:
        self._by_kind: dict[tuple[str, int, int, str], list[tuple[int, list[float | None]]]] = {}
        for one, result in zip(wanted, results, strict=True):
            p = one.params
            kind = (p["shadow"], p["token"], p["kv"], p["predictor"])
            self._by_kind.setdefault(kind, []).append((p["prompt"], result["by_token"]))

    def curves(self, *kind: Any, prompts: int) -> list[list[float | None]]:
        return [curve for index, curve in self._by_kind[kind] if index < prompts]

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind, over all the prompts that it was measured on."""
        return [
            {
                "shadow": shadow,
                "token_period": token,
                "kv_period": kv,
                "predictor": predictor,
                "prompts": len(of),
                "recall": overall(c for _, c in of),
                "by_token": by_token(c for _, c in of),
            }
            for (shadow, token, kv, predictor), of in self._by_kind.items()
        ]


COLUMNS = (
    Column("predictor", lambda row: row["shadow"] if row["predictor"] == "sep" else row["predictor"]),
    Column("token every", lambda row: row["token_period"] if row["predictor"] == "sep" else None, "d"),
    Column("KV every", lambda row: row["kv_period"] if row["predictor"] == "sep" else None, "d"),
    Column("recall", "recall", ".4%"),
    Column("prompts", "prompts", "d"),
)


def draw_fig3(run: Experiment, found: Found, args: Any, chance: float) -> Any:
    figure, panels = canvas(max(6.4, 4.4 * len(args.shadows)), 4.1, 1, len(args.shadows), sharey=True)
    for panel, shadow in zip(panels, args.shadows, strict=True):
        for name, periods in ALIGNMENTS.items():
            _curve(panel, found.curves(shadow, *periods, "sep", prompts=args.prompts), name, *LOOKS[name])
        for name in args.predictors:
            _curve(panel, found.curves("none", 0, 0, name, prompts=args.prompts), name, *PREDICTORS[name])
        panel.axhline(100 * chance, color=PALE, lw=0.9, zorder=0, label=f"chance {100 * chance:.2f} %")
        panel.set_title(f"{shadow.upper()} shadow", fontsize=10)
        panel.set_xlabel("decoded token", fontsize=9)
        panel.set_ylim(0, 103)
        panel.set_xlim(1, None)
        panel.legend(
            fontsize=7.5,
            title="aligned every token (equation (3))",
            title_fontsize=7.5,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
        )
    panels[0].set_ylabel("recall, %", fontsize=9)
    figure.suptitle(f"Recall by token (Fig 3), mean of {plural(args.prompts, 'prompt')}", fontsize=11)
    return run.save(figure, "-fig3")


def _curve(panel: Any, curves: list[list[float | None]], name: str, colour: str, style: str) -> None:
    curve = [100 * v for v in by_token(curves)]
    label = f"{name} {100 * overall(curves):.2f} %"
    thick = 2.6 if name == "token and KV" else 1.4  # seen beneath another that is as good
    panel.plot(range(1, len(curve) + 1), curve, color=colour, ls=style, lw=thick, label=label)


def draw_fig6(run: Experiment, found: Found, args: Any) -> Any:
    few = max(1, args.prompts // 2)
    figure, panels = canvas(max(6.4, 4.4 * len(args.shadows)), 3.7, 1, len(args.shadows), sharey=True)
    for panel, shadow in zip(panels, args.shadows, strict=True):
        for name, (colour, mark, periods) in SERIES.items():
            values = [100 * overall(found.curves(shadow, *periods(p), "sep", prompts=few)) for p in PERIODS]
            panel.plot(PERIODS, values, color=colour, marker=mark, ms=5, lw=1.4, label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(PERIODS, [str(p) for p in PERIODS])
        panel.minorticks_off()
        panel.grid(axis="y", color="#eeeeee")
        panel.set_title(f"{shadow.upper()} shadow", fontsize=10)
        panel.set_xlabel("aligned every so many tokens", fontsize=9)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, min(high, 100 + 0.02 * (100 - low)))
    cut = f" (axis from {low:.1f})" if low > 0 else ""
    panels[0].set_ylabel(f"recall, %{cut}", fontsize=9)
    panels[0].legend(loc="lower left", frameon=False, fontsize=8)
    figure.suptitle(
        f"Recall over alignment periods (Fig 6), {plural(few, 'prompt')} x {args.tokens} tokens", fontsize=11
    )
    return run.save(figure, "-fig6")


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(6, 2), tokens=(80, 16))
    common_flags(parser, "dtype")
    parser.add_argument("--shadows", nargs="+", choices=SHADOWS)
    parser.add_argument("--predictors", nargs="*", choices=PREDICTORS, default=list(PREDICTORS))
    parser.add_argument("--figures", nargs="+", type=int, choices=(3, 6), default=[3, 6])
    args = parse_flags(parser)
    args.shadows = args.shadows or (["int8"] if args.quick else ["fp16", "int8", "nf4"])
    return args


def main() -> int:
    args = parse()
    header(f"Recall, {args.prompts} prompts x {args.tokens} tokens, main node in {args.dtype}")
    store, tokenizer = open_model(args, args.dtype)
    texts = gsm8k_prompts(args.prompts)
    if len(texts) < args.prompts:
        raise SystemExit(f"--prompts is {args.prompts}; allowed: 1 to {len(texts)}")
    prompts = [encode(tokenizer, text, 1 << 30) for text in texts]
    three, six = fig3(args) if 3 in args.figures else [], fig6(args) if 6 in args.figures else []
    wanted = list({str(sorted(one.params.items())): one for one in three + six}.values())
    # Neighbours share a cluster: by precision and alignment.
    wanted.sort(key=lambda c: (str(c.params["predictor"]), c.params["shadow"], c.params["token"], c.params["kv"]))
    depends = {"model": store.manifest.fingerprint, "dtype": args.dtype}

    def measure(params: dict[str, Any]) -> dict[str, Any]:
        settings = Settings(
            model=args.model,
            dtype=args.dtype,
            shadow=params["shadow"],
            predictor=params["predictor"],
            align_token=params["token"],
            align_kv=params["kv"],
            departure=LATE,
            **recorded_runs.NEEDED,
        )
        report = predicted(kept.cluster(settings), prompts[params["prompt"]], params["tokens"], ignore_eos=False)
        if report.recall is None:
            raise SystemExit(f"prompt {params['prompt']} of {params}: no recall was counted; no expert was predicted")
        return {"by_token": report.recall_by_token, "recall": report.recall, "finish": report.finish}

    with Experiment("recall", args, VERSION, depends) as run, KeptCluster(store) as kept:
        found = Found(wanted, run.all(wanted, measure))
        rows = found.rows()
        run.write(rows)
        print(text_table(COLUMNS, rows))
        shape = model_shape(store)
        chance = shape.top_k / shape.experts
        pictures = [draw_fig3(run, found, args, chance)] if three else []
        pictures += [draw_fig6(run, found, args)] if six else []
        print(run.written(pictures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
