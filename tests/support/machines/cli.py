"""The command line, in this process: `CommandLine()("generate", "-m", ...)` answers a `Result`."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import TextIO

import pytest


@dataclass(frozen=True)
class Result:
    """What a command answered: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


class Screen(io.TextIOWrapper):
    """A stream in memory, which may say that it is a terminal."""

    def __init__(self, text: bytes = b"", tty: bool = False) -> None:
        self._bytes = io.BytesIO(text)
        super().__init__(self._bytes, encoding="utf-8", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        return self._bytes.getvalue().decode()


class CommandLine:
    """Calls the command line as `odmoe ARGS` does, less the end of the process."""

    def __call__(
        self, *args: str, stdin: bytes | None = None, tty: bool = False, stdout: TextIO | None = None
    ) -> Result:
        """`stdin`: None is a terminal at which nobody types. `tty`: standard error is a terminal. `stdout`: another
        stream to write the answer to; the result's `out` is empty then."""
        from odmoe.command_line import run

        out, err = Screen(), Screen(tty=tty)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("odmoe.terminal.LINE_S", 600.0)  # no lines about the progress of a busy machine
            patch.setattr(sys, "argv", ["odmoe", *args])
            patch.setattr(sys, "stdin", Screen(stdin or b"", tty=stdin is None))
            patch.setattr(sys, "stdout", stdout or out)
            patch.setattr(sys, "stderr", err)
            code = run()
        return Result(code, out.text(), err.text())


def check_one_line(result: Result, code: int, kind: str, words: list[str]) -> None:
    """Nothing is on standard output, and one line on standard error: the error's class, and each of `words`."""
    assert (result.code, result.out) == (code, ""), result
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith(f"odmoe: {kind}: "), result.err
    missing = [word for word in words if word not in result.err]
    assert not missing, f"{missing} are not in: {result.err}"
