"""How alike the experts of different tokens are, and the route models of `odmoe simulate` that are fitted to it.

    .venv/bin/python -m scripts.models.routes                              # the models in models/, some minutes
    .venv/bin/python -m scripts.models.routes --models deep-moe --texts 4

Each model reads problems and sonnets; what its gates choose is what an answer with these words would need. Two shares
of these choices say how well a cache does that has room for some of a layer's experts: *recent*, those among the
experts that were used last (LRU), and *popular*, those among the ones that other texts use most (a cache that never
changes). A route model is fitted to both at a quarter, half and three quarters of the experts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scheduler.simulation.route_model import UNIFORM, RouteModel
from scripts.lib import prompts
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

Text = list[list[tuple[int, ...]]]
"""What one text needs: by layer, by token, the experts."""

ROOMS = (0.25, 0.5, 0.75)
_NEVER = 1 << 30
_COLD = 16  # tokens of a text that only fill a cache
_SKEWS = [step / 4 for step in range(25)]
_REPEATS = [1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0]


@dataclass(frozen=True, slots=True)
class Shares:
    """By room: the share of a layer's choices that a cache has."""

    recent: tuple[float, ...]
    popular: tuple[float, ...]

    def distance(self, other: Shares) -> float:
        """Mean difference."""
        mine, theirs = self.recent + self.popular, other.recent + other.popular
        return sum(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / len(mine)


def shares_of(texts: list[Text], experts: int) -> Shares:
    rooms = [max(1, round(room * experts)) for room in ROOMS]
    recent, popular = [0] * len(rooms), [0] * len(rooms)
    count = 0
    for layer in range(len(texts[0])):
        used = [Counter(expert for token in text[layer] for expert in token) for text in texts]
        everywhere = sum(used, Counter())
        for text, own in zip(texts, used, strict=True):
            elsewhere = everywhere - own
            ranks = {expert: rank for rank, (expert, _) in enumerate(elsewhere.most_common())}
            for place, expert in _places(text[layer]):
                count += 1
                for n, room in enumerate(rooms):
                    recent[n] += place < room
                    popular[n] += ranks.get(expert, experts) < room
    return Shares(tuple(n / count for n in recent), tuple(n / count for n in popular))


def _places(tokens: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """(how many other experts were used since its last use, expert) of each choice; experts never used are last."""
    order: list[int] = []
    for number, chosen in enumerate(tokens):
        if number >= _COLD:
            yield from ((order.index(expert) if expert in order else _NEVER, expert) for expert in chosen)
        order = [*chosen, *(expert for expert in order if expert not in chosen)]


def drawn(model: RouteModel, layers: int, experts: int, top_k: int, lengths: list[int]) -> list[Text]:
    """Texts of these numbers of tokens, as the route model has them."""
    weights = [model.weights(experts, f"popular {layer}") for layer in range(layers)]
    texts: list[Text] = []
    for number, length in enumerate(lengths):
        draw = random.Random(number).random
        text: Text = []
        for layer in range(layers):
            tokens: list[tuple[int, ...]] = []
            for _ in range(length):
                tokens.append(model.choose(draw, weights[layer], top_k, tokens[-1] if tokens else ()))
            text.append(tokens)
        texts.append(text)
    return texts


def fit(texts: list[Text], experts: int, top_k: int) -> tuple[RouteModel, Shares]:
    """The route model whose shares are nearest, and its shares: first the skew alone, then both in turns."""
    wanted = shares_of(texts, experts)
    lengths, layers = [len(text[0]) for text in texts], min(4, len(texts[0]))

    def tried(model: RouteModel) -> tuple[float, Shares]:
        found = shares_of(drawn(model, layers, experts, top_k, lengths), experts)
        return found.distance(wanted), found

    best = UNIFORM
    near, shares = tried(best)
    for _ in range(3):
        before = best
        for model in [RouteModel(skew, best.repeat) for skew in _SKEWS]:
            if (got := tried(model))[0] < near:
                (near, shares), best = got, model
        for model in [RouteModel(best.skew, repeat) for repeat in _REPEATS]:
            if (got := tried(model))[0] < near:
                (near, shares), best = got, model
        if best == before:
            break
    return best, shares


def routes(path: str, texts: list[str], tokens: int) -> tuple[list[Text], int, int]:
    """What the gates of a checkpoint choose for texts; its experts and top-k. SystemExit where Transformers does not
    give a family's gates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    found: list[Text] = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
        with torch.inference_mode():
            gates = getattr(model(input_ids=ids, output_router_logits=True), "router_logits", None)
        if not gates:
            raise SystemExit(f"{path}: Transformers gives no scores of the gates of {model.config.model_type}")
        top_k = model.config.num_experts_per_tok
        chosen = [gate.topk(top_k, dim=-1).indices.tolist() for gate in gates]
        found.append([[tuple(token) for token in layer] for layer in chosen])
    return found, gates[0].shape[-1], top_k


def texts_of(count: int) -> list[str]:
    """Half problems, a dozen in each text, half sonnets; in turns."""
    said = prompts.problems()
    size = max(1, len(said) // count)
    questions = ["\n".join(said[at : at + size]) for at in range(0, size * count, size)]
    poems = prompts.sonnets()
    part = len(poems) // count
    sonnets = [poems[at : at + part] for at in range(0, part * count, part)]
    return [text for pair in zip(questions, sonnets, strict=True) for text in pair]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo-moe", "deep-moe", "fine-moe"], help="in models/")
    parser.add_argument("--texts", type=positive, default=4, help="of each kind (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=512, help="of each text at most (%(default)s)")
    args = parser.parse_args()
    header("Routes of text, and route models fitted to them")
    rows = []
    for name in args.models:
        texts, experts, top_k = routes(str(ROOT / "models" / name), texts_of(args.texts), args.tokens)
        model, shares = fit(texts, experts, top_k)
        wanted = shares_of(texts, experts)
        plain = shares_of(drawn(UNIFORM, 4, experts, top_k, [len(text[0]) for text in texts]), experts)
        about = {"model": name, "experts": experts, "top_k": top_k, "tokens": sum(len(text[0]) for text in texts)}
        for what, one, of in (("text", wanted, None), ("fitted", shares, model), ("uniform", plain, UNIFORM)):
            rows.append(
                about
                | {"routes": what, "skew": of and of.skew, "repeat": of and of.repeat, "off": one.distance(wanted)}
                | {f"recent {room:.0%}": value for room, value in zip(ROOMS, one.recent, strict=True)}
                | {f"popular {room:.0%}": value for room, value in zip(ROOMS, one.popular, strict=True)}
            )
    print(
        text_table(
            [Column(key, key, ".2f" if isinstance(value, float) else "") for key, value in rows[0].items()], rows
        )
    )
    print(save_rows("routes", rows))


if __name__ == "__main__":
    main()
