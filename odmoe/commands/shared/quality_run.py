"""`odmoe verify --quality`: a store's model, or an approximate system, beside its checkpoint on a text and on tasks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, CorruptCheckpointError, PromptError

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from odmoe.quality.quality import Quality
    from odmoe.quality.readers import Reader, Whole
    from odmoe.quality.tasks import Task

TEXT_TOKENS, LEAST_TEXT = 20_000, 512
"""Of a text, unless given; and at least."""
TEXT = Path(__file__).parents[2] / "quality" / "held_out.txt"
PASSAGE = 256
"""Tokens."""


PROMPT_TOKENS = 32
"""Tokens of a passage that an approximate system reads as a prompt; it is asked about the others, one by one."""


def run_quality(
    settings: Settings, text: Path | None, tokens: int, terminal: Terminal, table: Path | None = None
) -> Quality:
    """Measure on the first `tokens` tokens of a file; None: on `TEXT`. `table`: of tasks with right answers.

    Raises ConfigError, CheckpointError, DoesNotFitError or PromptError before the model is loaded.
    """
    from odmoe.commands.shared.whole_model import load_whole, open_checkpoint

    if settings.inexact:
        if settings.cluster != "embedded":
            raise ConfigError(
                f"--cluster is {settings.cluster} with --quality and {_inexact_flags(settings)}, which is measured in "
                "this process: leave --cluster out"
            )
        settings = settings.replace(smaller_forms="always", predictions="always")
    checkpoint = open_checkpoint(settings, terminal)
    from main_node.exactness import dense_changes
    from odmoe.clusters.devices import device_of
    from odmoe.quality.quality import as_quality, measure
    from odmoe.quality.readers import Whole
    from odmoe.stores import store_of
    from odmoe.text import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path, CorruptCheckpointError)
    passages = equal_passages(read_tokens(tokenizer, text or TEXT, tokens), min(PASSAGE, checkpoint.context))
    tasks, missing = _tasks(tokenizer, passages, table, checkpoint.context)
    with terminal.progress() as progress:
        store = store_of(settings, progress)
    dtype = store.manifest.dtype
    with terminal.status("loading the whole model with Transformers"):
        model = load_whole(checkpoint.path, dtype, device_of(settings, "main"))
    ends = frozenset({tokenizer.eos_token_id} - {None})
    original = Whole(model, ends, stepwise=bool(settings.inexact))
    del model
    with contextlib.ExitStack() as until_end, terminal.progress() as progress:
        total = 2 * (len(passages) + sum(len(task.items) for task in tasks))
        done = iter(range(1, total + 1))
        found, scored = measure(
            original,
            lambda: _changed(settings, store, original, ends, until_end),
            passages,
            PROMPT_TOKENS if settings.inexact else 1,
            tasks,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            lambda: progress("passages and items", next(done), total),
        )
    changes = (store.manifest.described or dtype, *dense_changes(store.manifest))
    return as_quality(
        found,
        model=settings.model,
        dtype=dtype,
        experts=" and ".join(filter(None, changes)) + (f" with {_inexact_flags(settings)}" if settings.inexact else ""),
        text=str(text or TEXT.name),
        tasks=tuple(scored),
        missing=tuple(missing),
    )


def _inexact_flags(settings: Settings) -> str:
    """The policies that change answers."""
    return " and ".join(f"--{field} {name}" for field, name in settings.inexact.items())


def _changed(
    settings: Settings, store: ExpertStore, original: Whole, ends: frozenset[int], until_end: contextlib.ExitStack
) -> Reader:
    """The other model: `original` with the store's weights, or if the system is approximate, a cluster."""
    from checkpoint.devices.names import return_memory
    from odmoe.clusters.configuration import check_fits
    from odmoe.clusters.device_choice import choose_devices
    from odmoe.clusters.threads import with_threads
    from odmoe.quality.quality import load_weights
    from odmoe.quality.readers import Engine
    from odmoe.start import start_cluster

    if not settings.inexact:
        load_weights(original.model, store)
        return original
    original.model = None
    return_memory()  # the nodes need the room
    settings = with_threads(settings, store)
    check_fits(settings, store)
    cluster = start_cluster(choose_devices(settings, store), store)
    until_end.callback(cluster.close)
    return Engine(cluster, ends)


def _tasks(tokenizer: Any, passages: list[list[int]], table: Path | None, context: int) -> tuple[list[Task], list[str]]:
    """The multiple choice of the text, and the tasks of a table; the names of those without a file."""
    from odmoe.quality.tasks import continuations, read_tasks

    own = [task for task in [continuations(passages)] if task.items]
    if table is None:
        return own, []
    encode = lambda text, begins: tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]  # noqa: E731
    found, missing = read_tasks(table, encode, context)
    return own + found, missing


def read_tokens(tokenizer: Any, file: Path, most: int) -> list[int]:
    """The first tokens of a file, `most` of them. Raises ConfigError for one that cannot be read, PromptError for one
    with too few."""
    from odmoe.text import panics_named

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--text {file} cannot be read: {why}") from error
    with panics_named(PromptError, f"the model's tokenizer cannot read {file}"):
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"][:most]
    if len(ids) < LEAST_TEXT:
        raise PromptError(f"{file} has {len(ids)} tokens; give a text of at least {LEAST_TEXT} with --text")
    return ids


def equal_passages(ids: list[int], length: int) -> list[list[int]]:
    """Passages of equally many tokens, so that intervals can be told; a shorter last one is left out."""
    from odmoe.quality.passages import windows

    return [passage for passage in windows(ids, length) if len(passage) == length]
