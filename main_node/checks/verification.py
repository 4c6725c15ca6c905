"""What computes outputs of workers a second time."""

from __future__ import annotations

from dataclasses import dataclass

from main_node.checks.arbiter import Arbiter
from main_node.checks.audits import Audits


@dataclass(frozen=True, slots=True)
class Verification:
    """See `main_node.engine.output_checks.OutputChecks`. None: there is no such check."""

    audits: Audits | None = None
    arbiter: Arbiter | None = None
