"""A hundred and sixty crowds: see tests/main_node/test_crowds.py. About a minute of one core."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from support.nodes.crowd import KINDS, Crowd, Visitor, crowds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EXAMPLES = 40


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(visitors=crowds)
def test_the_others_do_not_notice(
    kind: str, visitors: list[Visitor], crowd_of: Callable[[str, list[Visitor]], Crowd]
) -> None:
    crowd_of(kind, visitors).run()
