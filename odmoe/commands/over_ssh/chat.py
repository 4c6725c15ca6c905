"""`odmoe chat --cluster FILE`: a service for this conversation alone answers on the cluster's main host, over ssh."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from odmoe.api.checks import check_early
from odmoe.api.options import options_from_settings
from odmoe.commands.over_ssh.generate import bring_up
from odmoe.commands.over_ssh.service_there import ServiceThere, request_of, started_there
from odmoe.conversation.chat_model import Answer, Message
from odmoe.conversation.remote_model import RemoteModel
from odmoe.machines.cluster_file import read_cluster_file
from odmoe.settings.api_keys import ApiKey
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.terminal import Output, Terminal
from scheduler.errors import ConfigError, HostError

KEY_BYTES = 24
QUIET = Output(quiet=True)
"""Of the service: its log has the requests of this conversation."""


class ClusterModel:
    """The model of a cluster file. A service that was lost is started again for the next message."""

    def __init__(self, settings: Settings, terminal: Terminal, options: Mapping[str, Any], use_template: bool) -> None:
        """Starts the cluster unless it serves the model, or none is named. `options`: fields of each request.

        Raises HostError, ConfigError, LaunchError.
        """
        self._settings, self._terminal = settings, terminal
        self._options, self._use_template = options, use_template
        self._cluster = read_cluster_file(Path(settings.cluster))
        check_early(settings)
        bring_up(settings, self._cluster, Output(False, bool(terminal.console.quiet), terminal.debug))
        self._service = ExitStack()
        self._following: threading.Thread | None = None
        self._model = self._start()

    @property
    def name(self) -> str:
        return self._model.name

    def names(self) -> Sequence[str]:
        return []

    def choose(self, name: str) -> None:
        raise ConfigError(f"{self._settings.cluster} serves {self.name}; odmoe up with -m {name} changes that")

    def answer(self, messages: Sequence[Message]) -> Answer:
        if self._following is None or not self._following.is_alive():
            self._service.close()
            self._model = self._start()
        return self._model.answer(messages)

    def close(self) -> None:
        self._service.close()

    def _start(self) -> RemoteModel:
        key = ApiKey(secrets.token_urlsafe(KEY_BYTES))  # others on the main host can connect to the service there
        began: SimpleQueue[Path | HostError | OSError] = SimpleQueue()
        with ExitStack() as undo:
            there = undo.enter_context(started_there(self._cluster))
            there.remote.send(request_of(_of_service(self._settings), ServeSettings(), (key,), QUIET))
            following = threading.Thread(target=_follow, args=(there, began), name="service", daemon=True)
            following.start()
            found = self._wait(began)
            model = RemoteModel("http://main/v1", key.key, "", self._options, self._use_template, found)
            undo.callback(model.close)
            self._following, self._service = following, undo.pop_all()
        return model

    def _wait(self, began: SimpleQueue[Path | HostError | OSError]) -> Path:
        with self._terminal.status("starting the service on the main host"):
            try:
                found = began.get(timeout=self._settings.launch_s)
            except Empty:
                raise HostError(
                    f"the service on the main host has not started within {self._settings.launch_s:g} s; see odmoe "
                    f"status {self._settings.cluster}"
                ) from None
        if not isinstance(found, Path):
            raise found
        return found


def _of_service(settings: Settings) -> Settings:
    """A service that draws takes OpenAI's defaults for what no request says, unless it has `sample`; a conversation
    takes the model's own."""
    draws = options_from_settings(settings)["sampling"].is_random
    return settings.replace(sample=True) if draws else settings


def _follow(there: ServiceThere, began: SimpleQueue[Path | HostError | OSError]) -> None:
    """Puts the service's socket into `began`, or why there is none."""
    try:
        code, stderr = there.follow(lambda name, service: began.put(service))
    except (HostError, OSError) as error:
        began.put(error)
        return
    began.put(there.lost_error(code, stderr) or HostError(f"the service on the main host has ended with {code}"))
