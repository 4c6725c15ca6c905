"""How much all requests together may hold: their bodies, their prompts, and results that wait for their clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from odmoe.api.text_answer import Piece
from odmoe.serve.api_error import BUSY, ApiError

if TYPE_CHECKING:
    from odmoe.serve.answers import AnswerEvent

TOKEN_BYTES = 40
"""Of a prompt's token id, as an object."""
PIECE_BYTES = 400
"""Of a token of an answer, without its text."""
LOGPROB_BYTES = 160
"""Of a log-probability, and of what is written of it."""


class Memory:
    """Whoever holds most gives way when it is too much: many small requests are not refused for a large one.
    Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self.most = most
        self._lock = threading.Lock()
        self._total = 0
        self._holders: set[Held] = set()

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._total

    def open(self, give_up: Callable[[ApiError], None]) -> Held:
        """For a request that holds nothing yet. `give_up`: called from any thread if it has to give way."""
        held = Held(self, give_up)
        with self._lock:
            self._holders.add(held)
        return held

    def change(self, held: Held, nbytes: int) -> None:
        """By so many bytes more, or less."""
        giving_way = []
        with self._lock:
            if held not in self._holders:
                return
            held.nbytes += nbytes
            self._total += nbytes
            while self._total > self.most:
                largest = max(self._holders, key=lambda one: one.nbytes)
                giving_way.append((largest, largest.nbytes))
                self._forget(largest)
        for one, size in giving_way:
            one.give_up(_too_much(size, self.most))

    def close(self, held: Held) -> None:
        """It holds nothing any more."""
        with self._lock:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        if held in self._holders:
            self._holders.discard(held)
            self._total -= held.nbytes
            held.nbytes = 0


class Held:
    """What one request holds."""

    def __init__(self, memory: Memory, give_up: Callable[[ApiError], None]) -> None:
        self._memory, self.give_up = memory, give_up
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """From any thread."""
        self._memory.change(self, nbytes)

    def add_results(self, got: Iterable[AnswerEvent]) -> None:
        """From any thread."""
        self._memory.change(self, sum(map(_bytes_of, got)))

    def free_results(self, got: Iterable[AnswerEvent]) -> None:
        """The client has them."""
        self._memory.change(self, -sum(map(_bytes_of, got)))

    def close(self) -> None:
        """The request has ended."""
        self._memory.close(self)


def _bytes_of(got: AnswerEvent) -> int:
    if not isinstance(got.what, Piece):
        return 0
    step, found = got.what.step, PIECE_BYTES + len(got.what.text)
    for one in (step.logprobs, *(step.prompt_logprobs or ())):
        if one is not None:
            found += LOGPROB_BYTES * (2 + len(one.top))
    return found


def _too_much(size: int, most: int) -> ApiError:
    return ApiError(
        429,
        f"all requests together need more than {most} bytes (--request-memory), and this one, with {size}, most of "
        "all; ask for less at once, or try again later",
        BUSY,
        code="memory_full",
    )
