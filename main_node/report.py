"""What one answer cost, as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.errors import RequestFailedError

if TYPE_CHECKING:
    from main_node.engine.engine import Engine
    from main_node.engine.sequence import Sequence
    from main_node.sampling import Chooser


@dataclass(frozen=True, slots=True)
class Report:
    """One answer's figures. Times in seconds, memory in bytes, `None` where there was nothing to measure.

    `recall`: equation (3) of OD-MoE over the decode passes; `recall_by_token`: equation (2) for this prompt;
    both of the layers whose prediction came, early or late. `unpredicted`: activated experts of the other layers, whose
    prediction had not come some seconds after the answer, or never came since the shadow was lost. `recall_in_time`: of
    all activated experts, those that a prediction had named before the gate. `tokens_per_s` counts all time
    from the request on, `shadow_wait_s` (the first answer's wait for the shadow to be ready) included;
    `decode_tokens_per_s` does not count that wait; `longest_gap_s`: the longest time from a token to the next,
    without it too. `finish`: stop (end of sequence), stop_text, length, or context (full). `lost`: workers, or the
    shadow, lost since the cluster started; `rejoined`: those that came back.
    `ignored`: generation settings of the model that are not heeded; where there are any, or the router or the experts'
    form change the answer, `exact` is False. `seed`: of the draws, None where the likeliest was taken.
    `loads`: all, of which `prefill_loads`; `reloads`: begun after the gate for want of a prediction;
    `named`: experts that decoding's gates named, after the router; `hits`: of them those whose bytes were in a slot by
    then, the papers' hit rate being the one by the other; `host_computed`: of them those that a host place computed.
    `stall_s`: decoding's waits for loads. `memory_bytes`: weights, slots and caches a role, from the buffers;
    `memory_of_whole`: all of it, as a fraction of the weights of the model with every expert in memory, None where a
    node did not say what it holds.
    `wire_bytes_per_token`: encoded bytes that one decode token costs, of the messages that carry embeddings to the
    workers (`to_workers`) and back, KV rows and tokens to the shadow (the prompt's rows among them, where those are
    aligned) and predictions from it; None where nodes share a process, or other requests were open meanwhile.
    `embedding_bytes_per_token`: what the paper counts for that one way: 32 bits an element of the hidden state (16 KB
    at Mixtral's 4096), for each layer and each of its top-k workers.
    """

    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    decode_s: float
    shadow_wait_s: float
    longest_gap_s: float
    decode_tokens_per_s: float | None
    tokens_per_s: float
    recall: float | None
    recall_in_time: float | None
    recall_by_token: list[float | None]
    unpredicted: int
    loads: int
    prefill_loads: int
    reloads: int
    named: int
    hits: int
    host_computed: int
    unused_loads: int
    late_predictions: int
    stall_s: float
    prefill_stall_s: float
    memory_bytes: dict[str, int | list[int]]
    memory_of_whole: float | None
    resident_experts_max: list[int]
    bytes_loaded: int
    finish: str
    lost: list[str]
    rejoined: list[str]
    ignored: list[str]
    exact: bool
    seed: int | None
    emulated: str | None
    wire_bytes_per_token: dict[str, float] | None
    embedding_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: to the first token; for all others; of those, waiting for the shadow to be ready (not in `decode_s`);
    the longest from a token to the next.
    `carried`: what the streams had carried (see `Roster.carried`) when the first token was there."""

    ttft_s: float
    decode_s: float
    shadow_wait_s: float
    longest_gap_s: float
    carried: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Bytes of the main node: all that it holds (`device_bytes`), of that weights and buffers (`weight_bytes`); and of
    all experts, wherever they are (`expert_bytes`)."""

    device_bytes: int
    weight_bytes: int
    expert_bytes: int


def build_report(
    engine: Engine, number: int, sequence: Sequence, chooser: Chooser, memory: MainMemory, times: Times, finish: str
) -> Report:
    """Ask the figures of request `number` and every node. Raises RequestFailedError for a request that was closed
    meanwhile."""
    stats = engine.core.stats.get(number)
    if stats is None:
        raise RequestFailedError(f"request {number} was closed")
    workers, shadow = engine.peers.usage()
    told = len(workers) == len(engine.peers.workers) and (shadow is None) is (engine.peers.shadow is None)
    count, shape = len(sequence.tokens), engine.core.shape
    stats.close()
    overall = stats.overall
    activated = overall.activated + stats.unpredicted
    slots = [usage.device_bytes_max for usage in workers.values()]
    held = shadow.device_bytes_max if shadow else 0
    whole = memory.weight_bytes + memory.expert_bytes
    return Report(
        token_ids=list(sequence.tokens),
        prompt_tokens=len(sequence.prompt),
        new_tokens=count,
        ttft_s=times.ttft_s,
        decode_s=times.decode_s,
        shadow_wait_s=times.shadow_wait_s,
        longest_gap_s=times.longest_gap_s,
        decode_tokens_per_s=(count - 1) / times.decode_s if count > 1 else None,
        tokens_per_s=count / (times.ttft_s + times.decode_s + times.shadow_wait_s),
        recall=overall.recall,
        recall_in_time=stats.in_time / activated if activated else None,
        recall_by_token=[counts.recall for counts in stats.by_index],
        unpredicted=stats.unpredicted,
        loads=stats.loads,
        prefill_loads=stats.loads - stats.decode_loads,
        reloads=stats.reloads,
        named=stats.named,
        hits=stats.present,
        host_computed=stats.decode_host_calls,
        unused_loads=stats.unused,
        late_predictions=stats.late,
        stall_s=stats.stall_s,
        prefill_stall_s=stats.prefill_stall_s,
        memory_bytes={
            "main": memory.device_bytes,
            "shadow": held,
            "workers": slots,
        },
        memory_of_whole=(memory.device_bytes + held + sum(slots)) / whole if told else None,
        resident_experts_max=[usage.resident_experts_max for usage in workers.values()],
        bytes_loaded=stats.bytes_loaded,
        finish=finish,
        lost=list(engine.peers.lost),
        rejoined=list(engine.peers.rejoined),
        ignored=chooser.ignored,
        exact=engine.core.strategy.exact and not chooser.ignored,
        seed=chooser.seed,
        emulated=engine.pace.emulated,
        wire_bytes_per_token=_wire_bytes(engine, number, count - 1, times.carried),
        embedding_bytes_per_token=4 * shape.hidden * shape.top_k * len(shape.layers),
    )


def _wire_bytes(engine: Engine, number: int, tokens: int, before: dict[str, int] | None) -> dict[str, float] | None:
    """What each of an answer's decode tokens has cost so far; `before`: carried when its first token was there."""
    after = engine.carried(number)
    if before is None or after is None or tokens < 1:
        return None
    return {name: round((after[name] - before[name]) / tokens, 1) for name in after}
