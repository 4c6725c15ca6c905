"""What experts in fewer bits cost and save (Fate section 4.5): bytes and answers.

.venv/bin/python -m scripts.measure.forms            # models/demo-moe, 8 windows of 256 tokens: some minutes
.venv/bin/python -m scripts.measure.forms --quick    # 4 windows, fewer shares

First every expert in one form: Transformers' own model with the weights of the store's forms, restored, in their place
(int8: HQQ's, as a reference; no store has it). Then Fate's search: in each window, all of it one prefill, the least
popular experts of a layer, as many as have at most a share of its rows together, in int2, all others in int4; the
largest share that costs at most 1 %. Accuracy is perplexity here, where Fate has task scores: a model of this size has
none. Beside it the same with the most popular experts in int2, as Fate's Fig 10 has both. The text: half GSM8K problems
with their solutions, half sonnets, which the model was not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from checkpoint import family
from checkpoint.forms import FORMS, GROUP, restore
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from odmoe.clusters.process import prepare_libraries
from odmoe.quality.passages import losses, perplexity, windows
from odmoe.stores import prepare_store
from odmoe.text import load_tokenizer
from scheduler.policies.importance import shares
from scheduler.policies.precision import Importance, Popular
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.quality import held_out
from scripts.lib.tables import Column, text_table

ALLOWED_LOSS = 0.01
Weights = dict[int, list[dict[str, torch.Tensor]]]
"""Layer -> its experts' parameters."""
Columns = Callable[[list[dict[str, Any]]], list[Column]]
"""Of a table's rows, as they are beside the first one."""


def read(store: ExpertStore, layer: int, expert: int, form: str = "") -> torch.Tensor:
    """A blob of the store, uint8."""
    file, blob = store.locate(layer, expert, form)
    with file.open("rb") as stream:
        stream.seek(blob.offset)
        return torch.frombuffer(bytearray(stream.read(blob.length)), dtype=torch.uint8)


def weights_of(store: ExpertStore, form: str) -> Weights:
    """All experts in full, as restored from `form`."""
    found: Weights = {}
    for number, layer in store.manifest.layers.items():
        blobs = [read(store, number, expert, form) for expert in range(len(layer.blobs))]
        group = store.manifest.form(form).group if form else GROUP
        found[number] = [restore(blob, layer, form, group) if form else layer.views(blob) for blob in blobs]
    return found


def by_hqq(weights: Weights, bits: int) -> Weights:
    """Quantised to so many bits and restored by HQQ alone; biases as they are."""
    from hqq.core.quantize import Quantizer

    def again(weight: torch.Tensor) -> torch.Tensor:
        packed, meta = Quantizer.quantize(weight, nbits=bits, group_size=GROUP, axis=1, device="cpu")
        meta |= {"scale": meta["scale"].half(), "zero": meta["zero"].half(), "compute_dtype": torch.float32}
        restored: torch.Tensor = Quantizer.dequantize(packed, meta)
        return restored.to(weight.dtype)

    return {
        layer: [{n: again(w) if w.dim() > 1 else w for n, w in expert.items()} for expert in experts]
        for layer, experts in weights.items()
    }


class Model:
    """Transformers' own model, whose experts' weights are put in place from outside."""

    def __init__(self, store: ExpertStore, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=family.parse_dtype(store.manifest.dtype), experts_implementation="eager"
        ).eval()
        self.experts: dict[int, Any] = {n: module for n, (_, module) in family.experts_modules(self.model).items()}

    def put(self, layer: int, expert: int, parameters: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in parameters.items():
                getattr(self.experts[layer], name)[expert].copy_(value)

    def put_all(self, weights: Weights) -> None:
        for layer, experts in weights.items():
            for expert, parameters in enumerate(experts):
                self.put(layer, expert, parameters)

    def reads(self, text: list[list[int]]) -> tuple[list[float], list[int]]:
        """Nats of each token of these windows, and the most likely one in its place."""
        nats, best = [], []
        for window in text:
            with torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([window]), use_cache=False).logits[0].float()  # [T, V]
            nats += losses(logits, window)
            best += logits[:-1].argmax(dim=-1).tolist()
        return nats, best


class ByPopularity:
    """Before each layer's experts compute a window: int2 for some, by how many of its rows want them, int4 for others.

    `share`: of the layer's rows, those whose experts are in int2; of the least popular, or of the most.
    """

    def __init__(self, model: Model, forms: dict[str, Weights], share: float, least: bool) -> None:
        self._model, self._forms, self._least = model, forms, least
        self._share, self._rule = share, Popular(share)
        self.held: dict[tuple[int, int], str] = {}
        self.loads = {form: 0 for form in forms}
        self._hooks = [
            module.register_forward_pre_hook(lambda _, args, n=number: self.choose(n, args[1]))
            for number, module in model.experts.items()
        ]

    def choose(self, layer: int, index: torch.Tensor) -> None:
        experts, counts = index.flatten().unique(return_counts=True)
        rows = dict(zip(experts.tolist(), counts.tolist(), strict=True))
        for expert, form in self._chosen(rows).items():
            self.loads[form] += 1
            if self.held.get((layer, expert)) != form:
                self._model.put(layer, expert, self._forms[form][layer][expert])
                self.held[layer, expert] = form

    def _chosen(self, rows: dict[int, int]) -> dict[int, str]:
        if self._least:
            before = shares(rows)
            return {
                expert: self._rule.form(Importance(True, False, count, before[expert], None, 0))
                for expert, count in rows.items()
            }
        chosen, seen, total = {}, 0, sum(rows.values())
        for expert in sorted(rows, key=lambda one: (-rows[one], one)):
            seen += rows[expert]
            chosen[expert] = "int2" if seen <= self._share * total else "int4"
        return chosen

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def uniform(store: ExpertStore, model: Model, forms: dict[str, Weights], text: list[list[int]]) -> list[dict[str, Any]]:
    """A row for each form that all experts are in."""
    rows = []
    _, expected = model.reads(text)
    layer = next(iter(store.manifest.layers.values()))
    weights = sum(math.prod(spec.shape) for spec in layer.tensors if len(spec.shape) > 1)
    for form, held in track(forms.items(), console=Console(stderr=True), description="forms"):
        model.put_all(held)
        nats, best = model.reads(text)
        bytes_of = store.manifest.form_bytes(form) if form in ("", *FORMS) else round(weights * (8 + 32 / GROUP) / 8)
        rows.append(
            {
                "part": "uniform",
                "form": form or store.manifest.dtype,
                "expert_bytes": bytes_of,
                "perplexity": perplexity(nats),
                "agreement": sum(a == b for a, b in zip(best, expected, strict=True)) / len(best),
            }
        )
    model.put_all(forms[""])
    return rows


def search(
    model: Model, forms: dict[str, Weights], text: list[list[int]], tried: list[float]
) -> Iterator[dict[str, Any]]:
    """A row for each share of rows in int2, of the least popular experts and of the most."""
    two = {form: forms[form] for form in FORMS}
    for share in track(tried, console=Console(stderr=True), description="shares"):
        row: dict[str, Any] = {"part": "search", "share": share}
        for name, least in (("least", True), ("most", False)):
            chooser = ByPopularity(model, two, share, least)
            try:
                row[f"{name}_perplexity"] = perplexity(model.reads(text)[0])
            finally:
                chooser.close()
            row[f"{name}_experts"] = chooser.loads["int2"] / sum(chooser.loads.values())
        yield row


def uniform_columns(rows: list[dict[str, Any]]) -> list[Column]:
    """Every expert in one form, beside full precision, the first row."""
    whole = rows[0]
    return [
        Column("experts", "form"),
        Column("bytes", "expert_bytes", ",d"),
        Column(f"of {whole['form']}", "expert_bytes", ".1%", 1 / whole["expert_bytes"]),
        Column("perplexity", "perplexity", ".4f"),
        Column("loss", lambda row: row["perplexity"] / whole["perplexity"] - 1, ".2%"),
        Column("same next token", "agreement", ".2%"),
    ]


def search_columns(rows: list[dict[str, Any]]) -> list[Column]:
    """Shares of rows in int2, beside none, the first row."""
    base, columns = rows[0]["least_perplexity"], [Column("rows whose experts are int2", "share", ".0%")]
    for name in ("least", "most"):
        columns += [
            Column(f"{name} popular first: experts", f"{name}_experts", ".1%"),
            Column("loss", lambda row, name=name: row[f"{name}_perplexity"] / base - 1, ".2%"),
        ]
    return columns


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO.relative_to(ROOT)), help="%(default)s unless said")
    parser.add_argument("--store", type=Path, help="its expert store, made and given its forms where it has none")
    parser.add_argument("--windows", type=int, help="8 unless said")
    parser.add_argument("--window", type=int, default=256, help="tokens in one prefill; %(default)s unless said")
    parser.add_argument("--quick", action="store_true", help="4 windows, six shares")
    args = parser.parse_args()
    prepare_libraries(1)
    header("Experts in fewer bits")
    path = args.model if Path(args.model).exists() else str(ROOT / args.model)
    store = prepare_store(path, str(args.store) if args.store else None, None)
    store = add_forms(store, tuple(FORMS))
    count = args.windows or (4 if args.quick else 8)
    tokens = count * (args.window - 1) + 1
    text = windows(held_out(load_tokenizer(store.dense), tokens), args.window)
    forms = {"": weights_of(store, "")}
    forms |= {"int8": by_hqq(forms[""], 8)} | {form: weights_of(store, form) for form in FORMS}
    model = Model(store, path)
    rows = uniform(store, model, forms, text)
    steps = 5 if args.quick else 20
    found = list(search(model, forms, text, [step / steps for step in range(steps + 1)]))
    print(text_table(uniform_columns(rows), rows))
    print(f"\nprefill\n{text_table(search_columns(found), found)}")
    base = found[0]["least_perplexity"]
    within = takewhile(lambda row: row["least_perplexity"] <= base * (1 + ALLOWED_LOSS), found)
    largest = max(row["share"] for row in within)
    print(
        f"\nThe largest share in int2 whose loss of perplexity, all in int4, stays within {ALLOWED_LOSS:.0%}: "
        f"{largest:.0%} ({tokens:,} tokens, prefills of {args.window}, in steps of {1 / steps:.0%})"
    )
    print(f"written to {save_rows('forms', [*rows, *found])}")


if __name__ == "__main__":
    main()
