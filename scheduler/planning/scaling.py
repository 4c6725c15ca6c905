"""Estimates for a model on hardware that need not exist: equation (1), tokens/s and memory.

The times of a profile were measured with one model on one kind of device. Each is split into two parts. The part that
moves bytes is scaled to the other model and device; the rest (launches, packing, wake-ups) is assumed to stay the same.
The scheduler itself then decodes with these times in the simulator, so there is no formula for the speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from scheduler.alignment import Alignment
from scheduler.drafts.length import AUTO
from scheduler.errors import ConfigError, DoesNotFitError
from scheduler.planning.role_bytes import (
    GPU_REST_BYTES,
    MINI_BATCH,
    main_bytes,
    shadow_bytes,
    worker_bytes,
    workspace_bytes,
)
from scheduler.planning.shadow_bytes import NO_SHADOW, RECALLS, SHADOW_BYTES
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate, simulate_requests
from scheduler.simulation.workload import random_workload
from scheduler.timing.load_budget import LoadBudget, load_budget, luck
from scheduler.timing.profile import Profile
from scheduler.types import ModelSize

PROMPTS = (16, 128)

_VISITS = 4096  # expert computations that a simulated answer should have, for a stable figure
_VISITS_COMPARED = 768  # likewise, if it is compared with another on the same routes
_LEAST, _MOST = 6, 64  # tokens of such an answer
_LEAST_COMPARED = 2
_VISITS_TOGETHER, _LEAST_TOGETHER = 2048, 2  # of several answers, and tokens of each
_LEAST_DRAFTED = 17  # tokens of an answer with drafts: two whole blocks of eight
_LEAST_LAYERS = 12  # of a prompt
_EVEN = 0.005  # speeds that differ by a smaller share count as equal
_MOST_SLOTS, _BETWEEN = 4, 3
_SEED = 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines of a plan. None means the value of `base`."""

    base: Profile
    """The profile whose times are scaled."""
    workers: int
    device_bytes: float | None = None
    """Device memory of a worker; None: as much as one slot needs."""
    load_bytes_per_s: float | None = None
    link_bits_per_s: float | None = None
    main: float = 1.0
    """How many times as fast as in `base`; likewise `worker`, `shadow` and `messages`."""
    worker: float = 1.0
    shadow: float = 1.0
    messages: float = 1.0
    shadow_bytes: tuple[int, ...] = ()
    """Memory of each device that shares the shadow's layers; none: as much as it needs."""

    def slots(self, model: ModelSize) -> int:
        """How many experts fit on a worker. Raises DoesNotFitError if not even one does."""
        if self.device_bytes is None:
            return 1
        found = int((self.device_bytes - workspace_bytes(model)) // model.expert_bytes)
        if found < 1:
            whole = size_text(worker_bytes(model, 1))
            raise DoesNotFitError(
                f"--worker-memory is {size_text(self.device_bytes)}, but one expert of {model.name} takes {whole} "
                f"({size_text(model.expert_bytes)} and room to compute {MINI_BATCH} rows); give workers that much, "
                f"or choose a smaller dtype{' (bfloat16 halves it)' if model.item_bytes == 4 else ''}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Policy:
    """The policies of a plan."""

    shadow: str = "int8"
    """A scheme of SHADOW_BYTES, or none."""
    recall: float | None = None
    """Recall of the shadow's predictions; None: the paper's."""
    chosen: SystemConfig = field(default_factory=SystemConfig)
    alignment: Alignment = field(default_factory=lambda: Alignment(1, 1))
    group_size: int | None = None
    """None: the best one is searched for; likewise `slots`."""
    slots: int | None = None

    @property
    def system(self) -> SystemConfig:
        """The chosen system; without a shadow its predictor is `none`."""
        return replace(self.chosen, predictor="none") if self.shadow == "none" else self.chosen

    @property
    def expected_recall(self) -> float:
        return self.recall if self.recall is not None else RECALLS.get(self.shadow, 0.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a figure of a plan depends on."""

    model: ModelSize
    hardware: Hardware
    policy: Policy
    kept_bytes: int = 0
    """Of the main node's memory, for KV caches of earlier prompts."""
    shadow_kept_bytes: int = 0
    """Of the shadow's."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing done differently."""

    what: str
    tokens_per_s: float
    factor: float
    """Tokens/s divided by those without the change."""
    price: str = ""
    """What the change costs, in words."""
    real: bool = True
    """Whether the change is possible, rather than only a comparison."""
    alone: bool = False
    """Whether the change removes the shadow."""
    factors: tuple[float, float] | None = None
    """The least and the most factor over the base profile's fits; None: it has no others, or the change is not real."""

    @property
    def idle(self) -> bool:
        """Whether it makes no difference worth a word, by any fit."""
        return all(abs(factor - 1) < 0.01 for factor in (self.factor, *(self.factors or ())))


def scale_profile(setup: Setup) -> Profile:
    """The base profile's times for this model on this hardware. Raises ConfigError if the profile does not name the
    model and devices that its times were measured with."""
    model, hardware, base = setup.model, setup.hardware, setup.hardware.base
    if base.model_sizes is None or base.device_rates is None:
        raise ConfigError(
            f"profile {base.name} lacks the sizes and devices that its times were measured with (model.expert_bytes "
            "and the like, and devices); it can be simulated but not scaled to another model"
        )
    expert_bytes, expert_elements, main_bytes, shadow_bytes = base.model_sizes
    main_rate, worker_rate, shadow_rate = base.device_rates
    link = hardware.link_bits_per_s or base.link_bits_per_s
    hidden_bytes = model.hidden * model.item_bytes
    read = model.read / model.layers  # layers without experts, and the head, are spread over the layers with experts
    deeper = model.depth / model.layers
    main_s = _rest(base.main_layer_s, main_bytes, main_rate) * deeper + read * model.item_bytes / main_rate
    shadow_s = _rest(base.shadow_layer_s, shadow_bytes, shadow_rate) * deeper
    shadow_s += _shadow_read(model, setup.policy.shadow) / shadow_rate
    # Restoring reads what was loaded, and writes what the computation then reads.
    computed_bytes = model.expert_bytes + 2 * model.restored_bytes
    expert_s = _rest(base.expert_s, expert_bytes, worker_rate) + computed_bytes / worker_rate
    packing_s = _rest(base.hop_s, base.hidden_bytes * 8, base.link_bits_per_s)
    load_rate = hardware.load_bytes_per_s or (expert_bytes / base.load_s if base.load_s else math.inf)
    load_s = model.expert_bytes / load_rate
    piece_bytes = base.load_piece_s * expert_bytes / base.load_s if base.load_s else 0.0
    return replace(
        base,
        layers=model.layers,
        experts=model.experts,
        top_k=model.top_k,
        hidden_bytes=hidden_bytes,
        kv_bytes=-(-model.cache_token * model.item_bytes // model.layers),
        state_bytes=model.state * model.item_bytes,
        workers=hardware.workers,
        group_size=min(model.top_k, hardware.workers),
        main_layer_s=main_s / hardware.main,
        main_extra_s=base.main_extra_s * read * expert_bytes / expert_elements / main_bytes / hardware.main,
        expert_s=expert_s / hardware.worker,
        expert_extra_s=base.expert_extra_s * model.expert / expert_elements / hardware.worker,
        load_s=load_s,
        load_piece_s=min(load_s, piece_bytes / load_rate),
        hop_s=packing_s / hardware.messages + hidden_bytes * 8 / link,
        link_bits_per_s=link,
        shadow_layer_s=shadow_s / hardware.shadow,
        shadow_extra_s=_shadow_extra_s(setup, expert_elements),
    )


def as_measured(base: Profile, model: ModelSize, shadow: str) -> Profile:
    """The base profile as if its times had been measured with this model: `scale_profile` leaves them as they are. So
    an emulation keeps them, whatever its model."""
    read = model.read * model.item_bytes // model.layers
    sizes = model.expert_bytes, model.expert, read, int(_shadow_read(model, shadow))
    hidden_bytes = model.hidden * model.item_bytes
    rates = (math.inf, math.inf, math.inf)  # no byte takes time, so that all of each time is the part that stays
    return replace(base, model_sizes=sizes, device_rates=rates, hidden_bytes=hidden_bytes, layers=model.layers)


def _rest(seconds: float, amount: float, rate: float) -> float:
    return max(0.0, seconds - amount / rate)


def _shadow_read(model: ModelSize, shadow: str) -> float:
    """Bytes that a shadow reads for one token, per layer with experts."""
    item = SHADOW_BYTES.get(shadow, NO_SHADOW)
    dense = model.linear * item.linear + (model.read - model.linear) * GPU_REST_BYTES
    return dense / model.layers + model.top_k * model.expert * (item.expert + item.restored)


def _shadow_extra_s(setup: Setup, expert_elements: int) -> float:
    """Bound by the bytes of the experts that a further row adds. `expert_elements`: of the base profile's model, whose
    shadow has one byte a parameter."""
    model, base = setup.model, setup.hardware.base
    added = _further_experts(base.experts, base.top_k)
    if not added:
        return 0.0
    item = SHADOW_BYTES.get(setup.policy.shadow, NO_SHADOW)
    nbytes = model.expert * (item.expert + item.restored)
    more = _further_experts(model.experts, model.top_k) * nbytes / (added * expert_elements)
    return base.shadow_extra_s * more / setup.hardware.shadow


def _further_experts(experts: int, top_k: int, rows: int = 8) -> float:
    """Experts that `rows` rows choose beyond those of one, each row independently and evenly."""
    return experts * (1 - (1 - top_k / experts) ** rows) - top_k


def equation_1(profile: Profile, group_size: int) -> LoadBudget:
    """Equation (1), including the time of the main node's link for the embeddings of all top-k experts, each way. A
    worker that serves several experts of a layer loads and computes them one after the other."""
    each = -(-profile.top_k // group_size)
    way_s = max(profile.hop_s, profile.top_k * profile.hidden_bytes * 8 / profile.link_bits_per_s)
    main_s, worker_s = profile.main_layer_s + way_s, each * profile.expert_s + way_s
    return load_budget(profile.workers, group_size, main_s, worker_s, each * profile.load_s)


def workers_needed(budget: LoadBudget) -> int:
    """The smallest number of workers, in groups of the same size, with which equation (1) holds."""
    groups = (budget.load_s + budget.worker_s) / (budget.main_s + budget.worker_s)
    return max(1, math.ceil(groups - 1e-9)) * budget.group_size


def memory(setup: Setup, slots: int, rest_bytes: int = GPU_REST_BYTES) -> dict[str, int]:
    """Bytes of device memory: main node, shadow, each worker, all nodes together, and one device for the whole model,
    with its experts as stored (`whole`) or `whole_dequantised`. `store`: host memory or disk of each worker.
    `rest_bytes`: as of `shadow_bytes`."""
    model, shadow = setup.model, setup.policy.shadow
    main, worker = main_bytes(model, setup.kept_bytes), worker_bytes(model, slots)
    held = shadow_bytes(model, shadow, rest_bytes) + setup.shadow_kept_bytes if shadow != "none" else 0
    return {
        "main": main,
        "shadow": held,
        "worker": worker,
        "together": main + held + setup.hardware.workers * worker,
        "whole": main + model.store_bytes,
        "whole_dequantised": main + model.experts_all * model.item_bytes,
        "store": model.store_bytes,
    }


def alignment_s(profile: Profile, alignment: Alignment) -> float:
    """Seconds in which what a token adds to the caches passes the link to the shadow, and its share of the states."""
    period = alignment.states_every(profile.state_bytes)
    states = profile.state_bytes / period if period else 0.0
    return (profile.layers * profile.kv_bytes + states) * 8 / profile.link_bits_per_s


def compared_tokens(model: ModelSize) -> int:
    """Tokens of an answer whose speed is compared with another's on the same routes. Over the changes of Mixtral-8x7B,
    gpt-oss-120b, Qwen3-30B and DeepSeek-V3, such a comparison was at most 1.5 % off one of five to eleven times as many
    tokens, with another recall 4 %."""
    return min(max(_VISITS_COMPARED // (model.layers * model.top_k), _LEAST_COMPARED), _MOST)


def outcome(
    setup: Setup, group_size: int, slots: int, tokens: int | None = None, prompt_tokens: int | None = None
) -> Outcome:
    """Simulate an answer of `tokens` tokens; None: enough for a stable figure. A prompt delays only the first one.
    Without one only the tokens after that are simulated."""
    tokens = tokens or min(max(_VISITS // (setup.model.layers * setup.model.top_k), _LEAST), _MOST)
    scenario = scenario_of(setup, group_size, slots, tokens, prompt_tokens)
    return simulate(scenario, random_workload(scenario, setup.policy.expected_recall, _SEED))


def first_token_s(setup: Setup, group_size: int, slots: int, prompt_tokens: int) -> float:
    """Seconds to the first token. Of many layers with many experts only the first are simulated, two or more for each
    group of workers. Each further one lasts as long as the mean of these, but for the first quarter. That was at most
    1 % off a simulation of all layers, for DeepSeek-V3 and gpt-oss-120b on eight workers."""
    layers = setup.model.layers
    rounds = -(-2 * setup.hardware.workers // group_size)
    simulated = min(layers, max(_VISITS // setup.model.experts, _LEAST_LAYERS, rounds))
    scenario = scenario_of(setup, group_size, slots, 1, prompt_tokens)
    scenario = replace(scenario, profile=replace(scenario.profile, layers=simulated))
    found = simulate(scenario, random_workload(scenario, setup.policy.expected_recall, _SEED), spans=simulated < layers)
    if simulated == layers:
        return found.ttft_s
    skipped = simulated // 4
    begun = [span.start for span in found.spans if (span.row, span.what) == ("main", "layer")]
    each_s = (found.ttft_s - begun[skipped]) / (simulated - skipped)
    return found.ttft_s + (layers - simulated) * each_s


def scenario_of(setup: Setup, group_size: int, slots: int, tokens: int, prompt_tokens: int | None) -> Scenario:
    """`prompt_tokens`: None if prefill is not simulated."""
    profile = scale_profile(setup)
    return Scenario(
        profile,
        prompt_tokens=prompt_tokens or 1,
        prompt_s=_unpredicted_s(profile) if prompt_tokens is None else None,
        tokens=tokens,
        workers=setup.hardware.workers,
        slots=slots,
        group_size=group_size,
        alignment=setup.policy.alignment,
        system=setup.policy.system,
    )


def _unpredicted_s(profile: Profile) -> float:
    """Seconds of a token whose loads all begin at the gate. In as many before the first token of an answer, the shadow
    gets as far ahead as it does with a short prompt."""
    return profile.layers * (profile.main_layer_s + profile.load_s + profile.expert_s + 2 * profile.hop_s)


@dataclass(frozen=True, slots=True)
class Together:
    """Several requests at once."""

    requests: int
    batch_dense: bool
    """The main node computes its layers for all of them together, rather than for each by itself."""
    draft: int | str = 0
    """As `Scenario.draft`."""


TOGETHER = tuple(Together(4, batched) for batched in (False, True))
"""Those that a plan has figures for. Sixteen requests of a large model would take longer than the rest of its plan."""
DRAFTED = (Together(1, False, AUTO), Together(1, False, 7))
"""Likewise with drafts, if there is a shadow."""


def speed_together(setup: Setup, group_size: int, slots: int, together: Together) -> float:
    """Simulated decode tokens/s of all requests."""
    visits, least = (_VISITS, _LEAST_DRAFTED) if together.draft else (_VISITS_TOGETHER, _LEAST_TOGETHER)
    tokens = max(visits // (setup.model.layers * setup.model.top_k * together.requests), least)
    scenario = replace(
        scenario_of(setup, group_size, slots, tokens, prompt_tokens=None),
        requests=together.requests,
        batch_dense=together.batch_dense,
        draft=together.draft,
    )
    found = simulate_requests(
        scenario, random_arrivals(scenario, setup.policy.expected_recall, _SEED)
    ).decode_tokens_per_s
    return _cap_by_alignment(setup, found or 0.0)


class Detail(NamedTuple):
    """What a plan says of one request."""

    tokens_per_s: float
    luck: float | None
    bound: str | None
    where: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """An answer to simulate; see `outcome`."""

    setup: Setup
    group_size: int
    slots: int
    tokens: int | None = None
    together: Together | None = None
    """Several requests; then `tokens` is not read."""
    prompt: int | None = None
    """Tokens of a prompt, whose first token is waited for."""


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to each run. The results come in order: `map`, or a pool's."""


def rates(each: Each, step: Callable[[], None], runs: Iterable[Run]) -> list[float]:
    """The decode tokens/s of each run, or the seconds to a prompt's first token. Equal runs are simulated once. `step`:
    called after each simulation."""
    runs = list(runs)
    found = {}
    for run, rate in zip(different := list(dict.fromkeys(runs)), each(_rate, different), strict=True):
        step()
        found[run] = rate
    return [found[run] for run in runs]


def _rate(run: Run) -> float:
    if run.prompt is not None:
        return first_token_s(run.setup, run.group_size, run.slots, run.prompt)
    if run.together is not None:
        return speed_together(run.setup, run.group_size, run.slots, run.together)
    return speed(run.setup, run.group_size, run.slots, run.tokens)


def details(run: Run) -> Detail:
    """Of an answer that is long enough for stable figures."""
    found = outcome(run.setup, run.group_size, run.slots)
    rate = found.decode_tokens_per_s or 0.0
    bounded = _cap_by_alignment(run.setup, rate)
    if bounded == rate:
        return Detail(rate, luck(found.ttft_s, found.token_s), found.bottleneck, found.where)
    where = found.where | {"network": found.where.get("network", 0.0) + 1 / bounded - 1 / rate}
    return Detail(bounded, 0.0, "network", where)


def _cap_by_alignment(setup: Setup, rate: float) -> float:
    """Tokens/s with which the link keeps up: predictions are as good as planned only after every token's alignment."""
    alignment, takes_s = setup.policy.alignment, alignment_s(scale_profile(setup), setup.policy.alignment)
    if setup.policy.shadow == "none" or not alignment.kv_period or not takes_s:
        return rate
    return min(rate, 1 / takes_s)


def room_of(setup: Setup) -> int:
    """How many experts fit on a worker. Raises DoesNotFitError if none does, or fewer than the given slots."""
    hardware, slots, room = setup.hardware, setup.policy.slots, setup.hardware.slots(setup.model)
    if slots and hardware.device_bytes is not None and slots > room:
        raise DoesNotFitError(
            f"--slots is {slots}, but --worker-memory {size_text(hardware.device_bytes)} has room for "
            f"{room} expert{'s' * (room > 1)} of {size_text(setup.model.expert_bytes)}; allowed: 1 to {room}"
        )
    return room


def choose(setup: Setup, step: Callable[[], None] = lambda: None, each: Each = map) -> dict[tuple[int, int], float]:
    """(group size, slots) -> tokens/s in an answer of `compared_tokens`, best first. Among equally fast ones, the least
    memory comes first, then the group size nearest to top-k. Raises DoesNotFitError if no expert, or fewer than the
    given slots, fit on a worker."""

    def try_pairs(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        runs = [Run(setup, *pair, compared_tokens(setup.model)) for pair in pairs]
        return dict(zip(pairs, rates(each, step, runs), strict=True))

    policy, workers, top_k = setup.policy, setup.hardware.workers, setup.model.top_k
    room = room_of(setup)
    groups = [policy.group_size] if policy.group_size else _sizes(workers, top_k)
    found = try_pairs([(group, policy.slots or 1) for group in groups])
    fastest = max(found, key=lambda pair: found[pair])[0]
    if not policy.slots:
        found |= try_pairs([(fastest, slots) for slots in sorted({2, min(room, _MOST_SLOTS)}) if slots <= room])
        if room > _BETWEEN and found[fastest, 2] < (1 - _EVEN) * found[fastest, _MOST_SLOTS]:
            found |= try_pairs([(fastest, _BETWEEN)])
    enough = (1 - _EVEN) * max(found.values())
    rank = sorted(
        found, key=lambda p: (found[p] < enough, p[1], abs(p[0] - top_k) if found[p] >= enough else -found[p])
    )
    return {pair: found[pair] for pair in rank}


def _sizes(workers: int, top_k: int) -> list[int]:
    """Group sizes to try. Of sizes with the same number of experts per worker only the smallest, which leaves most
    groups."""
    each = {-(-top_k // size) for size in range(1, min(workers, top_k) + 1)}
    return sorted({-(-top_k // count) for count in each})


def speed(setup: Setup, group_size: int, slots: int, tokens: int | None = None) -> float:
    """Simulated decode tokens/s."""
    return _cap_by_alignment(setup, outcome(setup, group_size, slots, tokens).decode_tokens_per_s or 0.0)


def at_once(setup: Setup) -> Setup:
    """The setup with loads that take no time."""
    return replace(setup, hardware=replace(setup.hardware, load_bytes_per_s=math.inf))


def other_fits(setup: Setup) -> Iterator[Setup]:
    """The setup with the times of each other fit of the base profile."""
    for base in setup.hardware.base.other_fits():
        yield replace(setup, hardware=replace(setup.hardware, base=base))


def size_text(count: float) -> str:
    """`12.3 MB`, `4.56 GB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def best(found: Iterable[Change]) -> Change | None:
    """The possible change with the largest gain, if any gains at least 1 %."""
    top = max((change for change in found if change.real), key=lambda change: change.factor, default=None)
    return top if top is not None and top.factor >= 1.01 else None
