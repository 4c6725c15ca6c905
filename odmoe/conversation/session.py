"""A conversation from its first message to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

from odmoe.conversation.chat_model import Answer, ChatModel, Delta
from odmoe.conversation.screen import Screen, figures_text
from odmoe.conversation.slash_commands import SlashCommands
from odmoe.conversation.transcript import Transcript
from scheduler.errors import ODMoEError

_CUT = {
    "length": "(cut at the most tokens of an answer: -n)",
    "context": "(cut: the context is full; /reset begins anew)",
}
"""What is said of an answer that has no end of its own."""
STOP_S = 10.0
"""Longest wait for an answer that was given up."""


class Input(Protocol):
    """Where messages come from."""

    def read(self) -> str | None:
        """The next message; None at the end."""


class Session:
    """Reads messages, and shows the answers."""

    def __init__(self, model: ChatModel, screen: Screen, transcript: Transcript, forgive: Callable[[], bool]) -> None:
        """`forgive`: tells whether an interrupt was Ctrl-C, which stops the answer and not the conversation."""
        self._model, self._screen, self._transcript, self._forgive = model, screen, transcript, forgive
        self._commands = SlashCommands(model, transcript, screen.print_line)

    def run(self, source: Input) -> None:
        """Converse until the input ends. An answer that fails is said to have done so, and the conversation goes on."""
        while (message := source.read()) is not None:
            try:
                if message.startswith("/") and "\n" not in message:
                    if not self._commands.run(message):
                        return
                else:
                    self.answer(message)
                    self._screen.print_line("")
            except ODMoEError as error:
                self._screen.print_line(f"{type(error).__name__}: {error}", "red")

    def answer(self, message: str) -> None:
        """Show the answer to a message; Ctrl-C stops it and keeps what came. Raises what `ChatModel.answer` raises."""
        self._transcript.add("user", message)
        parts: list[str] = []
        try:
            answer = self._model.answer(self._transcript.messages)
            is_whole = self._show(answer, parts)
        finally:
            if text := "".join(parts):
                self._transcript.add("assistant", text)
            else:  # most templates want an answer between two messages
                self._transcript.take_back()
        if not is_whole:
            self._screen.print_line("(stopped)" if parts else "(stopped; the message is forgotten)", "dim")
            return
        self._commands.figures = figures = answer.figures
        if figures.finish in _CUT:
            self._screen.print_line(_CUT[figures.finish], "dim")
        if self._commands.shows_figures:
            self._screen.print_line(figures_text(figures), "dim")

    def _show(self, answer: Answer, parts: list[str]) -> bool:
        """Whether the answer came to its end. `parts` gets its text."""
        reader = _Reader(answer)
        with self._screen.answer() as view:
            try:
                for delta in reader:
                    view.show(delta)
                    parts.append(delta.text)
            except KeyboardInterrupt:
                reader.stop()
                if not self._forgive():
                    raise
                return False
        return True


class _Reader:
    """Reads an answer in a thread, so that an interrupt meets none of a model's own code."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._queue: SimpleQueue[Delta | BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="answer", daemon=True)

    def __iter__(self) -> Iterator[Delta]:
        self._thread.start()
        while (found := self._queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def stop(self) -> None:
        """Give the answer up, and wait until it has ended."""
        self._answer.cancel()
        self._thread.join(STOP_S)

    def _read(self) -> None:
        try:
            for delta in self._answer:
                self._queue.put(delta)
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self._queue.put(error)
