"""What foresight costs the main thread: milliseconds a layer of a decode pass, each kind, beside the layer itself.

    .venv/bin/python -m scripts.measure.foresight_cost --model models/deep-moe

Transformers answers a prompt in float32 on one thread; before each layer's experts the foresight is asked, as the main
node asks it while workers compute. Kinds take turns, token by token, so that a busy machine slows all of them alike.
`around`: what a pass takes longer for the hooks and wrappers that a kind needs, its own computing left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from checkpoint import family
from checkpoint.gates import Gates
from checkpoint.token_predictor import FILE
from main_node.engine.foresight import make_foresight
from scheduler.types import Visit
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEEP
from scripts.lib.provenance import header

KINDS = (None, "gate", "gates", "attention", "token")


class Timed:
    """A model whose layers ask one foresight. `spent_s`: by its calls in a pass; `calls`: how many told anything."""

    def __init__(self, path: Path, kind: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager", local_files_only=True
        ).eval()
        modules = family.experts_modules(self.model)
        counts = tuple(family.expert_count(module) for _, module in modules.values())
        self.shape = family.shape_of(self.model.config, tuple(modules), max(counts), counts)
        self.cache: Any = family.new_cache(self.model.config)
        self.position, self.calls, self._busy = 0, 0, False
        self.spent_s = self.given_s = 0.0
        self.foresight = None
        if kind is not None:
            gates = Gates(self.model)
            self.foresight = make_foresight(kind, self.model, gates, self.shape, lambda: self.cache, path / FILE)
            for layer, (_, module) in modules.items():
                module.register_forward_pre_hook(self._hook(layer, module))

    def _hook(self, layer: int, module: torch.nn.Module) -> Any:
        eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]

        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if self._busy or self.foresight is None:
                return
            self._busy = True
            since = time.perf_counter()
            given = eager(module, *args)  # of the resident experts; workers compute it, so it costs nothing here
            began = time.perf_counter()
            told = self.foresight.ahead(Visit(1, self.position, layer), args[0], lambda: given)
            self.spent_s += time.perf_counter() - began
            self.given_s += began - since
            self.calls += bool(told)
            self._busy = False

        return hook

    def step(self, tokens: list[int]) -> tuple[int, float, float, int]:
        """(next token, seconds of the pass without foresight, those of foresight, its calls)."""
        self.spent_s, self.given_s, self.calls = 0.0, 0.0, 0
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache, use_cache=True)
        whole = time.perf_counter() - began
        self.position += len(tokens)
        return int(out.logits[0, -1].argmax()), whole - self.spent_s - self.given_s, self.spent_s, self.calls


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEEP, help="%(default)s unless said")
    parser.add_argument("--tokens", type=int, default=60, help="of the answer; %(default)s unless said")
    parser.add_argument("--context", type=int, default=256, help="of the prompt; %(default)s unless said")
    args = parser.parse_args()
    header(f"Cost of foresight, {args.model.name}, {args.tokens} tokens after {args.context}")
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if kind != "token" or (args.model / FILE).is_file()]
    timed = {kind: Timed(args.model, kind) for kind in kinds}
    feeds = {kind: [7 + n % 1000 for n in range(args.context)] for kind in kinds}
    found: dict[Any, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
    for number in range(args.tokens + 1):
        for kind, one in timed.items():
            token, rest_s, spent_s, calls = one.step(feeds[kind])
            feeds[kind] = [token]
            if number:
                found[kind].append((rest_s, spent_s, calls))
    if len({tuple(feed) for feed in feeds.values()}) != 1:
        raise SystemExit("the answers differ: foresight has changed one")
    layers = len(timed[None].shape.layers)
    plain_s = statistics.median(rest for rest, _, _ in found[None])
    print(f"{'a layer as it is, experts included':<36} {1000 * plain_s / layers:8.3f} ms")
    for kind, rows in found.items():
        if kind is not None:
            spent_s = statistics.median(spent / max(calls, 1) for _, spent, calls in rows)
            around_s = statistics.median(rest for rest, _, _ in rows) - plain_s
            share = spent_s * layers / plain_s
            print(
                f"{kind:<36} {1000 * spent_s:8.3f} ms, {share:6.1%} of it; around: {1000 * around_s / layers:7.3f} ms"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
