"""`odmoe.load`: a model on a cluster of this process, of this machine or of Ray."""

from __future__ import annotations

import atexit
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from odmoe.api.names import check_names
from odmoe.clusters.process import prepare_imports
from odmoe.settings.settings import Settings
from odmoe.settings.sources import check_used
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.api.model import Model

_OF_COMMANDS = {
    "chat": "call model.chat(messages)",
    "system_prompt": "give model.chat a message with the role system",
}
"""Settings of the command line alone, and what takes their place."""


def load(
    model: str | os.PathLike[str] | None = None, cluster: str = "embedded", *, progress: bool = False, **settings: Any
) -> Model:
    """A model, ready to answer. The end of a `with` block, or `close`, stops the nodes that were started for it.

    `model`: a model directory, a GGUF file or org/name on the Hub; None: whatever a running cluster serves.
    `cluster`: `embedded` (in this process), `local` (a process for each node), `auto` or a Ray head's host:port (a
    cluster that runs). `settings`: by the names that `odmoe config` lists, with underscores; those that say how to
    answer hold for every answer that says nothing else. Environment variables and the configuration file of the
    command line are not read. `progress`: show it on standard error.

    Raises ConfigError, CheckpointError, StoreError, ClusterError.
    """
    chosen = settings_of(model, cluster, settings)
    prepare_imports()
    from odmoe.api.checks import check_early
    from odmoe.api.model import start_model
    from odmoe.api.records import write_records
    from odmoe.terminal import Terminal

    check_early(chosen)
    terminal = Terminal(quiet=not progress)
    loaded = start_model(chosen, terminal)
    loaded.at_close += [partial(write_records, chosen, loaded.cluster.serves(), loaded)]
    loaded.at_close += [partial(atexit.unregister, loaded.close)]
    atexit.register(loaded.close)  # nodes that were not stopped would hold up the interpreter's end
    return loaded


def settings_of(model: str | os.PathLike[str] | None, cluster: str, given: dict[str, Any]) -> Settings:
    """Raises ConfigError."""
    check_names(given, Settings.model_fields, "a setting")
    for name, instead in _OF_COMMANDS.items():
        if name in given:
            raise ConfigError(f"{name} is a setting of the command line; {instead}")
    values = {**given, "cluster": cluster}
    if model is not None:
        values["model"] = os.fspath(model)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    chosen = Settings(str, **values)
    if chosen.cluster_file:
        raise ConfigError(
            f"cluster is {cluster!r}, a cluster file; load the model on its main host with cluster='auto', or run "
            "odmoe serve --cluster auto there and use odmoe.connect(url)"
        )
    if not chosen.model and not chosen.joined:
        raise ConfigError(f"model is not given, and cluster {cluster!r} needs one; give a model directory")
    if chosen.retry and not chosen.joined:
        raise ConfigError(
            f"retry is {chosen.retry} with cluster {cluster!r}, whose main node ends with this process; allowed: a "
            "cluster that lasts (auto, host:port)"
        )
    check_used(chosen, given, str)
    return chosen
