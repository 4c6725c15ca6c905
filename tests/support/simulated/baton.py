"""Threads of which one runs at a time, and time that jumps when all of them wait.

Each task is a greenlet: to start and to resume a thread in its place took most of a seed's time. Whoever is about to
wait draws who goes on, by the seed. So a seed decides the order of everything, and the same seed gives the same order.
What torch keeps for each thread (inference mode) is that of all tasks.
"""

from __future__ import annotations

import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

MOST_SWITCHES = 400_000
"""Of one world: more is a loop that never waits."""
TICK_S = 1e-7
"""What it takes to read the clock: so a loop that only reads it ends."""


class Killed(BaseException):
    """Raised in a task that is not to go on, wherever it waits."""


class Violation(Exception):
    """Something that must never happen has happened. `trace`: of its world, as far as that went."""

    trace = 0


class Process:
    """Tasks that are frozen and killed together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = self.dead = False
        self.held: list[Task] = []
        """Ready to go on, but frozen."""
        self.on_killed: list[Callable[[], None]] = []


class Task:
    """One simulated thread."""

    def __init__(self, number: int, name: str, process: Process, run: Callable[[], object]) -> None:
        self.number, self.name, self.process, self.run = number, name, process, run
        self.greenlet: greenlet
        """Where it goes on: its own, or a coroutine's that it has resumed."""
        self.wait_number = 0
        """Of the wait under way, so that an older timer of it is told apart."""
        self.waits = False
        self.woken = False
        self.queue: deque[Task] | None = None
        self.holder: Callable[[], Task | None] | None = None
        """Who has what this waits for, without a deadline."""
        self.started = self.ended = False
        self.joiners: deque[Task] = deque()
        self.thread: Any = None
        """What `current_thread` gives."""


class Baton:
    """The scheduler of one world."""

    def __init__(self, seed: int, preempt: float = 0.0) -> None:
        """`preempt`: how likely another task goes on where one only might have to wait."""
        self.random = random.Random(seed)
        self.now = 1000.0
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self.trace = 0
        """A hash of who went on when."""
        self.switches = 0
        self.violation: BaseException | None = None
        self.ending = False
        self._preempt = preempt
        self._numbers = itertools.count(1)
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._outside = getcurrent()

    # --- from outside ---------------------------------------------------------------------------------------------

    def run(self, first: Callable[[], object]) -> None:
        """Run tasks, `first` being the first, until it has ended. Raises what it has raised, or a Violation."""
        main = Process("world")

        def body() -> None:
            try:
                first()
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - raised below
                self.fail(error)
            self.ending = True

        self._outside = getcurrent()
        self.spawn("first", main, body)
        while not self.ending:
            try:
                following = self._draw()
            except Violation as error:
                self.fail(error)
            else:
                self._go_to(following)
        self._unwind()
        if self.violation is not None:
            raise self.violation

    def fail(self, error: BaseException) -> None:
        """The world ends with an error; the first one counts."""
        self.violation = self.violation or error
        self.ending = True

    def alive(self) -> list[Task]:
        """Tasks of living processes that have not ended."""
        return [task for task in self.tasks if not task.ended and not task.process.dead]

    def _unwind(self) -> None:
        """Every task is made to end, one at a time. One that goes on all the same is a violation."""
        for task in self.tasks:
            if task.started and not task.ended:
                self.current = task
                task.greenlet.throw(Killed)
        self.tasks = [task for task in self.tasks if task.started and not task.ended]
        self.current = None
        if self.tasks:
            self.fail(Violation("the world has ended, and these threads have not:\n" + self.where()))

    # --- tasks ------------------------------------------------------------------------------------------------------

    def spawn(self, name: str, process: Process, run: Callable[[], object]) -> Task:
        """A new task, which goes on at some time."""
        task = Task(next(self._numbers), name, process, run)
        task.greenlet = greenlet(partial(self._body, task), parent=self._outside)
        self.tasks.append(task)
        self._make_ready(task)
        return task

    def _body(self, task: Task) -> None:
        """Returns to `run`, or to `_unwind`."""
        task.started = True
        try:
            task.run()
        except Killed:
            pass
        except Violation as error:
            self.fail(error)
        except BaseException as error:  # noqa: BLE001 - a thread of the product that dies is a violation
            if not self.ending:
                text = "".join(traceback.format_exception(error))
                self.fail(Violation(f"thread {task.name} of {task.process.name} died of {error!r}\n{text}"))
        task.ended = True
        task.run = _nothing
        if not self.ending:
            self.wake_all(task.joiners)
            self.tasks.remove(task)

    def kill(self, process: Process) -> None:
        """None of its tasks goes on. The caller may be one of them, and then does not return."""
        process.dead = True
        for act in process.on_killed:
            act()
        if self.current is not None and self.current.process is process:
            self._pass_on(self.current)

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        process.frozen = False
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        self.now += TICK_S
        return self.now

    def point(self) -> None:
        """The caller might have to wait here: another may go on first."""
        if self.ending:
            raise Killed
        if self._preempt and self.random.random() < self._preempt and self.current is not None:
            self._make_ready(self.current)
            self._pass_on(self.current)

    def wait(self, queue: deque[Task] | None, timeout: float | None) -> bool:
        """Until `wake`, in a queue or in none. False after `timeout` seconds."""
        me = self.current
        if self.ending or me is None:
            raise Killed
        me.waits, me.woken, me.queue = True, False, queue
        if queue is not None:
            queue.append(me)
        if timeout is not None:
            heapq.heappush(self._timers, (self.now + max(timeout, 0.0), next(self._numbers), me, me.wait_number))
        self._pass_on(me)
        return me.woken

    def wait_for_holder(self, queue: deque[Task], holder: Callable[[], Task | None]) -> None:
        """As `wait`, for what another task holds now. The world ends if that waits for the caller, by any others."""
        me = self.current
        if self.ending or me is None:
            raise Killed
        me.holder = holder
        circle: list[Task] = []
        following: Task | None = me
        while following is not None and following not in circle:
            circle.append(following)
            following = following.holder() if following.holder is not None else None
        if following is not None:
            names = " -> ".join(f"{task.process.name}: {task.name}" for task in [*circle, following])
            self.fail(Violation(f"threads wait for each other's locks: {names}"))
            raise Killed
        self.wait(queue, None)
        me.holder = None

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def wake(self, queue: deque[Task]) -> None:
        """The first in a queue goes on at some time."""
        if queue:
            task = queue.popleft()
            task.queue = None
            self._end_wait(task, True)

    def wake_all(self, queue: deque[Task]) -> None:
        while queue:
            self.wake(queue)

    def _end_wait(self, task: Task, woken: bool) -> None:
        task.waits, task.woken = False, woken
        task.wait_number += 1
        if task.queue is not None:
            task.queue.remove(task)
            task.queue = None
        self._make_ready(task)

    def _make_ready(self, task: Task) -> None:
        if task.process.frozen:
            task.process.held.append(task)
        else:
            self._ready.append(task)

    # --- who goes on ------------------------------------------------------------------------------------------------

    def _pass_on(self, me: Task) -> None:
        """Another goes on. Returns when `me` does."""
        try:
            following = self._draw()
        except Violation as error:
            self.fail(error)
            raise Killed from error
        if following is not me:
            me.greenlet = getcurrent()
            self._go_to(following)
            self.current = me
        if self.ending:
            raise Killed

    def _go_to(self, task: Task) -> None:
        self.current = task
        task.greenlet.switch()

    def _draw(self) -> Task:
        self.switches += 1
        if self.switches > MOST_SWITCHES:
            raise Violation(f"no end after {MOST_SWITCHES} switches")
        while True:
            while self._ready:
                ready = self._ready
                index = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
                ready[index], ready[-1] = ready[-1], ready[index]
                task = ready.pop()
                if task.process.dead:
                    continue
                if task.process.frozen:
                    task.process.held.append(task)
                    continue
                self.trace = hash((self.trace, task.number, self.now))
                return task
            self._jump()

    def _jump(self) -> None:
        """Everybody waits: to the end of the next wait."""
        while self._timers:
            at, _, task, number = heapq.heappop(self._timers)
            if task.wait_number == number and task.waits and not task.process.dead:
                self.now = max(self.now, at)
                self._end_wait(task, False)
                return
        raise Violation("every thread waits for another, and none has a deadline:\n" + self.where())

    def where(self) -> str:
        """The tasks that have not ended."""
        return "\n".join(f"  {task.process.name}: {task.name}" for task in self.alive())


def _nothing() -> None:
    pass
