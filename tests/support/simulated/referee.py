"""Plays a plan and judges what the clients and the nodes say.

Each answer is what Transformers gives, or ends with an error of our tree; none is open longer than the bound after its
last progress; afterwards nothing is left of any request; and once all faults have ended, a right answer comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from odmoe.settings.settings import Settings
from scheduler import types as t
from scheduler.core.state import InconsistentStateError
from scheduler.errors import NonFiniteError, ODMoEError, RequestCancelledError
from support.simulated.baton import Process, Task, Violation
from support.simulated.hosts import Host, Made
from support.simulated.plan import FAULTS, PROMPTS, Client, Fault, Plan, Played, heal
from support.simulated.world import ANSWER_S, PREDICTIONS_S, WORKER_S, Answered, World

BOUND_S = WORKER_S + 3 * ANSWER_S + PREDICTIONS_S + 1.0
"""From the last progress to the end: `Deadlines.stall_s`, the wait for the last predictions, and a second for looks
and for turns."""
LOOK_S = 0.25
HANDLER_FAILED = "handling a message of"
"""In the reason for a loss: an exception that is not of our tree, on a stream's thread."""
BACK_S = 20.0
"""The longest pause of the reconnector after losses, 16 s, and an attempt."""
VALIDATED = 4
"""In every so manieth world the core's books are counted anew after each event."""
IDLE_S = 8.0
"""Until nothing is left: threads end when they have had nothing to do for 5 s."""


class Referee:
    """Of one world. `answers`: by prompt, what Transformers gives."""

    def __init__(self, plan: Plan, made: Made, model: str, answers: Mapping[int, Sequence[int]]) -> None:
        self.plan, self._answers = plan, answers
        fields = dict(plan.settings)
        settings = Settings(model=model, loader="disk", threads=1, worker_wait=WORKER_S, queue=8, **fields)
        self.world = World(plan.seed, made, settings, plan.preempt)
        self._baton = self.world.baton
        self._progress = self._last_progress = 0.0
        self._frozen_until = 0.0
        self._open: dict[str, float] = {}
        """Client -> when it last got something."""
        self._tokens = 0
        self._errors: list[str] = []

    def play(self) -> Played:
        """Raises Violation."""
        try:
            trace = self.world.run(lambda world: self._play())
        except Exception as error:
            what = str(error) if isinstance(error, Violation) else repr(error)
            told = Violation(f"{what}\n{self.plan}")
            told.trace = self._baton.trace
            raise told from error
        baton = self._baton
        return Played(self.plan, trace, self._tokens, self._errors, baton.now - 1000.0, baton.switches)

    def _play(self) -> None:
        world, baton, plan = self.world, self._baton, self.plan
        outside = baton.current
        assert outside is not None
        world.main.engine.add_observer(self)
        tasks = [self._spawn_client(f"client {number}", one) for number, one in enumerate(plan.clients)]
        faults = Process("faults")
        for fault in plan.faults:
            baton.spawn(fault.kind, faults, partial(self._act, fault))
        for host in world.hosts:
            baton.spawn("supervisor", outside.process, partial(self._supervise, host))
        self._await(tasks, baton.now + plan.heals_s)
        lost = world.main.engine.peers.lost
        if plan.is_harmless and lost:
            raise Violation(f"{', '.join(lost)} was lost, though nothing was wrong: {self._why_lost()}")
        heal(world, faults)
        self._await(tasks)
        if HANDLER_FAILED in (why := self._why_lost()):
            raise Violation(f"a node's own code failed at a message: {why}")
        self._nothing_left()
        self._one_right_answer()
        self._nothing_left()
        world.in_main("close", world.close)
        self._no_threads()

    # --- faults -----------------------------------------------------------------------------------------------------

    def _act(self, fault: Fault) -> None:
        self._baton.sleep(fault.at_s)
        hosts = self.world.hosts
        host = hosts[fault.host % len(hosts)]
        FAULTS[fault.kind](self.world, host, fault)
        self._baton.wake_all(host.address.there.waiting)
        self._baton.wake_all(host.address.back.waiting)
        if fault.kind == "main frozen":
            self._note()

    def _supervise(self, host: Host) -> None:
        while True:
            self._baton.sleep(self.plan.restart_s)
            if host.address.process is None:
                host.start()

    # --- clients ----------------------------------------------------------------------------------------------------

    def _spawn_client(self, name: str, client: Client, must: bool = False) -> Task:
        return self._baton.spawn(name, self.world.main_process, lambda: self._visit(name, client, must))

    def _visit(self, name: str, client: Client, must: bool) -> None:
        self._baton.sleep(client.at_s)
        got = Answered()
        self._open[name] = self._baton.now
        try:
            self._ask(name, client, got)
        except Exception as error:  # noqa: BLE001 - judged below
            got.error = error
        del self._open[name]
        self._judge(name, client, got, must)

    def _ask(self, name: str, client: Client, got: Answered) -> None:
        answer: Any = self.world.main.generate(list(PROMPTS[client.prompt]), client.tokens, ignore_eos=True)
        if client.fate == "cancel":
            self._baton.spawn("leaves", self.world.main_process, lambda: self._cancel(answer, client))
        for step in answer:
            self._open[name] = self._baton.now
            if step.token_id is not None:
                got.tokens.append(step.token_id)
            got.report = step.report
            if client.fate in ("close", "drop") and len(got.tokens) >= client.leaves:
                if client.fate == "close":
                    answer.close()
                del answer
                return

    def _cancel(self, answer: Any, client: Client) -> None:
        self._baton.sleep(0.03 * client.leaves)
        answer.cancel()

    def _judge(self, name: str, client: Client, got: Answered, must: bool) -> None:
        expected = list(self._answers[client.prompt][: client.tokens])
        self._tokens += len(got.tokens)
        self._baton.trace = hash((self._baton.trace, *got.tokens))
        if got.tokens != expected[: len(got.tokens)]:
            raise Violation(f"{name} got {got.tokens} in place of {expected}")
        error = got.error
        if error is None:
            if client.fate == "end" and got.tokens != expected:
                raise Violation(f"{name} got {got.tokens} of {expected}, and no error")
            if client.fate == "end" and (got.report is None or list(got.report.token_ids) != expected):
                raise Violation(f"{name} got a report of other tokens than {expected}: {got.report}")
            return
        if not isinstance(error, ODMoEError):
            raise Violation(f"{name} got {error!r}, which is not of our tree") from error
        self._errors.append(f"{type(error).__name__}: {error}")
        if isinstance(error, NonFiniteError):
            raise Violation(f"{name} is told that the model is wrong, which it is not: {error}")
        if isinstance(error, RequestCancelledError) and client.fate == "end":
            raise Violation(f"{name} was cancelled, and has not asked for that: {error}")
        if not (isinstance(error, RequestCancelledError) or "worker" in str(error)):
            raise Violation(f"{name} is not told whose fault it is: {type(error).__name__}: {error}")
        if "defect" in str(error):
            raise Violation(f"{name} got an error that calls itself a defect: {error}")
        if must or (self.plan.is_harmless and client.fate == "end"):
            raise Violation(f"{name} got no answer, though nothing was wrong: {type(error).__name__}: {error}")

    # --- what may not be --------------------------------------------------------------------------------------------

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `Observer`."""
        core = self.world.main.engine.core
        if isinstance(event, t.GateFired) or core.progress != self._progress:
            self._progress = core.progress
            self._note()
        if self.plan.seed % VALIDATED == 0:
            try:
                core.validate()
            except InconsistentStateError as error:  # a stream would take it for the peer's fault
                self._baton.fail(error)

    def _why_lost(self) -> str:
        return "; ".join(self.world.main.engine.peers.membership.since(0)[1])

    def _note(self) -> None:
        self._last_progress = self._baton.now

    def _await(self, tasks: list[Task], until: float = math.inf) -> None:
        """The end of these clients, each within the bound after the last progress."""
        while any(not task.ended for task in tasks) and self._baton.now < until:
            self._baton.sleep(LOOK_S)
            for name, since in self._open.items():
                waited_s = self._baton.now - max(since, self._last_progress)
                if waited_s > BOUND_S:
                    raise Violation(f"{name} has waited {waited_s:.1f} s for anything; the bound is {BOUND_S:g} s")

    def _nothing_left(self) -> None:
        main, end = self.world.main, self._baton.now + IDLE_S
        engine, core = main.engine, main.engine.core
        while self._baton.now < end and not (engine.idle() and main.steps.idle()):
            self._baton.sleep(LOOK_S)
        left = {
            "engine": not engine.idle(),
            "steps": not main.steps.idle(),
            "stats": dict(core.stats),
            "places": main.admission.counts() != (0, 0),
        }
        if any(left.values()):
            raise Violation(f"something is left of requests that have ended: {left}")
        core.validate()

    def _one_right_answer(self) -> None:
        """All faults have ended. A worker that was dropped for its outputs is a new process now. The main node learns
        of it at its next attempt, and nobody waits for that: until then requests fail, by name."""
        end = self._baton.now + BACK_S
        while self.world.main.engine.peers.banned_workers() and self._baton.now < end:
            self._baton.sleep(LOOK_S)
        self._await([self._spawn_client("client after", Client(0.0, 0, 4, "end", 0), must=True)])

    def _no_threads(self) -> None:
        end = self._baton.now + IDLE_S
        while (left := self._threads() + self._in_slots()) and self._baton.now < end:
            self._baton.sleep(LOOK_S)
        if left:
            raise Violation(f"the main node is closed, and these are left: {left}")

    def _in_slots(self) -> list[str]:
        """Streams and experts that workers still hold."""
        nodes: list[Any] = [host.address.node for host in self.world.hosts if host.address.node is not None]
        held = [f"an expert in {node.name}" for node in nodes for one in _content(node) if one is not None]
        return held + [f"a stream of {node.name}" for node in nodes for _ in node.sessions._open]

    def _threads(self) -> list[str]:
        processes = [self.world.main_process, *(host.address.process for host in self.world.hosts)]
        return [f"{task.process.name}: {task.name}" for task in self._baton.alive() if task.process in processes]


def _content(node: Any) -> list[Any]:
    """Of a worker's slots; a shadow has none."""
    return list(node.slots._content) if hasattr(node, "slots") else []
