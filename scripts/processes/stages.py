"""Where the memory of one process goes that is no weight: what each stage of `odmoe generate` adds.

.venv/bin/python -m scripts.processes.stages
.venv/bin/python -m scripts.processes.stages --kernel fast --experts mxfp4
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

from scripts.lib.clusters import answer
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

PROMPT_TOKENS, TOKENS = 64, 16
LIBRARIES = ("numpy", "torch", "transformers.modeling_utils")
COLUMNS = (
    Column("after", "stage"),
    Column("anonymous, MB", "anonymous", ".0f", 1e-6),
    Column("added", "added", ".0f", 1e-6),
    Column("pages of files", "files", ".0f", 1e-6),
    Column("modules", "modules"),
)


class Stages:
    """Rows of a table, one a stage."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def end(self, stage: str) -> None:
        now, before = resident_bytes("Anon"), self.rows[-1]["anonymous"] if self.rows else 0
        row = {"stage": stage, "anonymous": now, "added": now - before, "files": resident_bytes("File")}
        self.rows.append(row | {"modules": len(sys.modules)})


def resident_bytes(kind: str) -> int:
    """Of this process. `kind`: `Anon`, what is no page of a file, or `File`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"Rss{kind}:"))


def measure(model: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    from odmoe.clusters.process import prepare_libraries, prepare_process

    stages = Stages()
    prepare_process()
    stages.end("the interpreter, and this script")
    for name in LIBRARIES:
        importlib.import_module(name)
        stages.end(f"import {name}")
    from odmoe.settings.settings import Settings
    from odmoe.start import start_cluster
    from odmoe.stores import prepare_store

    settings = Settings(model=model, **values)
    prepare_libraries(settings.threads_a_node)
    store = prepare_store(model, None, None, experts=settings.experts)
    stages.end("the store is open")
    cluster = start_cluster(settings, store)
    stages.end("the cluster is ready")
    for number in (1, 2):
        prompt = [random.Random(number).randrange(2, 300) for _ in range(PROMPT_TOKENS)]
        held = sum(answer(cluster, prompt, TOKENS).memory_shares.values())
        stages.end(f"answer {number}")
    stages.rows.append({"stage": "of it what the report says is held", "anonymous": held})
    cluster.close()
    return stages.rows


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO), help="(models/demo-moe)")
    parser.add_argument("--kernel", default="exact", help="(%(default)s)")
    parser.add_argument("--experts", help="as for `odmoe generate`")
    parser.add_argument("--system", default="fully-cached", help="(%(default)s)")
    args = parser.parse_args()
    values = {"kernel": args.kernel, "experts": args.experts, "system": args.system}
    header(f"Memory of a process: {Path(args.model).name}, {args.system}, kernel {args.kernel}")
    print(text_table(COLUMNS, measure(args.model, values)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
