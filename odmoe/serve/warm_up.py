"""The first answer, before clients may ask: it waits for the shadow, loads the first experts, and imports the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odmoe.serve.service import Service

WARM_UP_TOKENS = 2
"""The shadow is waited for after an answer's first token."""


def warm_up(service: Service) -> None:
    """Answer a prompt of one token. If it fails, the log has the cause, and `/ready` says that answers fail."""
    from main_node.sampling import GREEDY

    if service.context <= WARM_UP_TOKENS:
        return
    try:
        with service.model.answer([0], WARM_UP_TOKENS, {"sampling": GREEDY}) as answer:
            for _ in answer:
                pass
    except Exception as error:  # noqa: BLE001 - the service may still answer once the cause is gone
        service.failed.set()
        service.log_failure("first-answer", error)
