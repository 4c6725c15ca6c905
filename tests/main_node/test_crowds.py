"""Requests that come, are cancelled and fail at random points. The others' answers are those alone; nothing is left.

A thousand more are drawn in tests/main_node/test_many_crowds.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from support.cases import slow_except
from support.nodes.crowd import KINDS, Crowd, Visitor, crowds

pytestmark = pytest.mark.timeout(300)
EXAMPLES = 3


@pytest.mark.parametrize("kind", slow_except([*KINDS][:1], KINDS))
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(visitors=crowds)
def test_the_others_do_not_notice(
    kind: str, visitors: list[Visitor], crowd_of: Callable[[str, list[Visitor]], Crowd]
) -> None:
    crowd_of(kind, visitors).run()
