"""How many dialogues a chat model ends rightly, by kind, as Transformers answers them greedily.

    .venv/bin/python -m scripts.models.chat.answers models/chat-moe --count 200

Once with phrasings that scripts.models.chat.train never trains on (the last turn is of such a phrasing), once with
others of the dialogues that it trains on: their phrasings, with names and numbers drawn anew.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from scripts.lib.flags import positive, script_parser
from scripts.models.chat.dialogues import Dialogue, dialogues

BATCH = 25
NEW_SEED = 10**9
"""Above every seed that a training draws from."""
SEEN, UNSEEN = "trained phrasings, drawn anew", "phrasings held out"


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, asked: list[Dialogue], tokens: int) -> list[str]:
    """The last answer to each, with its special tokens but for the end's."""
    texts = [
        tokenizer.apply_chat_template(
            one.messages[:-1], tokenize=False, add_generation_prompt=True, tools=one.tools or None
        )
        for one in asked
    ]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(row).partition(tokenizer.eos_token)[0].strip() for row in made]


def is_right(one: Dialogue, answer: str) -> bool:
    return re.search(one.right, answer) is not None


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=positive, default=200, help="dialogues of each of the two (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=60, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).float()
    for name, held in ((UNSEEN, True), (SEEN, False)):
        asked = list(dialogues(args.count, NEW_SEED, held))
        right: dict[str, list[bool]] = defaultdict(list)
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            for one, answer in zip(batch, answers(model, tokenizer, batch, args.tokens), strict=True):
                right[one.kind].append(is_right(one, answer))
                if args.show and not right[one.kind][-1]:
                    print(f"{one.kind}: {one.messages[-2]['content']!r} -> {answer!r}")
        figures = {kind: f"{sum(found)} of {len(found)}" for kind, found in sorted(right.items())}
        print(json.dumps({name: f"{sum(sum(found) for found in right.values())} of {args.count}", **figures}, indent=1))


if __name__ == "__main__":
    main()
