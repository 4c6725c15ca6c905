"""What the main node holds of a dense part in bfloat16, int8 and int4, by its report and by its process.

    .venv/bin/python -m scripts.processes.dense    # five minutes

A random checkpoint with large attention and shared experts (GLM-4.5's layers, narrower), of whose dense part the
embeddings are 6 %, as of a model with 744 billion parameters. Each way of keeping it is a process of its own, which
answers a prompt with one worker. Resident is what the process holds after the answer, with pages of weights that
Transformers maps from their files, less what it held before, and less the worker's slots and scratch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from odmoe.stores import cache_dir
from scripts.lib.clusters import answer
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.peers.checkpoints import made_once

LIMIT_S = 900.0
KEPT = ("plain", "int8", "int4")
CONFIG = {
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 16,
    "num_attention_heads": 40,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def make_checkpoint(folder: Path) -> Path:
    """The checkpoint's path beneath `folder`, written unless it is there."""

    def write(partial: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model("glm4_moe", **CONFIG)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(partial)

    return made_once(folder / "dense-heavy", write)


def resident_bytes() -> int:
    """Of this process, mapped files included."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def held(model: str, kept: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """In this process."""
    from odmoe.clusters.process import prepare_libraries, prepare_process
    from odmoe.settings.settings import Settings
    from odmoe.start import start_cluster
    from odmoe.stores import prepare_store

    def run(name: str) -> tuple[Any, int]:
        settings = Settings(model=name, dtype="bfloat16", dense=kept, workers=1, shadow="none", system="on-demand")
        cluster = start_cluster(settings, prepare_store(name, None, "bfloat16", dense=kept))
        try:
            prompt = [random.Random(0).randrange(2, 2000) for _ in range(prompt_tokens)]
            return answer(cluster, prompt, tokens), resident_bytes()
        finally:
            cluster.close()

    prepare_process()
    prepare_libraries(Settings().threads_a_node)
    run(str(DEMO))
    before = resident_bytes()
    report, after = run(model)
    shares = report.memory_shares
    return {
        "kept": kept,
        "main": report.memory_bytes["main"],
        "dense": shares["dense"],
        "resident": after - before - shares["slots"] - shares["scratch"],
        "tokens_per_s": report.decode_tokens_per_s,
        "first_token_s": report.ttft_s,
    }


COLUMNS = (
    Column("dense part", "kept"),
    Column("main node, reported MB", "main", ".0f", 1e-6),
    Column("over plain", "main_ratio", ".2f"),
    Column("resident, MB", "resident", ".0f", 1e-6),
    Column("over plain", "resident_ratio", ".2f"),
    Column("tokens/s", "tokens_per_s", ".1f"),
    Column("first token, s", "first_token_s", ".2f"),
)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, default=8, help="of the answer (%(default)s)")
    parser.add_argument("--case", choices=KEPT, help="one, in this process")
    args = parser.parse_args()
    model = str(make_checkpoint(cache_dir() / "published"))
    if args.case:
        print(json.dumps(held(model, args.case, args.prompt_tokens, args.tokens)))
        return 0
    header(f"Memory of the main node: {Path(model).name}, {args.prompt_tokens} tokens in, {args.tokens} out")
    rows: list[dict[str, Any]] = []
    for kept in KEPT:
        words = ["--case", kept, "--prompt-tokens", str(args.prompt_tokens), "--tokens", str(args.tokens)]
        command = [sys.executable, "-m", "scripts.processes.dense", *words]
        done = subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        first = rows[0] if rows else row
        rows.append(row | {f"{name}_ratio": row[name] / first[name] for name in ("main", "resident")})
        print(f"{kept}: {rows[-1]['main_ratio']:.2f} of plain", file=sys.stderr, flush=True)
    print(text_table(COLUMNS, rows))
    print(save_rows("dense", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
