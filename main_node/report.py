"""What one answer cost, as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from main_node.node import MainNode
    from main_node.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Report:
    """One answer's figures. Times in seconds, memory in bytes, `None` where there was nothing to measure.

    `recall`: equation (3) of OD-MoE over the decode passes; `recall_by_token`: equation (2) for this prompt.
    `loads`: all, of which `prefill_loads`; `reloads`: begun after the gate for want of a prediction;
    `stall_s`: decoding's waits for loads. `memory_bytes`: weights, slots and caches a role, from the buffers;
    `memory_of_whole`: all of it, as a fraction of the weights of the model with every expert in memory.
    """

    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    decode_s: float
    decode_tokens_per_s: float | None
    tokens_per_s: float
    recall: float | None
    recall_by_token: list[float | None]
    loads: int
    prefill_loads: int
    reloads: int
    unused_loads: int
    late_predictions: int
    stall_s: float
    prefill_stall_s: float
    memory_bytes: dict[str, int | list[int]]
    memory_of_whole: float
    resident_experts_max: list[int]
    bytes_loaded: int
    emulated: str | None


def build_report(main: MainNode, number: int, sequence: Sequence, ttft_s: float, decode_s: float) -> Report:
    """Ask the ledger and every node. `decode_s` covers all tokens but the first."""
    ledger = main.engine.core.ledgers[number]
    workers, shadow = main.engine.usage()
    count = len(sequence.tokens)
    if main.engine.shadow is not None:
        ledger.close()
    slots = [usage.device_bytes_max for usage in workers.values()]
    held = shadow.device_bytes_max if shadow else 0
    whole = main.weight_bytes + main.store.manifest.expert_bytes
    return Report(
        token_ids=list(sequence.tokens),
        prompt_tokens=len(sequence.prompt),
        new_tokens=count,
        ttft_s=ttft_s,
        decode_s=decode_s,
        decode_tokens_per_s=(count - 1) / decode_s if count > 1 else None,
        tokens_per_s=count / (ttft_s + decode_s),
        recall=ledger.overall.recall,
        recall_by_token=[tally.recall for tally in ledger.by_index],
        loads=ledger.loads,
        prefill_loads=ledger.loads - ledger.decode_loads,
        reloads=ledger.reloads,
        unused_loads=ledger.unused,
        late_predictions=ledger.late,
        stall_s=ledger.stall_s,
        prefill_stall_s=ledger.prefill_stall_s,
        memory_bytes={
            "main": main.device_bytes,
            "shadow": held,
            "workers": slots,
        },
        memory_of_whole=(main.device_bytes + held + sum(slots)) / whole,
        resident_experts_max=[usage.resident_experts_max for usage in workers.values()],
        bytes_loaded=ledger.bytes_loaded,
        emulated=None,
    )
