"""`odmoe.load`: a model on a cluster of this process, of this machine or of Ray."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from odmoe.api.checks import check_early, check_start
from odmoe.api.names import check_names, named_as_keywords, path_of, with_paths
from odmoe.clusters.process import prepare_imports
from odmoe.settings.automatic import with_automatic
from odmoe.settings.settings import Settings
from odmoe.settings.sources import check_used
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.api.model import Model
    from odmoe.settings.keywords import LoadKeywords

_OF_COMMANDS = {
    "chat": "call model.chat(messages)",
    "system_prompt": "give model.chat a message with the role system",
}
"""Settings of the command line alone, and what takes their place."""


def load(
    model: str | os.PathLike[str] | None = None,
    cluster: str = "embedded",
    *,
    progress: bool = False,
    **settings: Unpack[LoadKeywords],
) -> Model:
    """A model, ready to answer. The end of a `with` block, or `close`, stops the nodes that were started for it.

    `model`: a model directory, a GGUF file or org/name on the Hub; None: whatever a running cluster serves.
    `cluster`: `embedded` (in this process), `local` (a process for each node), `auto` or a Ray head's host:port (a
    cluster that runs). `settings`: by the names that `odmoe config` lists, with underscores; those that say how to
    answer hold for every answer that says nothing else. Environment variables and the configuration file of the
    command line are not read. `progress`: show it on standard error.

    Raises ConfigError, CheckpointError, StoreError, ClusterError.
    """
    with named_as_keywords():
        return _load_model(settings_of(model, cluster, {**settings}), progress)


def _load_model(settings: Settings, progress: bool) -> Model:
    prepare_imports()
    from odmoe.api.model import start_model
    from odmoe.api.records import write_records
    from odmoe.clusters.threads import SHARED_THREADS
    from odmoe.terminal import Terminal

    check_early(settings)
    with ExitStack() as undo:
        held = undo.enter_context(ExitStack())
        if settings.cluster == "embedded":
            usual = settings.threads_a_node
            threads = held.enter_context(SHARED_THREADS.hold(settings.threads, usual))
            settings = settings if threads == usual else settings.replace(threads=threads)
        model = undo.enter_context(start_model(settings, Terminal(quiet=not progress)))
        model.after_end.push(held.pop_all())
        running = model.cluster.serves()
        atexit.register(model.close)  # nodes that were not stopped would hold up the interpreter's end
        model.before_end.callback(atexit.unregister, model.close)
        model.before_end.callback(write_records, settings, running, model)
        undo.pop_all()
        return model


def settings_of(model: object, cluster: object, given: dict[str, Any]) -> Settings:
    """Raises ConfigError."""
    check_names(given, Settings.model_fields, "a setting")
    for name, instead in _OF_COMMANDS.items():
        if name in given:
            raise ConfigError(f"{name} is a setting of the command line; {instead}")
    values = {**with_paths(given), "cluster": cluster}
    if model is not None:
        values["model"] = path_of("model", model, "a model directory, a GGUF file or org/name on the Hub")
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    chosen = Settings(str, **values)
    if chosen.has_cluster_file:
        raise ConfigError(
            f"cluster is {cluster!r}, a cluster file; load the model on its main host with cluster='auto', or run "
            "odmoe serve --cluster auto there and use an OpenAI client"
        )
    check_start(chosen, str, "process")
    check_used(chosen, given, str)
    return with_automatic(chosen, str)
