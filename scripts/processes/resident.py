"""What `--memory` reserves, what a report says is held, and what the process then holds: resident memory.

    .venv/bin/python -m scripts.processes.resident           # ten minutes
    .venv/bin/python -m scripts.processes.resident --quick   # two cases

A random checkpoint with Qwen3-30B-A3B's widths (fewer layers, experts and tokens) answers a prompt in an embedded
cluster with a budget for everything. Each case is a process of its own, which has answered with models/demo-moe
before, so that libraries have what they need. What it holds is anonymous memory, at its peak (looked at every 5 ms),
less what it held before. It should be the budget at most.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from odmoe.stores import cache_dir
from scripts.lib.clusters import answer
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.peers.checkpoints import SHAPES, make_checkpoint
from scripts.processes.memory import AnonymousPeak, anonymous_bytes

LIMIT_S = 900.0
MOST = 1.1
"""Of the budget, held at the peak: allocators round up. Above it the exit code is 1."""
DTYPE = "bfloat16"
SHAPE = replace(SHAPES["A"], name="resident", layers=3, heads=32)
CASES: dict[str, dict[str, Any]] = {
    "on-demand, 40 %": {"system": "on-demand", "workers": 1, "memory": "40%"},
    "od-moe, nf4 shadow, 80 %": {"system": "od-moe", "workers": 4, "memory": "80%", "shadow": "nf4"},
    "od-moe, int8 shadow, 100 %": {"system": "od-moe", "workers": 4, "memory": "100%", "shadow": "int8"},
    "lrfu-prefetch, 60 %": {"system": "lrfu-prefetch", "memory": "60%"},
    "fate, int4 and int2, 40 %": {"system": "fate", "memory": "40%", "smaller_forms": "always"},
}
QUICK = 2


def held(model: str, case: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """In this process."""
    from odmoe.clusters.configuration import budget_of, forms_needed
    from odmoe.clusters.process import prepare_libraries, prepare_process
    from odmoe.settings.settings import Settings
    from odmoe.start import start_cluster
    from odmoe.stores import prepare_store, with_forms

    def run(name: str, values: dict[str, Any]) -> tuple[Any, Any, int]:
        settings = Settings(
            model=name, dtype=DTYPE, parallel=1, ctx_size=prompt_tokens + tokens, loader="disk", **values
        )
        store = prepare_store(name, None, DTYPE)
        store = with_forms(store, sorted(forms_needed(settings, store)))
        cluster = start_cluster(settings, store)
        try:
            prompt = [random.Random(0).randrange(2, 2000) for _ in range(prompt_tokens)]
            report = answer(cluster, prompt, tokens)
            return report, budget_of(settings, store), anonymous_bytes(os.getpid())
        finally:
            cluster.close()

    prepare_process()
    prepare_libraries(Settings().threads_a_node)
    run(str(DEMO), CASES[case] | {"memory": None})
    before = anonymous_bytes(os.getpid())
    with AnonymousPeak(os.getpid()) as peak:
        report, budget, after = run(model, CASES[case])
    return {
        "case": case,
        "budget": budget.total,
        "activations": budget.shares["activations"],
        "reported": sum(report.memory_shares.values()),
        "resident": peak.bytes - before,
        "after": after - before,
        "before": before,
        **{f"share_{name}": size for name, size in report.memory_shares.items()},
    }


COLUMNS = (
    Column("case", "case"),
    Column("budget, MB", "budget", ".0f", 1e-6),
    Column("of it for activations", "activations", ".0f", 1e-6),
    Column("reported, MB", "reported", ".0f", 1e-6),
    Column("resident, MB: at its peak", "resident", ".0f", 1e-6),
    Column("after the answer", "after", ".0f", 1e-6),
    Column("peak of the budget", lambda row: row["resident"] / row["budget"], ".2f"),
    Column("interpreter and libraries, MB", "before", ".0f", 1e-6),
)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, default=8, help="of the answer (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} cases")
    parser.add_argument("--case", choices=CASES, help="one, in this process")
    args = parser.parse_args()
    model = str(make_checkpoint(SHAPE, cache_dir() / "published"))
    if args.case:
        print(json.dumps(held(model, args.case, args.prompt_tokens, args.tokens)))
        return 0
    header(f"Resident memory beside --memory: {Path(model).name}, {args.prompt_tokens} tokens in, {args.tokens} out")
    rows = []
    for case in list(CASES)[: QUICK if args.quick else None]:
        words = ["--case", case, "--prompt-tokens", str(args.prompt_tokens), "--tokens", str(args.tokens)]
        command = [sys.executable, "-m", "scripts.processes.resident", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{case}: {rows[-1]['resident'] / rows[-1]['budget']:.2f} of the budget", file=sys.stderr, flush=True)
    print(text_table(COLUMNS, rows))
    print(save_rows("resident-quick" if args.quick else "resident", rows))
    return int(any(row["resident"] > MOST * row["budget"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
