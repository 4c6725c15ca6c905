"""Faults on a running cluster under load, for a set time or number of requests, and what they cost."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from odmoe.chaos.faults import MAIN, Fault, Victims
from odmoe.chaos.limit import TimeLimit
from odmoe.chaos.load import Ask, Load, Outcome, Prompt, ask_once
from odmoe.chaos.referee import Calm, Strike, Verdict, judge
from odmoe.chaos.usage import Usage
from scheduler.errors import LaunchError, ODMoEError, WrongOutputError

if TYPE_CHECKING:
    from odmoe.clusters.base import Cluster

BACK_S = 180.0
"""Longest wait for nodes to come back after a fault."""
NOTICED_S = 2.0
"""From the beginning of a fault until its victims count as lost if they are."""
LOOK_S = 0.1
REST_S = (0.1, 0.6)
"""Between a cluster that is whole and the next fault."""
START_S, END_S = 600.0, 600.0
"""The longest time until the first fault, and from the end of the faults' time to the verdict, without the two bounds
for open answers and for those after the faults."""
LEAVE_S = 2.0
"""For clients to leave when a run is cut short."""
WAITS_S = 90.0
"""Three losses of 30 s that count for an expert: with `--worker-wait` the bound of docs/promises.md."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done. It ends after `seconds`, or once `requests` have ended, if that is given and sooner."""

    seconds: float
    faults: Sequence[Fault]
    seed: int = 0
    clients: int = 2
    requests: int | None = None
    worker_wait_s: float = 60.0
    places: int = 8
    """Requests that are answered at once."""

    @property
    def bound_s(self) -> float:
        """The longest time from the last progress of a request to its end."""
        return self.worker_wait_s + WAITS_S

    @property
    def waits_for_place(self) -> bool:
        """Whether the time to a first token has no bound."""
        return self.clients > self.places


class Nodes(Victims, Protocol):
    """What is disturbed, and looked at."""

    clients: Load | None
    """Who leaves in `leave`."""

    def missing(self) -> list[str]:
        """Names of the nodes that do not serve just now."""

    def mend(self) -> None:
        """Do what a client does once nodes are missing."""

    def usage(self) -> dict[str, Usage]:
        """What each node's process holds, by name."""


Say = Callable[[str], None]


class Disturbance:
    """One run. `ask`: as for `Load`. `wrong`: a prompt that must be refused."""

    def __init__(self, nodes: Nodes, ask: Ask, prompts: Sequence[Sequence[int]], tokens: int, wrong: list[int]) -> None:
        self._nodes, self._ask, self._wrong = nodes, ask, wrong
        self._asked, self._tokens = prompts, tokens
        self._doing = ""
        self._hanging = 0
        self._missing: list[str] = []
        self._after: Calm | None = None
        self.strikes: list[Strike] = []

    def run(self, plan: Plan, say: Say = lambda text: None) -> Verdict:
        """For the main thread. Once faults have begun, Ctrl-C and the end of `END_S` give a verdict on what was seen.

        Raises ODMoEError if the cluster does not answer before any fault, or answers differently twice."""
        self._say = say
        limit = TimeLimit(START_S)
        try:
            with limit:
                prompts, before = self._start(plan)
        except KeyboardInterrupt:
            if not limit.is_over:
                raise
            raise LaunchError(f"no answers of all nodes within {START_S:g} s, without any fault") from None
        load = Load(self._ask, prompts, plan.clients, plan.seed, self._wrong)
        self._nodes.clients = load
        began, cut = time.monotonic(), ""
        limit = TimeLimit(plan.seconds + END_S + 2 * plan.bound_s)
        try:
            with limit:
                self._disturb(plan, load, began)
                self._end(plan, load, prompts)
        except KeyboardInterrupt:
            cut = self._doing
            self._hanging = load.late(plan.bound_s, plan.waits_for_place)
            load.abandon(LEAVE_S)
        return judge(
            load.outcomes,
            self.strikes,
            before,
            self._after,
            seconds=time.monotonic() - began,
            hanging=self._hanging,
            missing=self._missing,
            bound_s=plan.bound_s,
            waits_for_place=plan.waits_for_place,
            interrupted="" if limit.is_over else cut,
            unfinished=cut if limit.is_over else "",
        )

    def _tell(self, doing: str) -> None:
        self._doing = doing
        self._say(doing)

    def _start(self, plan: Plan) -> tuple[list[Prompt], Calm]:
        self._tell("answers without faults")
        prompts = [Prompt(list(ids), self._calm_answer(ids)) for ids in self._asked]
        if missing := self._wait_until_whole():  # a shadow starts with the first answer
            raise LaunchError(f"{', '.join(missing)} did not serve within {BACK_S:g} s, without any fault")
        before = self._calm(prompts, plan.bound_s)
        if before.changed:
            raise WrongOutputError("two answers to one prompt differ without any fault; give settings that are exact")
        return prompts, before

    def _end(self, plan: Plan, load: Load, prompts: Sequence[Prompt]) -> None:
        self._tell("waiting for the open answers")
        self._hanging = load.close(plan.bound_s)
        self._tell("answers after the faults")
        self._missing = self._wait_until_whole()
        self._after = self._calm(prompts, plan.bound_s)

    def _disturb(self, plan: Plan, load: Load, began: float) -> None:
        """Ends early if a node does not come back. A fault that hit nobody is none."""
        rng = random.Random(plan.seed)
        while not self._is_over(plan, load, began):
            done = f"{len(self.strikes)} faults, {len(load.outcomes)} answers, {time.monotonic() - began:.0f} s"
            if not plan.faults:
                self._tell(done)
                time.sleep(LOOK_S)
                continue
            fault = rng.choice(plan.faults)
            time.sleep(rng.uniform(*REST_S))
            self._tell(f"{done}: {fault.name}")
            at = time.monotonic()
            victim = fault.strike(self._nodes, rng)
            over = time.monotonic()
            if victim:
                self._tell(f"{done}: {fault.name} of {victim}, until all nodes serve")
                time.sleep(max(LOOK_S, at + NOTICED_S - over))
            missing = self._wait_until_whole()
            if victim:
                self.strikes.append(Strike(fault.name, victim, at, over, time.monotonic(), tuple(missing)))
            if missing:  # the referee names them; more faults would tell nothing
                return

    def _is_over(self, plan: Plan, load: Load, began: float) -> bool:
        enough = plan.requests is not None and len(load.outcomes) >= plan.requests
        over = time.monotonic() - began >= plan.seconds
        return enough or over or load.late(plan.bound_s, plan.waits_for_place) > 0

    def _wait_until_whole(self) -> list[str]:
        """Names of the nodes that are not back in time."""
        end = time.monotonic() + BACK_S
        while (missing := self._nodes.missing()) and time.monotonic() < end:
            self._nodes.mend()
            time.sleep(LOOK_S)
        return list(missing)

    def _calm(self, prompts: Sequence[Prompt], bound_s: float) -> Calm:
        """Each prompt once, without faults, and what the nodes hold then."""
        outcomes = [Outcome(prompt, len(prompt.expected)) for prompt in prompts]
        began = time.monotonic()
        asking = threading.Thread(target=self._ask_each, args=(outcomes,), daemon=True)
        asking.start()
        asking.join(bound_s)
        seconds = time.monotonic() - began
        return Calm(outcomes, sum(len(one.tokens) for one in outcomes) / seconds, self._nodes.usage())

    def _ask_each(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            ask_once(self._ask, one)

    def _calm_answer(self, ids: Sequence[int]) -> list[int]:
        with self._ask(ids, self._tokens) as answer:
            return list(answer)


class ClusterNodes:
    """The nodes of a Ray cluster as `Disturbance` needs them. `processes`: an `odmoe.on_ray.victims.NodeProcesses`."""

    def __init__(self, cluster: Cluster, processes: Any) -> None:
        self.clients: Load | None = None
        self._cluster = cluster
        self.workers, self.kill, self.spoil = processes.workers, processes.kill, processes.spoil
        self.missing, self.usage = processes.missing, processes.usage

    def leave(self) -> int:
        return 0 if self.clients is None else self.clients.leave()

    def mend(self) -> None:
        """Find a main node that was started again."""
        if self.missing() != [MAIN]:
            return
        with contextlib.suppress(ODMoEError):
            self._cluster.rejoin(BACK_S, threading.Event())


def ask_cluster(cluster: Cluster) -> Ask:
    """The cluster's answers as `Load` asks for them, greedy, with no regard to the end of a sequence."""
    from main_node.sampling import GREEDY

    @contextlib.contextmanager
    def ask(prompt: Sequence[int], count: int) -> Iterator[Any]:
        with cluster.generate(list(prompt), count, ignore_eos=True, sampling=GREEDY) as answer:
            yield _Tokens(answer)

    return ask


class _Tokens:
    """The tokens of an answer, which may be cancelled from another thread."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.cancel = answer.cancel

    def __iter__(self) -> Iterator[int]:
        return (step.token_id for step in self._answer if step.token_id is not None)
