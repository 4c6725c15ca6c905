"""One request, as the token loop works on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from main_node.engine.sequence import Sequence
from main_node.sampling import Chooser


@dataclass(slots=True)
class Request:
    """What the token loop works on."""

    number: int
    sequence: Sequence
    chooser: Chooser
    stopped: Callable[[int], bool] | None
    """Takes every token in order; True once the answer has reached a stop text."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    prefill_passes: int = 0
    """Passes that have read the prompt."""
    steps: int = 0
    """Steps that ran a pass of it."""
    passes: int = 0
    """Passes in these steps, those of other requests too."""
    drafted: int = 0
    """Drafts that its passes have verified."""
    accepted: int = 0
    """Of those, the ones that were right."""
    rounded: bool = False
    """Some of its products were shared with other requests and may have lost the last bit by it."""
