"""Lines of a conversation that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from odmoe.conversation.chat_model import ChatModel, Figures
from odmoe.conversation.screen import figures_text
from odmoe.conversation.transcript import Transcript
from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest

HELP = """\
  /system TEXT   set the system message; without TEXT take it away
  /reset         forget the conversation, but not the system message
  /stats         figures after each answer: on or off
  /save FILE     write the conversation as JSON
  /load FILE     go on with a conversation that was saved
  /model NAME    answer with another model; without NAME list them
  /help          this list
  /quit          leave, as Ctrl-D does
A message goes on after a line that ends with \\, within ''' and ''', and after
Alt-Enter. Ctrl-C stops an answer and keeps what has come of it."""


class SlashCommands:
    """What each does. `figures`: those of the last answer."""

    def __init__(self, model: ChatModel, transcript: Transcript, say: Callable[[str], None]) -> None:
        self._model, self._transcript, self._say = model, transcript, say
        self.figures: Figures | None = None
        self.shows_figures = False
        self._actions: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "reset": self._reset,
            "stats": self._stats,
            "save": self._save,
            "load": self._load,
            "model": self._choose,
            "help": lambda argument: say(HELP),
        }

    def run(self, line: str) -> bool:
        """Whether the conversation goes on. Raises ConfigError for an unknown command, and what the command raises."""
        name, _, argument = line[1:].strip().partition(" ")
        if name in ("quit", "exit", "bye"):
            return False
        if name not in self._actions:
            near = nearest(name, [*self._actions, "quit"])
            raise ConfigError(f"/{name} is no command{near or '; /help lists them'}")
        self._actions[name](argument.strip())
        return True

    def _system(self, text: str) -> None:
        self._transcript.set_system(text)
        self._say("system message set" if text else "no system message")

    def _reset(self, argument: str) -> None:
        self._transcript.reset()
        self._say("the conversation is empty")

    def _stats(self, argument: str) -> None:
        self.shows_figures = not self.shows_figures
        if self.figures is not None:
            self._say(figures_text(self.figures))
        self._say(f"figures after each answer: {'on' if self.shows_figures else 'off'}")

    def _save(self, argument: str) -> None:
        file = _file("/save", argument)
        self._transcript.save(file, self._model.name)
        self._say(f"saved {_turns(self._transcript)} in {file}")

    def _load(self, argument: str) -> None:
        file = _file("/load", argument)
        self._transcript.load(file)
        self._say(f"{_turns(self._transcript)} of {file}; the next message goes on")

    def _choose(self, name: str) -> None:
        if name:
            self._model.choose(name)
        names = [] if name else self._model.names()
        self._say(f"model {self._model.name}")
        for one in names:
            if one != self._model.name:
                self._say(f"      {one}")


def _turns(transcript: Transcript) -> str:
    return f"{transcript.turns} turn{'' if transcript.turns == 1 else 's'}"


def _file(command: str, argument: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} has no file; give one, such as {command} talk.json")
    return Path(argument).expanduser()
