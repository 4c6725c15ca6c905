"""Where the command line starts: `odmoe`, or `python -m odmoe`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C and SIGTERM while it is imported end like any other."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        from odmoe.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing has begun that would have to be ended."""
    with contextlib.suppress(OSError):
        os.write(2, b"terminated\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
