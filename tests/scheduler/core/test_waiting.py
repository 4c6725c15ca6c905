"""No worker is there, exact decisions: what requests need waits, and gets a worker when one joins."""

from __future__ import annotations

import pytest

from scheduler import types as t
from scheduler.policies.precision import FULL, INT4
from scheduler.policies.residency.lru import Static
from scheduler.types import ExpertId
from support.scheduling.core_driver import Driver, P, compute, in_place
from support.scheduling.forecasts import Told
