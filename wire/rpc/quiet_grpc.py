"""gRPC, which writes nothing to standard error by itself.

Its core has a line for each TLS handshake that fails, so a stranger's port scan fills a disk. Who is refused is logged
by `wire.refusals`, so often and no more. gRPC reads the variable when it is imported. One that is set is left as it is.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc as grpc
