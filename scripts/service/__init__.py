"""`odmoe serve` in a process of its own, and the clients that measure it."""
