"""Numbers beyond which nothing is believed: a slip of the keyboard or a damaged file would fill the memory."""

from __future__ import annotations

MAX_EXPERTS = 1 << 16
"""Experts of a layer, layers, slots of a worker."""
MAX_WORKERS = 1 << 10
"""Each has a stream and threads of its own."""
MAX_SHADOW_HOSTS = 16
"""That share a shadow's layers."""
MAX_PLANNED_WORKERS = 1 << 8
"""A plan simulates every size of groups that may be the best, so it takes longer with more workers."""
MAX_WORKERS_HERE = {"embedded": 1 << 8, "local": 1 << 6}
"""Workers on one machine, by cluster: in one process, or in a process each."""
MAX_SLOTS = 1 << 17
"""Slots of all workers together, and experts of all layers."""
MAX_THREADS = 1 << 10
"""Threads of a node."""
MAX_COUNT = 1 << 22
"""Tokens and rows."""
MAX_CONTEXT = 1 << 30
"""Tokens of a context. The model's own limit is far below."""
