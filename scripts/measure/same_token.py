"""How often an aligned shadow's own next token is the main model's: the default of `odmoe simulate --acceptance`.

.venv/bin/python -m scripts.measure.same_token --shadow int8 --prompts 12 --tokens 40
"""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import kv
from odmoe.text import encode
from scripts.lib.clusters import open_model
from scripts.lib.flags import common_flags, experiment_flags, parse_flags
from scripts.lib.prompts import gsm8k_prompts
from shadow_node.model import ShadowModel


def agreements(main: Any, shadow: ShadowModel, prompt: list[int], tokens: int) -> list[bool]:
    """For each token of the greedy answer: whether the shadow expected it."""
    found = []
    cache, own_cache = None, shadow.new_cache()
    read, own = prompt, shadow.forward(prompt, own_cache)
    for step in range(tokens):
        with torch.inference_mode():
            out = main(input_ids=torch.tensor([read]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, read = out.past_key_values, [int(out.logits[0, -1].argmax())]
        found.append(own == read[0])
        for first, tensors in kv.take(cache, 0, len(prompt) + step).parts(1 << 40):
            kv.put(own_cache, first, tensors)
        own = shadow.forward(read, own_cache)
    return found


def main() -> None:
    parser = experiment_flags(__doc__ or "", prompts=(12, 1), tokens=(40, 8))
    common_flags(parser, "shadow")
    args = parse_flags(parser)
    from transformers import AutoModelForCausalLM

    store, tokenizer = open_model(args, "float32")
    whole = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    shadow = ShadowModel(store, args.shadow)
    prompts = [encode(tokenizer, text, 1 << 30) for text in gsm8k_prompts(args.prompts)]
    found = [same for prompt in prompts for same in agreements(whole, shadow, prompt, args.tokens)]
    print(f"{args.model}, {args.shadow}: {sum(found)} of {len(found)} tokens, {sum(found) / len(found):.3f}")


if __name__ == "__main__":
    main()
