"""One request on the main node: its tokens, its KV cache, and the messages that carry both to the shadow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from checkpoint import kv
from checkpoint.devices.streams import HostCopies
from checkpoint.tensors import tensor_bytes
from scheduler import types as t
from scheduler.alignment import LATE, Alignment
from scheduler.errors import LinkError
from wire import messages as w
from wire import runtime

ALIGN_PART_BYTES = 1 << 20
"""KV rows travel in parts of about this size: large messages are slow to encode and would delay the next ones."""


MOST_BYTES = (2 << 30) - (16 << 20)
"""Of KV rows in page-locked memory: as many as a shadow takes before it has read them (`shadow_node.node`), less what
messages take beside their rows."""

_log = logging.getLogger(__name__)


class Sequence:
    """A request's tokens, and the cache that its passes have filled so far."""

    def __init__(self, prompt: list[int], max_new_tokens: int, cache: Any) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.cache = cache
        self.tokens: list[int] = []
        self._before: Any = None
        """The cache of the tokens so far, while they are read again."""
        self._states_sent: int | None = None
        """The last decode pass with whose KV rows the shadow was sent states."""
        self._resting = True

    def prompt_before(self, step: int) -> tuple[int, ...]:
        """All tokens before decode pass `step`'s."""
        return (*self.prompt, *self.tokens[:step])

    def token_of(self, step: int) -> int:
        """The token that decode pass `step` reads."""
        return self.tokens[step]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass, entered before the scheduler knows of it: meanwhile the cache's states are half written."""
        self._resting = False
        try:
            yield
        finally:
            self._resting = True

    def kv_rows(self, start: int, stop: int, states: bool = True) -> kv.CachePiece:
        """The cache's rows of positions [start, stop), and its `states`. No rows if start == stop."""
        return kv.take(self._shown, start, stop, self._resting, states)

    def take_turn(self, command: t.Align, policy: Alignment, travels: bool) -> bool:
        """Whether states go with the command's rows: the first time, then as the policy says if they travel to another
        process."""
        if not command.kv_start:
            self._states_sent = None
        if not self._resting or command.kv_start == command.kv_stop:
            return False
        period, sent = policy.states_every(kv.state_bytes(self._shown) if travels else 0), self._states_sent
        due = period > 0 and (sent is None or command.step - sent >= period)
        self._states_sent = command.step if due else sent
        return due

    @property
    def _shown(self) -> Any:
        """The cache that the shadow is told of."""
        return self.cache if self._before is None else self._before

    @contextlib.contextmanager
    def reading_again(self, cache: Any) -> Iterator[None]:
        """Around the passes that read all tokens so far again, into an empty cache."""
        self._before, self.cache = self.cache, cache
        try:
            yield
        finally:
            self._before = None

    def free(self) -> None:
        """No pass follows: give up the cache."""
        self.cache = None

    def cache_bytes(self) -> int:
        """From any thread, also while another one frees it."""
        return sum(kv.cache_bytes(cache) for cache in (self.cache, self._before) if cache is not None)


class Carrier:
    """How an alignment's KV rows reach the shadow. `travels`: from a cache on an accelerator to another process, and so
    by way of the host; else they are passed as they are. `most_bytes`: of the copies that may be on the host or on the
    way to it, until `end`."""

    def __init__(self, travels: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self.travels = travels
        self.begun_bytes = 0
        """Of all copies from an accelerator so far."""
        self._ended_bytes = 0
        self._counting = runtime.Lock()
        self._most_bytes = most_bytes
        self._copies: HostCopies | None = None

    def begin(self, tensors: list[torch.Tensor]) -> Callable[[], tuple[w.Tensor | w.LocalTensor, ...]]:
        """Enqueue the copies of one part. The function that is returned waits for their end. Both raise LinkError where
        rows cannot be copied."""
        away = [tensor for tensor in tensors if tensor.numel() and not tensor.is_cpu]
        if not away:
            return lambda: tuple(w.Tensor(*tensor_bytes(tensor)) for tensor in tensors)
        if not self.travels:
            return lambda: tuple(w.LocalTensor(tensor, tensor_bytes) for tensor in tensors)
        self._reserve(sum(tensor.nbytes for tensor in away))
        with _copying():
            self._copies = self._copies or HostCopies(away[0].device)
            landing = self._copies.begin(away)

        def wait() -> tuple[w.Tensor, ...]:
            with _copying():
                arrived = iter(landing.wait())
            host = [next(arrived) if tensor.numel() and not tensor.is_cpu else tensor for tensor in tensors]
            return tuple(w.Tensor(*tensor_bytes(tensor)) for tensor in host)

        return wait

    def has_room(self, nbytes: int, copied: bool) -> bool:
        """Whether rows of so many bytes may be on the way at once. `copied`: from an accelerator, and so beside the
        copies that wait already."""
        waiting = self.begun_bytes - self._ended_bytes if copied and self.travels else 0
        return waiting + nbytes <= self._most_bytes

    def _reserve(self, nbytes: int) -> None:
        """Raises LinkError."""
        waiting = self.begun_bytes - self._ended_bytes
        if waiting + nbytes > self._most_bytes:
            raise LinkError(
                f"{waiting} bytes of KV rows wait to be sent to the shadow, {self._most_bytes} may: it or the link "
                "does not keep up; give --align-kv 0 or a smaller --shadow"
            )
        self.begun_bytes += nbytes

    def end(self, nbytes: int) -> None:
        """So many bytes of copies are sent or dropped."""
        with self._counting:
            self._ended_bytes += nbytes


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    """Raises LinkError for an error of the device, its driver or of page-locked memory: torch's are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(f"KV rows were not copied from the accelerator: {type(error).__name__}: {error}") from error


def shadow_messages(
    command: t.Follow | t.Align | t.Unfollow,
    data: Sequence | None,
    policy: Alignment,
    lookahead: int,
    departure: str,
    carrier: Carrier | None = None,
) -> Iterable[w.Message]:
    """The messages of a command. `data`: None for a request that the shadow need not follow any more."""
    if isinstance(command, t.Unfollow) or data is None:
        return [w.CloseRequest(command.request)]
    if isinstance(command, t.Follow):
        prompt, periods = data.prompt_before(command.step), (policy.token_period, policy.kv_period)
        late = departure == LATE
        return [w.OpenRequest(command.request, prompt, command.step, data.max_new_tokens, *periods, lookahead, late)]
    token = data.token_of(command.step) if command.token else None
    before = tuple(data.tokens[command.step - command.before : command.step])
    carrier = carrier or Carrier()
    rows = data.kv_rows(command.kv_start, command.kv_stop, data.take_turn(command, policy, carrier.travels))
    if not command.kv_start and not _fits(rows, carrier):
        _log.warning(
            "request %d: the KV rows of its first %d tokens take %d bytes, too many to be sent to the shadow at once, "
            "which keeps its own and predicts less well; give shorter prompts or fewer at once",
            *(command.request, command.kv_stop, rows.nbytes),
        )
        rows = kv.CachePiece(command.kv_stop, command.kv_stop)
    return _align_messages(command, token, rows, carrier, before)


def _fits(rows: kv.CachePiece, carrier: Carrier) -> bool:
    """Of a request's first rows. A shadow that was lost because of them would get them again, for ever."""
    return carrier.has_room(rows.nbytes, not all(tensor.is_cpu for tensor in rows.tensors))


def align_messages(command: t.Align, token: int | None, rows: kv.CachePiece) -> list[w.Message]:
    """An alignment as one message, or several where there are many KV rows."""
    return list(_align_messages(command, token, rows, Carrier()))


def _align_messages(
    command: t.Align, token: int | None, rows: kv.CachePiece, carrier: Carrier, before: tuple[int, ...] = ()
) -> Iterator[w.Message]:
    """As `align_messages`. All copies are begun here; each message waits for its own when it is taken."""
    parts = list(rows.parts(ALIGN_PART_BYTES)) or [(command.kv_stop, [])]
    begun = [(at, carrier.begin(tensors)) for at, tensors in parts]
    return (
        w.Align(command.request, command.step, token, at, ended(), number < len(begun), command.drafts, before)
        for number, (at, ended) in enumerate(begun, 1)
    )
