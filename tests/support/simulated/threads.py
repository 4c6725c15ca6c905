"""Locks, queues and threads of a simulated world: what `wire.runtime` gives to the nodes in it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from support.simulated.baton import Baton, Task


class Lock:
    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._owner: Task | None = None
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        baton = self._baton
        baton.point()
        if self._owner is not None:
            if not blocking:
                return False
            end = baton.now + timeout
            while self._owner is not None:
                if timeout < 0:
                    baton.wait_for_holder(self._waiting, self._holder)
                elif not baton.wait(self._waiting, end - baton.now):
                    return False
        self._owner = baton.current
        return True

    def release(self) -> None:
        if self._owner is None and not self._baton.ending:
            raise RuntimeError("release of a lock that nobody holds")
        self._owner = None
        self._baton.wake(self._waiting)

    def _holder(self) -> Task | None:
        return self._owner

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock:
    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._lock = Lock(baton)
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock._owner is not self._baton.current and not self._lock.acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        if self._lock._owner is not self._baton.current and not self._baton.ending:
            raise RuntimeError("release of a lock of another thread")
        self._count -= 1
        if not self._count:
            self._lock.release()

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    def __init__(self, baton: Baton, lock: Any = None) -> None:
        self._baton = baton
        self._lock = lock if lock is not None else RLock(baton)
        self._waiting: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, baton = self._lock, self._baton
        held = 1
        if isinstance(lock, RLock):
            held, lock._count = lock._count, 0
            lock._lock.release()
        else:
            lock.release()
        try:
            return baton.wait(self._waiting, timeout)
        finally:
            if not baton.ending:
                if isinstance(lock, RLock):
                    lock._lock.acquire()
                    lock._count = held
                else:
                    lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._baton.now + timeout
        found = predicate()
        while not found:
            left = None if end is None else end - self._baton.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            found = predicate()
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(n):
            self._baton.wake(self._waiting)

    def notify_all(self) -> None:
        self._baton.wake_all(self._waiting)


class Event:
    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._is_set = False
        self._waiting: deque[Task] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._baton.wake_all(self._waiting)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._baton.wait(self._waiting, timeout)
        else:
            self._baton.point()
        return self._is_set


class SimpleQueue:
    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._baton.wake(self._waiting)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        baton = self._baton
        baton.point()
        end = None if timeout is None else baton.now + timeout
        while not self._items:
            if not block or (end is not None and baton.now >= end):
                raise queue.Empty
            baton.wait(self._waiting, None if end is None else end - baton.now)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Thread:
    def __init__(
        self,
        baton: Baton,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._baton = baton
        self.name, self.daemon = name, daemon
        self._target: Callable[[], object] | None = partial(target, *args, **(kwargs or {})) if target else None
        self._task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target()

    def start(self) -> None:
        current = self._baton.current
        assert current is not None, "threads of a world are started in it"
        self._task = self._baton.spawn(self.name, current.process, self.run)
        self._task.thread = self

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is None or task.ended:
            return
        if timeout is None:
            self._baton.wait_for_holder(task.joiners, lambda: task)
        else:
            self._baton.wait(task.joiners, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended


class Timer(Thread):
    def __init__(self, baton: Baton, interval: float, function: Callable[..., object], args: Any = ()) -> None:
        super().__init__(baton, name="timer")
        self._interval, self._function, self._args = interval, function, args
        self._finished = Event(baton)

    def cancel(self) -> None:
        self._finished.set()

    def run(self) -> None:
        if not self._finished.wait(self._interval):
            self._function(*self._args)


class Future:
    def __init__(self, baton: Baton) -> None:
        self._done = Event(baton)
        self._result: Any = None
        self._error: BaseException | None = None

    def fulfil(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class ThreadPoolExecutor:
    """With one thread, which is all that the nodes ask for."""

    def __init__(self, baton: Baton, max_workers: int, thread_name_prefix: str = "pool") -> None:
        assert max_workers == 1
        self._baton, self._name = baton, thread_name_prefix
        self._jobs = SimpleQueue(baton)
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        made = Future(self._baton)
        self._jobs.put(partial(made.fulfil, partial(call, *args)))
        if self._thread is None:
            self._thread = Thread(self._baton, target=self._work, name=self._name)
            self._thread.start()
        return made

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            self._jobs._items.clear()
        self._jobs.put(None)
        if wait and self._thread is not None:
            self._thread.join()


class SimulatedRuntime:
    """All names of `wire.runtime`, for one world."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        kinds: tuple[type, ...] = (Lock, RLock, Condition, Event, SimpleQueue, Thread, Timer, ThreadPoolExecutor)
        for kind in kinds:
            setattr(self, kind.__name__, partial(kind, baton))
        self.monotonic = self.perf_counter = baton.clock
        self.sleep = baton.sleep

    def monotonic_ns(self) -> int:
        return int(self._baton.clock() * 1e9)

    def current_thread(self) -> Any:
        task = self._baton.current
        if task is None:
            return threading.current_thread()
        if task.thread is None:
            task.thread = Thread(self._baton, name=task.name)
            task.thread._task = task
        return task.thread
