"""What `--system auto` is on this machine: a system, and the memory for its experts. docs/decisions.md has the figures
that the order rests on."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.native.parameters import restoring_bytes
from checkpoint.store import ExpertStore
from main_node.shape import limited_context, model_shape
from odmoe.clusters.memory.budget import memory_budget
from odmoe.clusters.threads import with_threads
from odmoe.settings.settings import Settings
from odmoe.settings.system_settings import AUTO
from odmoe.terminal import count_text, megabytes
from worker_node.loaders.slab import available_memory

ALL_FIT, CACHED, PAPER = "fully-cached", "lrfu-prefetch", "od-moe"
FREE_SHARE = 0.8
"""Of the memory that is free. The rest is for other programs, and for what the estimates leave out."""
CONTEXT, KV_SHARE = 4096, 0.125
"""Unless --ctx-size or --memory says otherwise, KV caches have room for the model's whole context, as far as this share
of the memory allows, but for so many tokens at least: caches grow only as they are used."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Bytes of one machine and a model."""

    room: int
    """That all nodes may take."""
    dense: int
    """Of all but experts: dense weights, KV caches, activations."""
    experts: int
    """A slot for every expert, with the memory to restore one."""
    least: int
    """Of `experts`: those that a layer needs for a token, and one more."""
    shadow: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`expert_memory`: bytes for experts; None: for all of them. `why`: the rest of a sentence."""

    system: str
    expert_memory: int | None
    why: str


def choose_system(facts: Facts) -> Choice:
    """Every expert in memory where they fit, else a cache with what is left. Never a shadow: on one machine it shares
    the processor with the main node, so that od-moe is slower than loading on demand."""
    left = facts.room - facts.dense
    if facts.experts <= left:
        return Choice(ALL_FIT, None, f"all experts ({megabytes(facts.experts)}) fit into {megabytes(left)}")
    if left < facts.least:
        short = f"even that is {megabytes(facts.least - left)} more than there is room for"
        return Choice(CACHED, facts.least, f"{short}, {_paper(facts, left)}")
    return Choice(CACHED, left, f"all experts need {megabytes(facts.experts)}, {_paper(facts, left)}")


def _paper(facts: Facts, left: int) -> str:
    need = f"a shadow {megabytes(facts.shadow)}"
    cost = "which fits, but shares this processor" if facts.shadow + facts.least <= left else "which does not fit"
    return f"{need}, {cost}; --system {PAPER} asks for the paper's"


def with_system(settings: Settings, store: ExpertStore) -> tuple[Settings, str]:
    """The settings with a named system in place of auto, and a line that says which and why; empty where the system is
    named. Raises LaunchError where the kernel does not report the free memory."""
    if settings.system != AUTO:
        return settings, ""
    choice = choose_system(facts_of(settings, store))
    memory = {} if choice.expert_memory is None or settings.memory else {"device_memory": str(choice.expert_memory)}
    chosen = with_threads(settings.replace(system=choice.system, workers=1, **memory), store)
    experts = "" if choice.expert_memory is None else f" with {megabytes(choice.expert_memory)} of experts"
    return chosen, f"chose {choice.system}{experts}, {count_text(chosen.threads_a_node, 'thread')}: {choice.why}"


def facts_of(settings: Settings, store: ExpertStore) -> Facts:
    """Of this machine, or of --memory where it is given."""
    shape = model_shape(store)
    limit = settings.ctx_size or (limited_context(shape.context, None) if settings.memory else CONTEXT)
    assumed = settings.replace(system=PAPER, workers=1, ctx_size=min(limit, shape.context))
    manifest = store.manifest
    restoring = restoring_bytes(manifest, ("",), "cpu", settings.threads_a_node)
    count = sum(len(layer.blobs) for layer in manifest.layers.values())
    memory = settings.memory or str(int(available_memory() * FREE_SHARE))
    budget = memory_budget(memory, assumed, store, 0)
    shares = dict(budget.shares)
    if not (settings.ctx_size or settings.memory):
        whole = memory_budget(memory, assumed.replace(ctx_size=shape.context), store, 0).shares["kv"]
        shares["kv"] = min(whole, max(shares["kv"], int(budget.total * KV_SHARE)))
    shadow = shares.pop("shadow")
    slots = min(count, shape.top_k + 1)
    return Facts(
        room=budget.total,
        dense=sum(shares.values()),
        experts=count * manifest.blob_bytes + restoring,
        least=slots * manifest.blob_bytes + restoring,
        shadow=shadow,
    )
