"""How a command ends: exit codes, an error in one line, Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from scheduler.errors import ConfigError, ODMoEError, PromptError, PromptsFailedError
from scheduler.one_line import one_line

AGAIN_S = 3.0
"""Further interrupts within this time of the first are ignored."""
POSTPONED_S = 5.0
"""Longest time for which an import or a finaliser postpones an interrupt."""
RETRY_S = 0.05
"""Time until a postponed interrupt is tried again."""
ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""What is said if a signal has ended the command. The exit code is 128 and the signal's number, as in a shell."""
ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose another place",
}
"""What to do about an error of the operating system."""


def outcome(work: Callable[[], object], as_json: bool = False) -> int:
    """Run `work` and print its error, if any. Returns the exit code: 0 done, 1 failed, 2 wrong usage,
    130 interrupted, 143 terminated.

    `as_json`: also print `{"error": {"type": ..., "message": ...}}` on standard output, which otherwise has nothing
    about an error.
    """
    try:
        code = _unless_interrupted(work)
    except SystemExit as stop:  # typer's, when the reader of a pipe has gone; Ray's, if SIGTERM came
        code = 128 + signal.SIGTERM if stop.code == signal.SIGTERM else stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = 128 + (_ended_by or signal.SIGINT)
    except ODMoEError as error:
        given_already = isinstance(error, PromptsFailedError)
        _explain(type(error).__name__, str(error), as_json and not given_already)
        return 2 if isinstance(error, (ConfigError, PromptError)) else 1
    except OSError as error:
        _explain(type(error).__name__, _describe(error), as_json)
        return 1
    except Exception as error:
        usage = getattr(error, "exit_code", None)  # a usage error of the command line library
        if usage is None or not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "odmoe"
            text = _usage_hint(message.rstrip("."), error, command)
            _explain("ConfigError", f"{text}; see {command} --help", as_json)
        return int(usage)
    if code == 130:  # typer's code for Ctrl-C
        code = 128 + (_ended_by or signal.SIGINT)
    for number, word in ENDINGS.items():
        if code == 128 + number:
            _print_line(word)
    return code if isinstance(code, int) else 0


def _unless_interrupted(work: Callable[[], object]) -> object:
    """An error that an interrupt has caused is the interrupt: torch's contexts, which it may leave half entered, raise
    one of their own when they are left."""
    try:
        return work()
    except Exception as error:
        if _ended_by is not None and _follows_interrupt(error):
            raise KeyboardInterrupt from error
        raise


def _follows_interrupt(error: BaseException) -> bool:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, KeyboardInterrupt):
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False


def _usage_hint(message: str, error: Exception, command: str) -> str:
    """What the command line library says of wrong usage, with what was probably meant."""
    option = getattr(error, "option_name", None)
    if command.endswith(" serve") and option in ("--port", "-p"):
        return f"No such option: {option}; give --bind HOST:PORT"
    if command.endswith(" generate") and "unexpected extra argument" in message:
        return f"{message}; quote a prompt of several words"
    return message


def _describe(error: OSError) -> str:
    place = "" if error.filename is None else f"{error.filename}: "
    advice = "" if error.errno not in ADVICE else f"; {ADVICE[error.errno]}"
    return f"{place}{error.strerror or error}{advice}"


def _explain(name: str, message: str, as_json: bool) -> None:
    """One line. With --debug, the traceback comes before it."""
    if has_flag("--debug"):
        traceback.print_exc()
    message = " ".join(message.split())
    _print_line(f"odmoe: {name}: {message}")
    if as_json:
        print_error(name, message)


def has_flag(flag: str) -> bool:
    """Whether the command line has this flag. Known also if the command line was not understood."""
    arguments = sys.argv[1:]
    return flag in arguments[: arguments.index("--") if "--" in arguments else None]


def print_error(name: str, message: str) -> None:
    """The object that --json prints of an error, on standard output."""
    with contextlib.suppress(OSError, ValueError):  # nothing reads it any more
        sys.stdout.write(json.dumps({"error": {"type": name, "message": message}}) + "\n")
        sys.stdout.flush()


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{one_line(line)}\n")


_ended_by: signal.Signals | None = None
"""The signal that has ended this command, if any."""
_last_signal = float("-inf")
"""When the last signal came that counted, by `time.monotonic`."""


def forgive_interrupt() -> bool:
    """Whether a KeyboardInterrupt was Ctrl-C, after which the command goes on: the next one counts again. False if
    it was SIGTERM, which ends the command."""
    global _ended_by, _last_signal
    if _ended_by == signal.SIGTERM:
        return False
    _ended_by, _last_signal = None, float("-inf")
    return True


def one_interrupt() -> None:
    """Make Ctrl-C and SIGTERM, once or several times, raise one KeyboardInterrupt.

    The others would interrupt the cleaning up after the first. Where Python or a library would swallow the exception,
    it is raised a moment later. An interrupt that the shell told this process to ignore stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _ended_by, _last_signal
        now = time.monotonic()
        sent = number in ENDINGS
        if signal.getsignal(signal.SIGINT) is not as_begun or (sent and now - _last_signal <= AGAIN_S):
            return
        if sent:
            _last_signal, _ended_by = now, signal.Signals(number)
        if _would_be_swallowed(frame) and now - _last_signal < POSTPONED_S:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)  # SIGALRM calls this handler again
        else:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    as_begun = signal.getsignal(signal.SIGINT)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, interrupt)
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
