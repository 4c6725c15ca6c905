"""How a command ends: what went wrong, said in a line; exit codes; Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from scheduler.errors import ConfigError, ODMoEError

AGAIN_S = 3.0


IMPORT_S = 5.0  # how long an import may hold up Ctrl-C


LOOK_S = 0.05


def outcome(work: Callable[[], object]) -> int:
    """Do it, and explain what goes wrong. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = work()
    except SystemExit as stop:  # how it ends when whoever read the answer has gone
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except ODMoEError as error:
        _explain(type(error).__name__, str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        _explain(type(error).__name__, f"{error}; is the disk full, or a file not ours to write?")
        return 1
    except Exception as error:
        usage = getattr(error, "exit_code", None)  # a usage error of the command line library
        if usage is None or not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            _explain("ConfigError", f"{message.rstrip('.')}; see odmoe --help")
        return int(usage)
    if code == 130:
        _say("interrupted")
    return code if isinstance(code, int) else 0


def _explain(name: str, message: str) -> None:
    """One line; before it the traceback where --debug was given."""
    if "--debug" in sys.argv:
        traceback.print_exc()
    _say(f"odmoe: {name}: {' '.join(message.split())}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def one_interrupt() -> None:
    """Ctrl-C pressed several times is one: the others would land in the middle of tidying up. While a library is being
    imported it waits: within torch's import it would be swallowed, or become another error."""
    last = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if signal.getsignal(signal.SIGINT) is not interrupt or (number == signal.SIGINT and now - last <= AGAIN_S):
            return
        last = now if number == signal.SIGINT else last
        if _importing(frame) and now - last < IMPORT_S:
            signal.setitimer(signal.ITIMER_REAL, LOOK_S)
        else:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell said to ignore it
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)


def _importing(frame: FrameType | None) -> bool:
    """Or in a finaliser, where Python swallows what is raised."""
    while frame is not None and frame.f_code.co_name != "__del__":
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            break
        frame = frame.f_back
    return frame is not None
