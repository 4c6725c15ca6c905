"""`odmoe chat`: a conversation, with a model here or behind a service."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from odmoe.commands.shared.exit import forgive_interrupt
from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Config, LibrariesDebug, option, switch
from odmoe.settings.settings import Settings
from odmoe.settings.sources import API_KEY, effective
from odmoe.settings.table import flag
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.conversation.chat_model import ChatModel
    from odmoe.terminal import Terminal

FLAGS = tuple(name for name in Settings.names() if name not in ("chat", "trace", "record"))
_FIELDS = {
    "max_new_tokens": "max_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop", "ignore_eos")},
}
"""Settings that a service can follow, and the fields of a request that say them."""
PLAIN_TOKENS = 128
"""Of an answer without a template, which may have no end of its own."""


@with_settings(Settings, FLAGS)
def chat(
    flags: dict[str, Any],
    url: Annotated[
        str | None,
        option(help="Talk to a service, e.g. http://127.0.0.1:8000/v1; -m is then its name there", metavar="URL"),
    ] = None,
    api_key: Annotated[
        str | None, option(help="Key of that service (better: ODMOE_API_KEY or OPENAI_API_KEY)", metavar="KEY")
    ] = None,
    no_template: Annotated[bool, switch("--no-template", help="Continue plain text, without a chat template")] = False,
    config: Config = None,
    quiet: Annotated[bool, switch("-q", "--quiet", help="Show answers and errors only")] = False,
    debug: LibrariesDebug = False,
) -> None:
    """Talk with a model, here or behind a service.

    /help in the conversation lists its commands. Without a terminal, standard
    input is one message, and its answer is printed.
    """
    from odmoe.terminal import Terminal

    terminal = Terminal(quiet, debug)
    system = flags.get("system_prompt")
    if url is None:
        if api_key is not None:
            raise ConfigError("--api-key is given without --url, and a model here needs none; give --url too")
        model = _local(flags, config, terminal, not no_template)
    else:
        model = _remote(flags, url, api_key, not no_template)
    with closing(model):
        _converse(model, terminal, system)


def _converse(model: ChatModel, terminal: Terminal, system: str | None) -> None:
    from odmoe.conversation.piped_input import piped_message
    from odmoe.conversation.screen import Screen
    from odmoe.conversation.session import Session
    from odmoe.conversation.transcript import Transcript

    screen = Screen(terminal)
    if sys.stdin is None or not sys.stdin.isatty():
        Session(model, screen, Transcript(system), lambda: False).answer(piped_message())
        return
    from odmoe.conversation.terminal_input import TerminalInput

    screen.print_line(f"{model.name} - /help lists commands, Ctrl-D leaves", "dim")
    Session(model, screen, Transcript(system), forgive_interrupt).run(
        TerminalInput(screen.print_line, forgive_interrupt)
    )


def _local(flags: dict[str, Any], config: str | None, terminal: Terminal, use_template: bool) -> ChatModel:
    """On nodes that this process starts or joins, or on a cluster file's."""
    from odmoe.api.checks import check_early, check_start
    from odmoe.clusters.process import prepare_process
    from odmoe.conversation.local_model import LocalModel

    given = {name: value for name, value in flags.items() if name != "system_prompt"}
    found = effective(given, config)
    settings = found.settings.keeping_prompts()
    check_start(settings, flag, "command")
    options = _options(settings, found.origin, use_template)
    if settings.has_cluster_file:
        from odmoe.commands.over_ssh.chat import ClusterModel

        return ClusterModel(settings, terminal, options, use_template)
    check_early(settings)
    prepare_process(terminal.debug)
    if settings.memory is not None and not settings.uses_existing_ray:
        settings = settings.replace(parallel=1)  # --memory keeps room for the KV cache of one conversation
    return LocalModel(settings, terminal, use_template, options.get("max_tokens"))


def _remote(flags: dict[str, Any], url: str, api_key: str | None, use_template: bool) -> ChatModel:
    from odmoe.conversation.remote_model import RemoteModel

    others = [name for name in flags if name not in (*_FIELDS, "model", "system_prompt")]
    if others:
        raise ConfigError(f"{flag(others[0])} is given with --url; it is the service's to say: leave it out")
    settings = Settings(flag, **{name: value for name, value in flags.items() if name in _FIELDS})
    options = _options(settings, flags, use_template)
    key = api_key or os.environ.get(API_KEY) or os.environ.get("OPENAI_API_KEY")
    return RemoteModel(url, key, flags.get("model", ""), options, use_template)


def _options(settings: Settings, given: Collection[str], use_template: bool) -> dict[str, Any]:
    """Fields of each request. `given`: names of settings; the service decides the others."""
    options = {_FIELDS[name]: getattr(settings, name) for name in given if name in _FIELDS}
    return options if use_template else {"max_tokens": PLAIN_TOKENS, **options}
