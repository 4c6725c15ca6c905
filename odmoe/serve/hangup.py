"""SIGHUP: keys are read again. It does not end the service, unless the terminal that it runs in was closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.serve.key_ring import KeyRing
    from odmoe.settings.serve_settings import ServeSettings


class HeldHangup:
    """Remembers a SIGHUP that comes before `on_hangup`, or after it: a reload must not end a service that starts."""

    def __init__(self) -> None:
        self.had_terminal = has_terminal()
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def hold_hangup() -> None:
    """From now on, outside `on_hangup`, SIGHUP is held. If it is ignored, it stays so."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, HeldHangup())


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, if it is entered in the main thread, SIGHUP calls `act` in a thread, one call at a time. So
    does one that was held before. A SIGHUP because the terminal is gone ends the process as SIGTERM does. If SIGHUP
    is ignored, as by `nohup`, it stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGHUP)
    if not is_main or before is signal.SIG_IGN:
        yield
        return
    had_terminal = before.had_terminal if isinstance(before, HeldHangup) else has_terminal()
    one_at_a_time = threading.Lock()

    def act_alone() -> None:
        with one_at_a_time:  # else what was read first might be kept last
            act()

    def handle(number: int, frame: FrameType | None) -> None:
        if had_terminal and not has_terminal():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a shell sends another one; two SIGTERM would cut answers
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.Thread(target=act_alone, name="hangup", daemon=True).start()

    signal.signal(signal.SIGHUP, handle)
    if isinstance(before, HeldHangup) and before.came:
        before.came = False
        handle(signal.SIGHUP, None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def has_terminal() -> bool:
    """Whether the process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def read_keys_again(own: ServeSettings, ring: KeyRing, notify: Callable[[str], None]) -> None:
    """Keys that cannot be read leave the former ones in force."""
    if own.api_key_file is None:
        notify("SIGHUP: there is no --api-key-file to read again; nothing has changed")
        return
    try:
        ring.replace(own.keys())
    except ConfigError as error:
        notify(f"SIGHUP: the former keys stay in force: {error}")
        return
    notify(f"SIGHUP: keys read again; {len(ring)} open the service")
