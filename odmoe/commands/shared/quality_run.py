"""`odmoe verify --quality`: a store's model beside its checkpoint on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.api.checks import check_early
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, CorruptCheckpointError, PromptError

if TYPE_CHECKING:
    from odmoe.quality.quality import Quality

TEXT_TOKENS, LEAST_TEXT = 20_000, 512
"""Of a text, unless given; and at least."""
TEXT = Path(__file__).parents[2] / "quality" / "held_out.txt"
PASSAGE = 256
"""Tokens."""


def run_quality(settings: Settings, text: Path | None, tokens: int, terminal: Terminal) -> Quality:
    """Measure on the first `tokens` tokens of a file; None: on `TEXT`.

    Raises ConfigError, CheckpointError, DoesNotFitError or PromptError before the model is loaded.
    """
    from checkpoint.family import dtype_name, stored_dtype
    from checkpoint.hub import find_model
    from odmoe.commands.shared.whole_model import check_memory, checked_config, load_whole

    prepare_process(terminal.debug)
    check_early(settings)
    path = find_model(settings.model)
    config = checked_config(path)
    dtype = settings.dtype or dtype_name(stored_dtype(config))
    context = check_memory(path.name, config, dtype).context_max
    prepare_libraries(settings.threads_a_node)
    from main_node.exactness import dense_changes
    from odmoe.clusters.devices import check_devices, device_of
    from odmoe.quality.quality import as_quality, measure
    from odmoe.stores import prepare_store
    from odmoe.text import load_tokenizer

    check_devices(settings)
    ids = read_tokens(load_tokenizer(path, CorruptCheckpointError), text or TEXT, tokens)
    passages = divided(ids, min(PASSAGE, context))
    with terminal.progress() as progress:
        store = prepare_store(
            settings.model,
            settings.store,
            settings.dtype,
            progress,
            experts=settings.experts,
            dense=settings.dense,
        )
    dtype = store.manifest.dtype
    with terminal.status() as say:
        say("loading the whole model with Transformers")
        model = load_whole(path, dtype, device_of(settings, "main"))
    with terminal.progress() as progress:
        done = iter(range(1, 2 * len(passages) + 1))
        found = measure(model, store, passages, lambda: progress("passages", next(done), 2 * len(passages)))
    experts = " and ".join(filter(None, (store.manifest.described or dtype, *dense_changes(store.manifest))))
    return as_quality(found, model=settings.model, dtype=dtype, experts=experts, text=str(text or TEXT.name))


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


def divided(ids: list[int], length: int) -> list[list[int]]:
    """Passages of equally many tokens, so that intervals can be told; a shorter last one is left out."""
    from odmoe.quality.passages import windows

    return [passage for passage in windows(ids, length) if len(passage) == length]
