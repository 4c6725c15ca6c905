"""Steps: which requests' passes run together, and on which thread.

A lone request runs its passes on its own thread. With several open, each request's thread hands its pass in and waits;
one thread, the model's, starts a step with every pass that is there when the step before has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from checkpoint.devices.inference import inference
from main_node.engine.engine import Engine
from main_node.lockstep import LockStep
from main_node.request import Request
from scheduler import types as t
from scheduler.emulation.clock import CREDIT_S
from scheduler.errors import DeadlineError, RequestFailedError
from wire import runtime

GRACE_SHARE, GRACE_S = 0.1, 0.05
"""How long a step waits for the requests of the one before, whose clients have just got their tokens: a share of that
step's time, and at most so many seconds. Without it, requests would fall apart into two halves that take turns, since a
step would start with the first that is back. A client that is slower delays others by no more than this, once. In
emulated time the wait is lateness of the machine, which costs nothing up to `CREDIT_S`."""
IDLE_S = 5.0
"""The model's thread ends when it has had nothing to do for so long; the next step starts it again."""
ABANDON_S = 10.0
"""Longest wait for the pass of an interrupted request to end."""
CLOSE_S = 2.0
"""Longest wait for the end of the model's thread."""


class PassJob:
    """A pass that a request's thread hands in, and its outcome.

    `forward(pass)` runs the model. `tokens`: how many the pass may read; a chunk of a prompt is fewer.
    """

    def __init__(
        self,
        request: Request,
        position: int,
        tokens: int,
        prefill: bool,
        forward: Callable[[t.Pass], tuple[int, ...]],
        enter: Callable[[t.Pass], None],
    ) -> None:
        self.request = request
        self.position, self.tokens, self.prefill = position, tokens, prefill
        self.one = t.Pass(request.number, position, tokens, prefill)
        self.shared = 0
        """Passes in its step. 0: it has not begun."""
        self.rounded = False
        """Products were shared that may have lost the last bit by it."""
        self.gained: tuple[int, ...] = ()
        """The next tokens: one, none after a chunk that does not end the prompt, several after a block."""
        self.ended = runtime.Event()
        self._forward, self._enter = forward, enter
        self._error: BaseException | None = None
        self._around = ExitStack()

    def begin(self, tokens: int, shared: int) -> None:
        """It is part of a step that is about to be announced."""
        self.one = self.one._replace(tokens=tokens)
        self.shared = shared
        self._around.enter_context(self.request.sequence.passing())

    def enter(self) -> None:
        self._enter(self.one)

    def forward(self) -> None:
        self.gained = self._forward(self.one)

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._around.close()
        self.ended.set()

    def outcome(self) -> tuple[int, ...]:
        """The next tokens. Raises what the pass has raised."""
        error, self._error = self._error, None
        if error is None:
            return self.gained
        try:
            raise error
        finally:
            del error  # its frames refer to the request's cache


class Steps:
    """Thread-safe. `deadline_s`: longest wait for a step. `chunk`: most tokens of prompts in a step in which others are
    answered; 0: no bound. `batched`: see `LockStep`. `leave`: called with no request's pass under way any more.
    `on_step_ended`: told of each step its requests and rows, how long it took, and whether it read no prompt; not of
    one in which requests waited for missing workers.
    """

    def __init__(
        self,
        engine: Engine,
        deadline_s: float,
        chunk: int,
        batched: bool,
        leave: Callable[[], None] = lambda: None,
        on_step_ended: Callable[[Sequence[Request], int, float, bool], None] = lambda *_: None,
    ) -> None:
        self._engine = engine
        self._deadline_s, self._chunk, self._batched = deadline_s, chunk, batched
        self._leave, self._on_step_ended = leave, on_step_ended
        self._changed = runtime.Condition()
        self._thread: runtime.Thread | None = None
        self._ready: list[PassJob] = []
        self._busy = self._closed = False
        self._open: set[Request] = set()
        """Those that take part."""
        self._expected: set[Request] = set()
        """Requests of the last step that are not back."""
        self._grace_end = 0.0

    @contextlib.contextmanager
    def taking_part(self, request: Request) -> Iterator[None]:
        """Around all passes of a request, which `run` runs."""
        with self._changed:
            self._open.add(request)
        try:
            yield
        finally:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """It takes part no more. From any thread, at any time. A pass that waits for a step gets RequestFailedError;
        for one under way see `Engine.close_request`."""
        with self._changed:
            self._open.discard(request)
            self._expected.discard(request)
            for job in [job for job in self._ready if job.request is request]:
                self._ready.remove(job)
                job.end(RequestFailedError(f"request {request.number} was closed"))
            self._changed.notify()

    def idle(self) -> bool:
        """Nothing is left of any request."""
        with self._changed:
            return not (self._busy or self._ready or self._open or self._expected)

    def close(self) -> None:
        """The model's thread ends, once it has nothing to do."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the model's thread, after `close` and after the end of whatever its step waits for."""
        with self._changed:
            thread = self._thread
        if thread is not None and thread is not runtime.current_thread():
            thread.join(CLOSE_S)

    def run(self, job: PassJob) -> tuple[int, ...]:
        """Run a pass, or a chunk of it (then `job.one.tokens` says how much), in the next step. Returns the tokens that
        it gives.

        Raises DeadlineError, and what the pass raises.
        """
        with self._changed:
            self._expected.discard(job.request)
            job.request.is_decoding |= not job.prefill
            alone = not self._busy and not self._ready and self._open <= {job.request}
            if alone:
                self._busy = True
            else:
                self._hand_in(job)
        if alone:
            self._run_alone(job)
        else:
            self._await(job)
        return job.outcome()

    # --- a lone request -----------------------------------------------------------------------------------------

    def _run_alone(self, job: PassJob) -> None:
        """On the request's own thread, whole."""
        began = runtime.monotonic()
        try:
            with inference():
                job.begin(job.tokens, 1)
                try:
                    self._engine.begin_step((job.one,))
                    job.enter()
                    with self._timing([job]):
                        job.forward()
                except BaseException as error:
                    job.end(error)
                    raise
                job.end()
        finally:
            self._on_ended([job], began)

    @contextlib.contextmanager
    def _timing(self, jobs: list[PassJob]) -> Iterator[None]:
        began, waited_s = self._engine.pace.now(), self._engine.deadlines.waited_s
        yield
        if self._engine.deadlines.waited_s == waited_s:
            rows, seconds = sum(job.one.tokens for job in jobs), self._engine.pace.now() - began
            prefill = any(job.prefill for job in jobs)
            if not prefill:
                self._engine.prediction_trial.on_step(rows, seconds)
            self._on_step_ended([job.request for job in jobs], rows, seconds, not prefill)

    def _on_ended(self, jobs: list[PassJob], began: float) -> None:
        """A step has ended."""
        self._leave()
        now = runtime.monotonic()
        with self._changed:
            self._busy = False
            for job in jobs:
                job.request.is_decoding |= bool(job.gained)
            back = {job.request for job in self._ready}
            self._expected = {job.request for job in jobs} & self._open - back
            longest_s = CREDIT_S if self._engine.pace.profile_name else GRACE_S
            self._grace_end = now + min(GRACE_SHARE * (now - began), longest_s)
            if self._ready:
                self._changed.notify()

    # --- a request among others ---------------------------------------------------------------------------------

    def _hand_in(self, job: PassJob) -> None:
        if self._thread is None:
            thread = runtime.Thread(target=self._run_steps, name="odmoe-steps", daemon=True)
            thread.start()  # where the machine has no more threads, nothing is left behind
            self._thread = thread
        self._ready.append(job)
        if not self._expected or len(self._ready) == 1:  # else the thread is waiting for those who are missing
            self._changed.notify()

    def _await(self, job: PassJob) -> None:
        """Every wait within a step has a deadline of its own. Raises DeadlineError where none has begun in time, the
        time not counted for which requests wait for missing workers."""
        left_s, before_s = self._deadline_s, self._engine.deadlines.waited_s
        try:
            while not job.ended.wait(left_s):
                waited_s = self._engine.deadlines.waited_s
                left_s, before_s = waited_s - before_s, waited_s
                with self._changed:
                    if job not in self._ready:
                        left_s = self._deadline_s
                    elif left_s <= 0:
                        self._ready.remove(job)
                        raise DeadlineError(
                            f"request {job.request.number} waited {self._deadline_s:g} s for a step; send fewer at once"
                        )
        except BaseException:  # interrupted, or too late
            self.drop(job.request)
            if job.shared:  # its pass ends at its next layer
                self._engine.close_request(job.request.number)
                job.ended.wait(ABANDON_S)
            raise

    # --- the model's thread -------------------------------------------------------------------------------------

    def _run_steps(self) -> None:
        with inference():
            while jobs := self._form():
                began = runtime.monotonic()
                try:
                    self._run(jobs)
                finally:
                    self._on_ended(jobs, began)
                    del jobs  # the thread may wait for long, and a job refers to its request's cache

    def _form(self) -> list[PassJob]:
        """Wait for passes that make a step. Empty: the thread has nothing to do any more."""
        with self._changed:
            while self._busy or not self._ready or (grace_s := self._grace_s()) > 0:
                if self._busy:
                    self._changed.wait(self._deadline_s)
                elif self._ready:
                    self._changed.wait(grace_s)
                elif self._closed or (not self._changed.wait(IDLE_S) and not self._ready):
                    self._thread = None
                    return []
            jobs = self._choose_jobs()
            self._busy = True
            return jobs

    def _grace_s(self) -> float:
        return self._grace_end - runtime.monotonic() if self._expected else 0.0

    def _choose_jobs(self) -> list[PassJob]:
        """All that are ready, but no more of prompts than a chunk while others are answered. The first prompt is read
        in chunks if it must; another joins if it fits as a whole, so that short ones are never split."""
        bound = self._chunk if self._chunk and len(self._open) > 1 else 0
        decoding = any(request.is_decoding for request in self._open)
        room, chosen = bound, []
        for job in self._ready:
            tokens = job.tokens
            if job.prefill and bound:
                first = room == bound
                if not first and decoding and tokens > room:
                    continue
                tokens = min(tokens, bound)
                room -= tokens
            chosen.append((job, tokens))
        for job, tokens in chosen:
            self._ready.remove(job)
            job.begin(tokens, len(chosen))
        return sorted((job for job, _ in chosen), key=lambda job: job.one.request)

    def _run(self, jobs: list[PassJob]) -> None:
        """A step. Nothing is raised: each job keeps what its pass has raised."""
        batched = self._batched and len(jobs) > 1
        try:
            self._engine.begin_step(tuple(job.one for job in jobs), batched)
            with self._timing(jobs):
                LockStep(self._engine, jobs, batched).run()
        except BaseException as error:  # noqa: BLE001 - a defect: every waiting thread must hear of it
            for job in jobs:
                if not job.ended.is_set():
                    job.end(error)
