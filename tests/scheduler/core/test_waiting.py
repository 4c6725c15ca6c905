"""No worker is there, exact decisions: what requests need waits, and gets a worker when one joins."""

from __future__ import annotations
