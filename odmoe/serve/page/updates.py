"""Updates of the page, as JSON objects with short names: two a second go to each viewer."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from main_node.activity import OUTCOMES
from main_node.shape import model_shape
from odmoe.settings.units import parse_memory

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from main_node.activity import Activity, ExpertAccess
    from main_node.figures import Figures, NodeFigures
    from odmoe.serve.service import Service

TOTALS = (
    "prompt_tokens",
    "answer_tokens",
    "loads",
    "reloads",
    "named",
    "hits",
    "activated",
    "predicted",
    "late_predictions",
    "stall_s",
    "prefill_stall_s",
    "drafted",
    "accepted",
)
"""Fields of `Totals`, in the order in which an update has them."""


_cell, _outcome = itemgetter(0, 1), itemgetter(2)


def describe_cluster(service: Service) -> dict[str, Any]:
    """What does not change while the service runs: the model's shape, and the settings that explain what is seen."""
    opened, served = service.model.opened, service.served
    shape, whole = model_shape(opened.store), _whole_bytes(opened.store)
    return {
        "model": service.name,
        "chat": bool(getattr(service.tokenizer, "chat_template", None)),
        "context": service.context,
        "layers": list(shape.layers),
        "experts": [shape.count(ordinal) for ordinal in range(len(shape.layers))],
        "top_k": shape.top_k,
        "outcomes": OUTCOMES,
        "totals": TOTALS,
        "system": served.system,
        "cluster": served.cluster,
        "shadow": served.shadow if served.has_shadow else None,
        "drafts": served.has_drafts,
        "profile": served.profile,
        "whole_bytes": whole,
        "budget_bytes": parse_memory(served.memory, whole) if served.memory is not None else None,
    }


def _whole_bytes(store: ExpertStore) -> int:
    """Of the dense weights, and of all experts as the store keeps them."""
    dense = sum(file.stat().st_size for file in store.dense.glob("*.safetensors"))
    return dense + store.manifest.expert_bytes


def encode_activity(activity: Activity) -> dict[str, Any]:
    """`a`: accesses as `[layer, expert, outcome, worker, times, ...]`, `w`: a list for each worker, `T`: totals."""
    return {
        "s": round(activity.at_s, 3),
        "a": aggregate(activity.accesses),
        "w": [[round(value, 3) for value in worker] for worker in activity.workers],
        "p": activity.predictions,
        "T": [round(getattr(activity.totals, name), 3) for name in TOTALS],
        "q": [activity.answered, activity.waiting],
    }


def aggregate(accesses: tuple[ExpertAccess, ...]) -> list[int]:
    """One entry for each cell of the grid, whatever happened meanwhile: its worst outcome, with the worker of that,
    and how often it was chosen."""
    times = Counter(map(_cell, accesses))
    worst = {access[:2]: access[2:] for access in sorted(accesses, key=_outcome)}
    return [value for cell, count in times.items() for value in (*cell, *worst[cell], count)]


def encode_figures(figures: Figures) -> dict[str, Any]:
    """`nodes`: those that ever joined, the main node first."""
    return {"nodes": [_node(node) for node in figures.nodes]}


def _node(node: NodeFigures) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role,
        "number": node.number,
        "up": node.up,
        "host": node.host,
        "device": node.device,
        "slots": node.slots,
        "memory": node.memory_bytes,
        "loads": node.loads,
        "bytes": node.bytes_loaded,
        "load_s": round(node.load_s, 3),
        "lost": node.lost,
        "rejoined": node.rejoined,
        "suspect": node.suspect,
    }
