"""The figures of one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from main_node.engine.roster import kind_of
from main_node.exactness import inexact
from main_node.figures import ClusterFigures
from scheduler.errors import RequestFailedError
from wire.messages import ShadowUsage, WorkerUsage

if TYPE_CHECKING:
    from main_node.engine.engine import Engine
    from main_node.request import Request


@dataclass(frozen=True, slots=True)
class Report:
    """One answer's figures. Times in seconds, memory in bytes, `None` where there was nothing to measure.

    Equations are those of the OD-MoE paper. `--json` prints the fields by these names, those of `cluster` beside them.
    """

    token_ids: list[int]
    """The answer. The prompt is not part of it."""
    prompt_tokens: int
    new_tokens: int

    ttft_s: float
    """From the request to the first token, the wait for a place among those that are answered at once included."""
    decode_s: float
    """From the first token to the last, without `shadow_wait_s`."""
    shadow_wait_s: float
    """Wait of the cluster's first answer for its shadow to start, after the first token."""
    longest_gap_s: float
    """Longest time between two tokens, without `shadow_wait_s`."""
    decode_tokens_per_s: float | None
    """Tokens after the first, over `decode_s`."""
    tokens_per_s: float
    """All tokens over all time, `shadow_wait_s` included."""

    recall: float | None
    """Correctly predicted over activated experts of all decode passes, equation (3). Layers without a prediction are
    left out (`unpredicted`); predictions that came after their gate count."""
    recall_in_time: float | None
    """Correctly predicted before their gate, over all activated experts."""
    recall_by_token: list[float | None]
    """As `recall`, for each token after the first: equation (2) for this prompt."""
    drafted: int
    """Drafts of tokens that passes of decoding have verified."""
    accepted: int
    """Of `drafted`, those that the main model chose itself."""
    unpredicted: int
    """Activated experts of layers whose prediction had not come some seconds after the answer."""
    recall_complete: bool
    """Whether every prediction that the shadow owed had come. False where it was silent or lost meanwhile."""

    loads: int
    """Expert loads begun."""
    prefill_loads: int
    """Of `loads`, those of the prompt's passes."""
    reloads: int
    """Demand loads of decoding: begun after the gate, because no prediction had named the expert."""
    named: int
    """Experts that decoding's gates chose, after the router."""
    hits: int
    """Of `named`, those whose bytes were in a slot when the gate fired, in a form as precise as asked for. The papers'
    hit rate is `hits / named`."""
    host_computed: int
    """Of `named`, those that a host place computed."""
    unused_loads: int
    """Loads begun ahead of a gate that did not choose the expert."""
    late_predictions: int
    """Predictions of a layer that came after its gate."""
    stall_s: float
    """Time for which decoding waited for loads."""
    prefill_stall_s: float

    memory_bytes: dict[str, int | list[int]]
    """By role: `main`, `shadow`, and `workers` as a list: most bytes of weights, slots and caches, from the buffers."""
    memory_of_whole: float | None
    """The sum of `memory_bytes` over the weights of the model with every expert in memory, as the store keeps it. None
    where a node did not report."""
    resident_experts_max: list[int]
    """By worker: the most experts that were in its slots at once."""
    bytes_loaded: int

    finish: str
    """`stop` (end-of-sequence token, or the last token of a text that a schema lets end nowhere else), `stop_text`,
    `length` (max_new_tokens) or `context` (full)."""
    ignored: list[str]
    """`name=value` of the model's generation settings that are not supported."""
    exact: bool
    """Whether the tokens are those of the model with every expert in memory: there is no reason in `inexact`."""
    doubted: bool
    """Not `exact` because of such a worker."""
    requests_per_step: float
    """How many requests had a pass in the same step, itself counted: the mean over this request's steps."""
    prefill_passes: int
    """Passes in which the prompt was read: more than one where it was read in chunks."""
    kernel: str
    """`exact`, or the name of one whose products may differ from those of Transformers in the last bit."""
    seed: int | None
    """Seed of the draws. None where the most probable token was taken."""
    emulated: str | None
    """The profile whose times were kept."""
    cluster: ClusterFigures
    """The cluster's own figures, when the answer had ended."""
    wire_bytes_per_token: dict[str, float] | None
    """Encoded bytes of a decode token, by stream: `to_workers` and `from_workers` (embeddings), `to_shadow` (tokens and
    KV rows, the prompt's too), `from_shadow` (predictions). None where nodes share a process, or other requests were
    open meanwhile."""
    memory_shares: dict[str, int] = field(default_factory=dict)
    """The bytes of `memory_bytes` by what they are for: `dense` weights, `kv` caches and `predictor` of the main node,
    `shadow` with its KV caches, `slots`, and `scratch` in which workers restore experts."""
    devices: dict[str, str | list[str]] = field(default_factory=dict)
    """By role, as in `memory_bytes`: what it computed on, `cpu` or an accelerator as torch names it, and its model."""
    one_kind: bool = True
    """Whether main node and workers computed on devices of one kind: on processors, or on accelerators of one model.
    Others round differently, so that the answer is not `exact`."""
    inexact: list[str] = field(default_factory=list)
    """Why tokens may be others than Transformers': options that change answers (`--router skip`, `--kernel fast`),
    products shared with other requests that may have lost their last bit (`--batch-dense`), tokens read in chunks
    (`--prefill-chunk`, `--kv-memory`), devices of different kinds, settings in `ignored`, outputs of workers that were
    found to give wrong ones or to round otherwise, methods of the family's own `generate` that are not followed here,
    and experts that were quantised while their store was made (`experts in int4 of bfloat16, groups of 64`): tokens are
    then those of the quantised model."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not read, since the prefix cache had them (`--kv-memory`)."""
    read_again: int = 0
    """Times that all tokens so far were read again, as the model's own `generate` does: Phi-MoE once, where its rotary
    factors change."""
    loads_from_memory: int = 0
    """Of `loads`, those of experts that were in host memory, a tier between disk and slots (`--host-memory`)."""
    host_memory_bytes: list[int] = field(default_factory=list)
    """By worker: most bytes of that tier, from its buffers. 0 without it, and where the slots are host memory."""
    lost_s: float | None = None
    """With a profile: by how much of `ttft_s` and `decode_s` the machine was too slow for it, at least. None without.
    Seconds that the process of the main node has lost: on a cluster of several, its own alone."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, as in `Report`, measured by the token loop."""

    ttft_s: float
    decode_s: float
    shadow_wait_s: float
    longest_gap_s: float
    token_traffic: dict[str, int] | None
    """Bytes that the streams had carried when the first token was there. See `Roster.token_traffic`."""
    lost_s: float
    """By which the machine was too slow for a profile; 0 in real time."""


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Bytes of the main node and of the model."""

    device_bytes: int
    """Everything that the main node holds."""
    weight_bytes: int
    """Of that, weights and buffers."""
    predictor_bytes: int
    """Of that, a predictor's weights. The rest are KV caches."""
    expert_bytes: int
    """All experts of the model, in full form as the store keeps it, wherever they are."""


def build_report(
    engine: Engine,
    request: Request,
    memory: MainMemory,
    times: Times,
    finish: str,
    kernel: str,
    recall_complete: bool,
    device: str = "cpu",
    of_model: Sequence[str] = (),
) -> Report:
    """Collect the figures of a request from the scheduler and from every node. `device`: the main node's, as in
    `devices`. `of_model`: see `inexact`.

    Raises RequestFailedError for a request that was closed or failed meanwhile.
    """
    number, sequence, chooser = request.number, request.sequence, request.chooser
    stats = engine.core.stats.get(number)
    if stats is None:
        raise RequestFailedError(f"request {number} was closed")
    workers, shadow = engine.peers.usage()
    by_role, shares, of_whole = _memory(engine, memory, workers, shadow)
    doubted = not engine.checks.settle(number)  # last, so that nothing found meanwhile is missed
    engine.check(number)
    engine.close_stats(stats)
    one_kind = engine.peers.roster.kinds() <= {kind_of(device)}
    reasons = inexact(engine, request, kernel, of_model, doubted, one_kind)
    recall, activated = stats.overall, stats.overall.activated + stats.unpredicted
    count = len(sequence.tokens)
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
        recall=recall.recall,
        recall_in_time=stats.in_time / activated if activated else None,
        recall_by_token=[counts.recall for counts in stats.by_index],
        drafted=request.drafted,
        accepted=request.accepted,
        unpredicted=stats.unpredicted,
        recall_complete=recall_complete,
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
        memory_bytes=by_role,
        memory_of_whole=of_whole,
        memory_shares=shares,
        resident_experts_max=[usage.resident_experts_max for usage in workers.values()],
        bytes_loaded=stats.bytes_loaded,
        loads_from_memory=stats.loads_from_memory,
        host_memory_bytes=[usage.host_bytes_max for usage in workers.values()],
        finish=finish,
        ignored=chooser.ignored,
        exact=not reasons,
        inexact=reasons,
        doubted=doubted,
        requests_per_step=request.passes / request.steps,
        prefill_passes=request.prefill_passes,
        cached_tokens=request.cached_tokens,
        read_again=request.read_again,
        kernel=kernel,
        seed=chooser.seed,
        emulated=engine.pace.profile_name,
        cluster=engine.cluster_figures(workers.values()),
        wire_bytes_per_token=_wire_bytes(engine, number, count - 1, times.token_traffic),
        devices={"main": device, **engine.peers.roster.devices()},
        one_kind=one_kind,
        lost_s=times.lost_s if engine.pace.profile_name else None,
    )


def _memory(
    engine: Engine, memory: MainMemory, workers: Mapping[int, WorkerUsage], shadow: ShadowUsage | None
) -> tuple[dict[str, int | list[int]], dict[str, int], float | None]:
    """`memory_bytes`, `memory_shares` and `memory_of_whole` of a report."""
    complete = len(workers) == len(engine.peers.workers) and (shadow is None) is (engine.peers.shadow is None)
    of_workers = [usage.device_bytes_max for usage in workers.values()]
    of_shadow = shadow.device_bytes_max if shadow else 0
    together = memory.device_bytes + of_shadow + sum(of_workers)
    slots = engine.peers.roster.slot_bytes(workers)
    shares = {
        "dense": memory.weight_bytes,
        "kv": memory.device_bytes - memory.weight_bytes - memory.predictor_bytes,
        "predictor": memory.predictor_bytes,
        "shadow": of_shadow,
        "slots": slots,
        "scratch": sum(of_workers) - slots,
    }
    return (
        {"main": memory.device_bytes, "shadow": of_shadow, "workers": of_workers},
        shares,
        together / (memory.weight_bytes + memory.expert_bytes) if complete else None,
    )


def _wire_bytes(engine: Engine, number: int, tokens: int, before: dict[str, int] | None) -> dict[str, float] | None:
    """Bytes a decode token by stream. `before`: carried when the first token was there."""
    after = engine.token_traffic(number)
    if before is None or after is None or tokens < 1:
        return None
    return {name: round((after[name] - before[name]) / tokens, 1) for name in after}
