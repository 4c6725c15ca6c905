"""Where the command line starts: `odmoe`, or `python -m odmoe`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C and SIGTERM while it is imported end like any other, at once: an import would
    swallow an exception, and nothing has begun that would have to be ended."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in taken:
        signal.signal(number, _end)
    if "serve" in sys.argv[1:2]:
        from odmoe.serve.hangup import hold_hangup

        hold_hangup()
    from odmoe.command_line import main as run

    for number, handler in taken.items():
        signal.signal(number, handler)
    run()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n" if number == signal.SIGINT else b"terminated\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
