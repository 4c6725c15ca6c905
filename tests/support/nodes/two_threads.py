"""Answers of the demo model in a process where torch computes with two threads, and Transformers' own.

`python two_threads.py` prints for each dtype whether all logits are the same bit for bit, and the number of threads.
"""

from __future__ import annotations

import sys
from contextlib import closing

import torch
from transformers import AutoModelForCausalLM

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from support.nodes.exact import answers
from support.paths import DEMO, ROOT

PATHS = (ROOT, ROOT / "tests")
THREADS, TOKENS = 2, 4
PROMPT = list(range(5, 125))


def is_exact(dtype: str) -> bool:
    settings = Settings(model=str(DEMO), threads=THREADS, system="fully-cached")
    with closing(EmbeddedCluster(settings, prepare_store(str(DEMO), None, dtype))) as cluster:
        report, found = answers(cluster, PROMPT, TOKENS)
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype, experts_implementation="eager")
    out = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    wanted = [step[0].float() for step in out.logits]
    same = [torch.equal(got, expected) for got, expected in zip(found, wanted, strict=True)]
    tokens = out.sequences[0, len(PROMPT) :].tolist()
    print(f"exact {report.exact}, logits equal {same}, tokens {report.token_ids} and {tokens}", file=sys.stderr)
    return report.exact and all(same) and report.token_ids == tokens


if __name__ == "__main__":
    for dtype in ("float32", "bfloat16"):
        print(dtype, is_exact(dtype), torch.get_num_threads())
