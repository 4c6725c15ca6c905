"""What the shadow does with a request's cache, whether all of it is in this process or not."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from checkpoint import kv


class Mark(Protocol):
    """See `kv.mark`."""

    @property
    def nbytes(self) -> int: ...


class RequestCache(Protocol):
    """As the functions of `checkpoint.kv` of the same names, for one cache."""

    def put(self, start: int, sent: list[torch.Tensor]) -> int: ...

    def take_over(self, start: int, sent: list[torch.Tensor]) -> int: ...

    def has_states(self, sent: Any) -> bool: ...

    def mark(self, rows: bool = False) -> Mark: ...

    def go_to(self, to: Any) -> None: ...

    def close(self) -> None:
        """The request has ended."""

    @property
    def nbytes(self) -> int:
        """Bytes in this process."""


class WholeCache:
    """In this process."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def put(self, start: int, sent: list[torch.Tensor]) -> int:
        return kv.put(self._cache, start, sent)

    def take_over(self, start: int, sent: list[torch.Tensor]) -> int:
        return kv.take_over(self._cache, start, sent)

    def has_states(self, sent: Any) -> bool:
        return kv.has_states(self._cache, sent)

    def mark(self, rows: bool = False) -> kv.Mark:
        return kv.mark(self._cache, rows)

    def go_to(self, to: kv.Mark) -> None:
        kv.go_to(self._cache, to)

    def close(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return kv.cache_bytes(self._cache)


def request_cache(cache: Any) -> RequestCache:
    """Of what `new_cache` of a shadow's model returns."""
    return cache if hasattr(cache, "take_over") else WholeCache(cache)
