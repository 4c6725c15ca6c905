"""The keys that open the service, which may change while it runs, and what each key may ask for at a time."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from odmoe.serve.api_error import BUSY, ApiError
from odmoe.settings.api_keys import ApiKey

MINUTE_S = 60.0
LIMITED = "rate_limit_exceeded"
"""The `code` of a request beyond a key's limits, as OpenAI has it."""


@dataclass(slots=True)
class _Usage:
    """Of one key."""

    under_way: int = 0
    begun: deque[float] = field(default_factory=deque)
    """When the requests of the last minute began, by the monotonic clock."""


class KeyRing:
    """`replace` may be called from any thread, all else on the event loop."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        """None: everybody may ask."""
        self._keys = self._encoded(keys)
        self._used: dict[str, _Usage] = {}

    @staticmethod
    def _encoded(keys: Sequence[ApiKey]) -> tuple[tuple[bytes, ApiKey], ...]:
        return tuple((one.key.encode(), one) for one in keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(one for _, one in self._keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """From now on these open. Requests under way go on; what a key has used up stays so."""
        self._keys = self._encoded(keys)

    def find(self, given: bytes) -> ApiKey | None:
        """In a time that does not tell how much of a key is right."""
        same = [one for key, one in self._keys if hmac.compare_digest(given, key)]
        return same[0] if same else None

    @contextmanager
    def using(self, key: ApiKey) -> Iterator[None]:
        """Around a request. Raises ApiError, status 429, beyond the key's limits."""
        used = self._used.setdefault(key.key, _Usage())
        now = time.monotonic()
        while used.begun and used.begun[0] <= now - MINUTE_S:
            used.begun.popleft()
        if key.at_once is not None and used.under_way >= key.at_once:
            text = f"the key has {used.under_way} requests under way, and may have {key.at_once}; wait for one to end"
            raise ApiError(429, text, BUSY, code=LIMITED)
        if key.per_minute is not None and len(used.begun) >= key.per_minute:
            wait_s = used.begun[-key.per_minute] + MINUTE_S - now
            text = f"the key may ask {key.per_minute} times a minute; ask again in {wait_s:.0f} s"
            raise ApiError(429, text, BUSY, code=LIMITED, again_s=max(1, round(wait_s + 0.5)))
        if key.per_minute is not None:
            used.begun.append(now)
        used.under_way += 1
        try:
            yield
        finally:
            used.under_way -= 1
