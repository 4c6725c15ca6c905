"""SIGHUP: keys are read again. It does not end the service, unless the terminal that it runs in was closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from odmoe.serve.key_ring import KeyRing
from odmoe.settings.serve_settings import ServeSettings
from scheduler.errors import ConfigError


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, where it is entered in the main thread, SIGHUP calls `act` in a thread. A SIGHUP because the
    terminal is gone ends the process as SIGTERM does. Where SIGHUP is ignored, as by `nohup`, it stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    had_terminal = has_terminal()

    def handle(number: int, frame: FrameType | None) -> None:
        if had_terminal and not has_terminal():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a shell sends another one; two SIGTERM would cut answers
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.Thread(target=act, name="hangup", daemon=True).start()

    before = signal.signal(signal.SIGHUP, handle)
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
