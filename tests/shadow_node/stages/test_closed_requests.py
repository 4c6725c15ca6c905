"""What the parts of a shadow keep of a request that has been closed."""

from __future__ import annotations

from typing import Any

import pytest

from shadow_node.node import Shadow
from shadow_node.stages.node import Stage
from support.machines.processes import wait_until
from support.shadows.shadow_client import MainAnswer, ShadowClient
from wire.messages import CloseRequest, Prediction

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("requests", [1, 2])
def test_a_part_keeps_nothing_of_a_request_closed_in_mid_pass(requests: int, first_of: Any, stage: Stage) -> None:
    first = first_of()
    shadow = Shadow("shadow", first, "abc", "float32")
    main = ShadowClient(shadow)
    main.hello()
    last = first.division.starts[1] - 1

    def close(message: Prediction) -> None:
        """At the last gate before the part, with nothing in between that would look for messages."""
        session = shadow.sessions.served
        if message.layer == last and session is not None and message.request in session._requests:
            session.dispatch(CloseRequest(message.request))

    main.on_prediction = close
    for number in range(1, requests + 1):
        main.open(number, MainAnswer((5, 17, 3, 60, 41, 9), [7, 8], []), kv=0)
    main.settle()
    served: Any = stage.sessions.served
    assert len(served._requests) == requests
    for number in range(1, requests + 1):
        main.align(number, 0)
    main.settle()
    wait_until(lambda: not served._requests, "a part without requests")
    shadow.close()
