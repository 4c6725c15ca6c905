"""What a worker would gain from loading into host memory, after a restart, the experts that other texts used most.

    .venv/bin/python -m scripts.simulated.hot_set

Reads from disk of an answer whose worker loads every expert through host memory (LRFU), by what was there before:
nothing; experts at random; those that the other requests of the trace used most (held out); those that this request
will use most, which nobody knows. Of the shipped routing traces, all requests; shares of the reads from empty memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from scheduler.core.host_memory import HostTable
from scheduler.policies.residency.lrfu import LRFU
from scheduler.simulation.recorded_routes import RecordedWorkload
from scheduler.simulation.routing_trace import find_trace, read_trace, traced_workloads
from scheduler.types import ExpertId, ModelShape, Visit, WorkerJoined
from scripts.lib.flags import script_parser

TRACES = "many-moe", "deep-moe"
SHARES = 0.1, 0.25, 0.5
"""Of all experts in host memory."""
FIRST = 16
"""Tokens of the beginning of an answer."""

Gate = tuple[Visit, dict[int, int]]


def gates(work: RecordedWorkload, layers: int) -> Iterator[Gate]:
    """In their order, with the rows of each expert."""
    for layer in range(layers):
        yield Visit(1, 0, layer), dict(work.prompt(layer, 0, work.prompt_tokens))
    for index in range(work.tokens - 1):
        for layer in range(layers):
            yield Visit(1, work.prompt_tokens + index, layer), dict.fromkeys(work.routes(index, layer), 1)


def reads(shape: ModelShape, answer: list[Gate], slots: int, hot: list[ExpertId]) -> tuple[int, int]:
    """From disk: of the first `FIRST` tokens, and of all."""
    table, found = HostTable({}, LRFU(shape)), Counter[bool]()
    table.on_worker_joined(WorkerJoined(0, 1, host_slots=slots))
    loads = 0

    def load(expert: ExpertId) -> bool:
        nonlocal loads
        loads += 1
        held = table.assign(0, expert, "", loads, predicted=False)[1]
        table.on_loaded(0, expert, loads)
        return held

    for before in reversed(hot[:slots]):
        load(before)
    for number, (visit, rows) in enumerate(answer):
        table.residency.on_gate_fired(visit, rows, (), visit.position == 0)
        for expert in rows:
            found[number < FIRST * len(shape.layers)] += not load(ExpertId(visit.layer, expert))
            table.residency.on_used(0, ExpertId(visit.layer, expert), False, "")
    return found[True], found[True] + found[False]


def main() -> None:
    script_parser(__doc__).parse_args()
    rng = random.Random(0)
    print(f"trace      host memory  before     reads, first {FIRST} tokens  reads, all tokens")
    for name in TRACES:
        file = find_trace(name)
        if file is None:
            raise SystemExit(f"there is no routing trace {name}; run this from the repository")
        trace = read_trace(file)
        shape = ModelShape(tuple(range(trace.layers)), trace.num_experts, trace.top_k)
        answers = [list(gates(one, trace.layers)) for one in traced_workloads(trace, None)]
        uses = [_uses(one) for one in answers]
        every = [ExpertId(layer, number) for layer in shape.layers for number in range(trace.num_experts)]
        for share in SHARES:
            slots, sums = int(share * len(every)), dict[str, list[int]]()
            for answer, own in zip(answers, uses, strict=True):
                others = sum((one for one in uses if one is not own), Counter[ExpertId]())
                hot = {"nothing": [], "random": rng.sample(every, slots)}
                hot |= {"held out": [e for e, _ in others.most_common()], "own": [e for e, _ in own.most_common()]}
                for before, experts in hot.items():
                    first, whole = reads(shape, answer, slots, experts)
                    so_far = sums.setdefault(before, [0, 0])
                    sums[before] = [so_far[0] + first, so_far[1] + whole]
            for before, found in sums.items():
                shares = [f"{mine / cold:.3f}" for mine, cold in zip(found, sums["nothing"], strict=True)]
                print(f"{name:<10} {share:>10.0%}  {before:<9}  {shares[0]:>22}  {shares[1]:>17}")


def _uses(answer: list[Gate]) -> Counter[ExpertId]:
    """Rows of each expert."""
    found = Counter[ExpertId]()
    for visit, rows in answer:
        found.update({ExpertId(visit.layer, expert): count for expert, count in rows.items()})
    return found


if __name__ == "__main__":
    main()
