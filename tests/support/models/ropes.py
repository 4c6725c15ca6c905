"""Tiny checkpoints of every family with every kind of RoPE scaling, and their answers on both sides of its limit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import family as families_code
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.models import families
from support.models.checkpoints import randomise
from support.models.store_making import shard
from support.nodes.exact import answer_of, answers_together
from support.shadows.scripted_drafts import ScriptedDrafts

LIMIT = 24
"""Tokens after which factors change, in the kinds that change them; the length before scaling in the others."""
CHUNK = 8
TOKENS = 9
LENGTHS = (LIMIT - 5, LIMIT, LIMIT + 7)
"""Of the prompts: an answer that goes over the limit, one that begins there, and one behind it."""
PROMPTS = [[(7 * at * at + 3 * at + 11 * length + 5) % 96 for at in range(length)] for length in LENGTHS]
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": LIMIT},
    "llama3": {
        "factor": 3.0,
        "original_max_position_embeddings": LIMIT,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {"factor": 3.0, "original_max_position_embeddings": LIMIT},
    "proportional": {"factor": 3.0},
}
_OWN_SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
"""Phi-MoE scales by the length in every kind but the default."""


@dataclass(frozen=True)
class Scaled:
    """A checkpoint at `path`, its store, and for each of `PROMPTS` the answer of a new model of Transformers."""

    path: Path
    store: ExpertStore
    wanted: Mapping[tuple[int, ...], list[int]]


class NotMadeError(Exception):
    """Transformers cannot make such a model, or run it."""


def configuration(family: str, kind: str) -> Any:
    """Raises NotMadeError for a family without rotary embeddings."""
    config = families.configuration(family)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    rows = {
        name.rpartition(".")[2].removesuffix("inv_freq").removesuffix("_"): buffer.numel()
        for name, buffer in families_code.meta_model(config, config.dtype or families.torch.float32).named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }
    if not rope or not rows:
        raise NotMadeError(f"{family} has no rotary embeddings")
    text.max_position_embeddings = LIMIT if kind == "dynamic" else 3 * LIMIT
    if family == "phimoe":
        text.original_max_position_embeddings = LIMIT
    nested = all(isinstance(one, dict | None) for one in rope.values())
    for name, one in rope.items() if nested else [("", rope)]:
        if one is not None and name in rows:
            one |= _scaling(family, kind, rows[name])
    return config


def _scaling(family: str, kind: str, rows: int) -> dict[str, Any]:
    scaling = {"rope_type": kind} | SCALED[kind]
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * rows, "long_factor": [2.0 + at / 2 for at in range(rows)]}
    return scaling | (_OWN_SCALES if family == "phimoe" and kind != "default" else {})


def make(path: Path, family: str, kind: str) -> Scaled:
    """Raises NotMadeError."""
    auto = families.auto_class(family)
    try:
        randomise(auto.from_config(configuration(family, kind)), 0).save_pretrained(path / "model")
        model = auto.from_pretrained(path / "model", experts_implementation="eager").eval()
        wanted = {tuple(one): answer_of(copy.deepcopy(model), one, TOKENS)[0] for one in PROMPTS}
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise NotMadeError(f"{type(error).__name__}: {error}") from error
    return Scaled(path / "model", shard(open_source(path / "model"), path / "store"), wanted)


def check(scaled: Scaled, chunks: Sequence[int] = (0, CHUNK)) -> None:
    """A cluster answers as Transformers does, and says `exact` of all that was not read in chunks: prompts alone, alone
    with drafts, at once, at once with drafts, and in chunks."""
    fields: dict[str, Any] = {"shadow": "none", "workers": 2, "threads": 1, "mini_batch": 4096}
    for chunk in chunks:
        cluster = EmbeddedCluster(Settings(model=str(scaled.path), prefill_chunk=chunk, **fields), scaled.store)
        try:
            plain = cluster.main.drafting
            for drafts in (plain, ScriptedDrafts(scaled.wanted)):
                cluster.main.drafting, cluster.main.on_logits = drafts, None
                if chunk:
                    for prompt in PROMPTS:
                        found, report = collect(cluster.generate(prompt, TOKENS, ignore_eos=True))
                        _compare(scaled, f"alone, {len(prompt)} tokens", prompt, found, report)
                for mine, prompt in zip(answers_together(cluster.main, PROMPTS, [TOKENS] * 3), PROMPTS, strict=True):
                    _compare(scaled, f"at once, {len(prompt)} tokens", prompt, mine.tokens, mine.report)
            if chunk and cluster.main.steps._chunk:
                assert mine.report.prefill_passes == -(-LENGTHS[-1] // CHUNK)
        finally:
            cluster.close()


def _compare(scaled: Scaled, how: str, prompt: list[int], found: list[int], report: Any) -> None:
    chunked = report.prefill_passes > 1
    assert found == scaled.wanted[tuple(prompt)], f"{how}, in {report.prefill_passes} passes"
    assert report.exact or chunked or report.read_again, f"{how}: {report.inexact}"
    assert report.inexact == ["--prefill-chunk"] * (not report.exact)
