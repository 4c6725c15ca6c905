"""What `odmoe verify models/chat-moe --quality` is asked: questions in phrasings that it was never trained on.

    .venv/bin/python -m scripts.models.chat.held_out docs/examples/sums.jsonl --text /tmp/dialogues.txt

Sums with four answers each, of which one is right, and a text of dialogues. Both have the phrasings under `held`. The
answers are in the words of the training, and sums of one-digit numbers are few: only the questions are new.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import ROOT
from scripts.models.chat.answers import NEW_SEED
from scripts.models.chat.dialogues import dialogues, sums

MODEL = ROOT / "models" / "chat-moe"
CHOICES = 4


def questions(count: int, seed: int = NEW_SEED) -> Iterator[dict[str, Any]]:
    """`question`, `choices` and the place of the right one, `answer`. Only the result tells choices apart."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        asked = sums(rng, held=True)
        if asked.ask in seen:
            continue
        seen.add(asked.ask)
        sum_of, _, _ = asked.say.partition(" =")
        a, sign, b = sum_of.split()
        right = int(a) + int(b) if sign == "+" else int(a) - int(b)
        near = [n for n in range(max(0, right - 3), right + 4) if n != right]
        results = [right, *rng.sample(near, CHOICES - 1)]
        rng.shuffle(results)
        choices = [f"{sum_of} = {result}" for result in results]
        yield {"question": asked.ask, "choices": choices, "answer": results.index(right)}


def dialogue_text(tokens: int, seed: int = NEW_SEED) -> str:
    """Dialogues in the model's template, of at least so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts, count = [], 0
    for made in dialogues(tokens, seed, held=True):  # each has many tokens
        texts.append(tokenizer.apply_chat_template(made.messages, tokenize=False, tools=made.tools or None))
        count += len(tokenizer(texts[-1], add_special_tokens=False)["input_ids"])
        if count >= tokens:
            break
    return "".join(texts)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("sums", type=Path, help="JSON lines")
    parser.add_argument("--count", type=positive, default=200, help="sums (%(default)s)")
    parser.add_argument("--text", type=Path, help="dialogues")
    parser.add_argument("--tokens", type=positive, default=20_200, help="of the dialogues, at least (%(default)s)")
    args = parser.parse_args()
    args.sums.write_text("".join(f"{json.dumps(one)}\n" for one in questions(args.count)), encoding="utf-8")
    if args.text is not None:
        args.text.write_text(dialogue_text(args.tokens), encoding="utf-8")


if __name__ == "__main__":
    main()
