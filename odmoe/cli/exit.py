"""How a command ends: exit codes, an error in one line, Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from scheduler.errors import ConfigError, ODMoEError, PromptError

AGAIN_S = 3.0
"""Further interrupts within this time of the first are ignored."""
POSTPONED_S = 5.0
"""Longest time for which an import or a finaliser postpones an interrupt."""
RETRY_S = 0.05
"""Time until a postponed interrupt is tried again."""
ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose another place",
}
"""What to do about an error of the operating system."""


def outcome(work: Callable[[], object]) -> int:
    """Run `work` and print its error, if any. Returns the exit code: 0 done, 1 failed, 2 wrong usage,
    130 interrupted."""
    try:
        code = work()
    except SystemExit as stop:  # typer's, when the reader of a pipe has gone
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except ODMoEError as error:
        _explain(type(error).__name__, str(error))
        return 2 if isinstance(error, (ConfigError, PromptError)) else 1
    except OSError as error:
        _explain(type(error).__name__, _described(error))
        return 1
    except Exception as error:
        usage = getattr(error, "exit_code", None)  # a usage error of the command line library
        if usage is None or not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "odmoe"
            _explain("ConfigError", f"{message.rstrip('.')}; see {command} --help")
        return int(usage)
    if code == 130:
        _say("interrupted")
    return code if isinstance(code, int) else 0


def _described(error: OSError) -> str:
    place = "" if error.filename is None else f"{error.filename}: "
    advice = "" if error.errno not in ADVICE else f"; {ADVICE[error.errno]}"
    return f"{place}{error.strerror or error}{advice}"


def _explain(name: str, message: str) -> None:
    """One line. With --debug, the traceback comes before it."""
    if "--debug" in sys.argv:
        traceback.print_exc()
    _say(f"odmoe: {name}: {' '.join(message.split())}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def one_interrupt() -> None:
    """Make Ctrl-C, pressed once or several times, raise one KeyboardInterrupt.

    The others would interrupt the cleaning up after the first. Where Python or a library would swallow the exception,
    it is raised a moment later. An interrupt that the shell told this process to ignore stays ignored.
    """
    last = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if signal.getsignal(signal.SIGINT) is not interrupt or (number == signal.SIGINT and now - last <= AGAIN_S):
            return
        last = now if number == signal.SIGINT else last
        if _would_be_swallowed(frame) and now - last < POSTPONED_S:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)  # SIGALRM calls this handler again
        else:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)


def _would_be_swallowed(frame: FrameType | None) -> bool:
    """Whether an exception raised in this frame may never reach its callers: below an import, since torch's own
    import catches it, or below a finaliser (`__del__`), where Python discards it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
