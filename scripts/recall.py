"""Recall of the shadow's predictions (OD-MoE equations (2) and (3), Fig 3): each precision, each way of aligning.

.venv/bin/python scripts/recall.py                      # 20 prompts x 64 tokens, main node in float32
.venv/bin/python scripts/recall.py --prompts 4 --tokens 32
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import Progress

from odmoe.process import prepare_libraries, prepare_process
from odmoe.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from odmoe.text import encode, load_tokenizer

ALIGNMENTS = {"token and KV": (1, 1), "token only": (1, 0), "KV only": (0, 1), "never": (0, 0)}
COLOURS = {"token and KV": "#3f9b6c", "token only": "#3b6ea5", "KV only": "#e0a526", "never": "#d64545"}


def measure(settings: Settings, store: Any, prompts: list[list[int]], tick: Any) -> list[list[float]]:
    """Recall by token index for each prompt; equation (2)'s terms."""
    cluster = start_cluster(settings, store)
    try:
        found = []
        for prompt in prompts:
            *_, last = cluster.generate(prompt, settings.max_new_tokens, ignore_eos=True)
            found.append(last.report.recall_by_token)
            tick()
        return found
    finally:
        cluster.close()


def plot(rows: list[dict[str, Any]], schemes: list[str]) -> None:
    figure, panels = plt.subplots(1, len(schemes), figsize=(4.6 * len(schemes), 3.6), sharey=True, dpi=130)
    for panel, scheme in zip(panels if len(schemes) > 1 else [panels], schemes, strict=True):
        for row in (r for r in rows if r["shadow"] == scheme):
            curve = [100 * v for v in row["by_token"]]
            label = f"{row['aligned']} ({row['recall']:.2%})"
            panel.plot(range(1, len(curve) + 1), curve, color=COLOURS[row["aligned"]], label=label, lw=1.4)
        panel.set_title(f"{scheme} shadow", fontsize=10)
        panel.set_xlabel("token")
        panel.legend(fontsize=7.5, frameon=False, loc="lower left")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    (panels[0] if len(schemes) > 1 else panels).set_ylabel("recall, %")
    figure.tight_layout()
    figure.savefig(common.RESULTS / "recall.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(common.DEMO))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shadows", nargs="+", default=["fp16", "int8", "nf4"])
    args = parser.parse_args()
    prepare_process()
    prepare_libraries(Settings(model=args.model).threads_a_node)
    common.header(f"Recall, {args.prompts} prompts x {args.tokens} tokens, main node in {args.dtype}")
    store = prepare_store(args.model, None, args.dtype)
    tokenizer = load_tokenizer(store.dense)
    prompts = [encode(tokenizer, text, 1 << 30) for text in common.prompts(args.prompts)]
    rows = []
    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task("prompts", total=len(args.shadows) * len(ALIGNMENTS) * len(prompts))
        for shadow in args.shadows:
            for name, (token, kv) in ALIGNMENTS.items():
                settings = Settings(
                    model=args.model, dtype=args.dtype, shadow=shadow, align_token=token, align_kv=kv,
                    max_new_tokens=args.tokens,
                )  # fmt: skip
                curves = measure(settings, store, prompts, lambda: bars.advance(task))
                by_token = [sum(column) / len(column) for column in zip(*curves, strict=True)]
                recall = sum(by_token) / len(by_token)
                rows.append({"shadow": shadow, "aligned": name, "recall": recall, "by_token": by_token})
                print(f"{shadow:>5} aligned {name:<13} {recall:.4%}", flush=True)
    print(f"\nwritten to {common.save('recall', rows)}")
    plot(rows, args.shadows)


if __name__ == "__main__":
    main()
