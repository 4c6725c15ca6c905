"""`odmoe verify`: this engine's greedy answers beside those of Transformers' own `generate` with `eager` experts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odmoe.clusters.process import prepare_libraries
from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Debug, Json, Quiet, option, switch
from odmoe.commands.shared.prompts import read_prompts
from odmoe.commands.shared.quality_run import LEAST_TEXT, TEXT_TOKENS, run_quality
from odmoe.commands.texts import quality_text
from odmoe.commands.texts.verify_text import as_text
from odmoe.settings.derived import VERIFY_FLAGS
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.system_settings import system_name
from odmoe.terminal import Terminal
from odmoe.training.domains import training_prompts
from scheduler.errors import ConfigError, CorruptCheckpointError, PromptError

if TYPE_CHECKING:
    import torch

    from checkpoint.store import ExpertStore
    from odmoe.commands.shared.comparison import Answer

SAMPLES = 3

Step = Callable[[], None]


@with_settings(Settings, VERIFY_FLAGS, chooses=False)
def verify(
    flags: dict[str, Any],
    model: Annotated[str | None, typer.Argument(help="Model directory, GGUF file or org/name on the Hub")] = None,
    prompt: Annotated[str | None, typer.Argument(help=f"Prompt (default: {SAMPLES} sample prompts)")] = None,
    named_model: Annotated[
        str | None, option("-m", "--model", help="The model, not as first argument", metavar="MODEL")
    ] = None,
    prompts: Annotated[
        Path | None, option(help="File of prompts, one per line, as text or JSON strings", metavar="PATH")
    ] = None,
    tokens: Annotated[int, option("-n", "--tokens", help="Tokens of each answer (default: 32)", metavar="N")] = 32,
    quality: Annotated[bool, switch("--quality", help="Compare perplexity and right answers instead")] = False,
    text: Annotated[
        Path | None, option(help="Text for --quality (default: problems and sonnets that come with it)", metavar="PATH")
    ] = None,
    text_tokens: Annotated[int, option(help="Most tokens of it (default: 20000)", metavar="N")] = TEXT_TOKENS,
    tasks: Annotated[
        Path | None, option(help="YAML table of tasks for --quality (docs/models.md)", metavar="PATH")
    ] = None,
    config: Annotated[
        str | None, option("--config", help="YAML file of settings, as for generate", metavar="PATH")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare tokens and logits with those of Transformers on the same checkpoint.

    Both decode greedily. For Transformers the whole model must fit in memory.

    The exit code is 0 if tokens are equal, and logits up to rounding; otherwise 1.

    A system that is approximate by design is reported as such, with exit code 0.

    With --quality: perplexity, KL divergence and right answers of the store's model, or of an approximate system,
    beside the checkpoint's. The exit code is 0.
    """
    if named_model is not None:
        if prompt is not None:
            raise ConfigError(f"two models are given, {model!r} and -m {named_model!r}; leave one out")
        model, prompt = named_model, model
    if model is None:
        raise ConfigError("no model is given; give a model directory, such as models/demo-moe")
    settings = effective(flags | {"model": model}, config, chooses=False).settings
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; allowed: 1, 2, ...")
    if settings.uses_existing_ray:
        raise ConfigError(
            f"--cluster is {settings.cluster!r}; allowed for verify: embedded, local (the reference needs the whole "
            "model on this machine)"
        )
    if text_tokens < LEAST_TEXT:
        raise ConfigError(f"--text-tokens is {text_tokens}; allowed: {LEAST_TEXT}, {LEAST_TEXT + 1}, ...")
    if quality:
        measured = run_quality(settings, text, text_tokens, Terminal(quiet, debug), tasks)
        print(json.dumps(dataclasses.asdict(measured)) if as_json else quality_text.as_text(measured))
        return
    given = prompt is not None or prompts is not None
    texts = read_prompts(prompt, prompts) if given else training_prompts()["problems"][:SAMPLES]
    if not run_verify(settings, texts, tokens, as_json, Terminal(quiet, debug)):
        raise typer.Exit(1)


def run_verify(settings: Settings, prompts: list[str], tokens: int, as_json: bool, terminal: Terminal) -> bool:
    """Compare the answers to these prompts, `tokens` each, and print the verdict. False if they differ and should not.

    Raises ConfigError, CheckpointError, DoesNotFitError or PromptError before the model is loaded.
    """
    from main_node.exactness import changed_weights
    from odmoe.commands.shared.comparison import Verdict, as_dict, compare
    from odmoe.commands.shared.whole_model import check_memory, open_checkpoint

    checkpoint = open_checkpoint(settings, terminal)
    from main_node.shape import limited_context
    from odmoe.clusters.devices import device_of
    from odmoe.text import load_tokenizer

    # A store takes long to make: the prompts are checked before.
    tokenizer = load_tokenizer(checkpoint.path, CorruptCheckpointError)
    ids = encode_prompts(tokenizer, prompts, tokens, limited_context(checkpoint.context, settings.ctx_size))
    settings, store = _ready_store(settings, terminal)
    prepare_libraries(settings.threads_a_node)  # the reference, too, computes with that number
    device = device_of(settings, "main")  # others round differently
    dtype = store.manifest.dtype
    if dtype != checkpoint.dtype:  # a store that was there may have another dtype than its checkpoint
        check_memory(checkpoint.path.name, checkpoint.config, dtype)
    expected = _expected_answers(checkpoint.path, store, device, ids, tokens, terminal)
    answers = _own_answers(settings, store, ids, tokens, terminal)
    reasons = (_by_design(settings), _by_devices([report for _, report in answers]))
    verdict = Verdict(
        model=settings.model,
        system=system_name(settings.system, settings.system_config),
        cluster=settings.cluster,
        dtype=dtype,
        device=str(device),
        approximate=" and ".join(filter(None, reasons)),
        prompts=[compare(got, wanted, dtype) for (got, _), wanted in zip(answers, expected, strict=True)],
        weights=changed_weights(store.manifest),
    )
    print(json.dumps(as_dict(verdict)) if as_json else as_text(verdict, tokenizer))
    return verdict.verdict != "different"


def _ready_store(settings: Settings, terminal: Terminal) -> tuple[Settings, ExpertStore]:
    """The store, and the settings with all that follows from it."""
    from odmoe.clusters.configuration import check_fits, with_precision
    from odmoe.clusters.device_choice import choose_devices
    from odmoe.clusters.threads import with_threads
    from odmoe.stores import store_of

    with terminal.progress() as progress:
        store = store_of(settings, progress)
        settings = with_threads(settings, store)
        check_fits(settings, store)
        return choose_devices(with_precision(settings, store), store), store


def _expected_answers(
    path: Path, store: ExpertStore, device: torch.device, ids: list[list[int]], tokens: int, terminal: Terminal
) -> list[Answer]:
    """Those of Transformers, with the store's weights if these are others than the checkpoint's."""
    from checkpoint.devices.names import return_memory
    from checkpoint.encoded_dense import EncodedFiles
    from odmoe.commands.shared.whole_model import load_whole
    from odmoe.quality.quality import load_experts

    with terminal.status("loading the whole model with Transformers"):
        model = load_whole(path, store.manifest.dtype, device)
        if store.manifest.quantised_to:
            load_experts(model, store)  # as the store has them, as are dense weights in few bits
        EncodedFiles(store.dense).restore_into(model)
    with terminal.progress() as progress:
        step = _counter(progress, "Transformers", len(ids) * tokens)
        found = [reference(model, prompt, tokens, step) for prompt in ids]
    del model
    return_memory()  # the nodes need the room
    return found


def _own_answers(
    settings: Settings, store: ExpertStore, ids: list[list[int]], tokens: int, terminal: Terminal
) -> list[tuple[Answer, Any]]:
    """Those of this engine, with their reports."""
    from odmoe.start import start_cluster

    with terminal.status() as say:
        cluster = start_cluster(settings, store, say)
    with closing(cluster), terminal.progress() as progress:
        step = _counter(progress, "this engine", len(ids) * tokens)
        return [answer(cluster, prompt, tokens, step) for prompt in ids]


def encode_prompts(tokenizer: Any, prompts: list[str], tokens: int, context: int) -> list[list[int]]:
    """Token ids of every prompt. Raises PromptError if prompt and answer do not fit the model's context."""
    from odmoe.text import encode

    found = [encode(tokenizer, prompt, context) for prompt in prompts]
    longest = max(map(len, found))
    if longest + tokens > context:
        raise PromptError(
            f"a prompt of {longest} tokens and --tokens {tokens} do not fit the model's context of {context}; "
            f"allowed for --tokens: 1 to {context - longest}"
        )
    return found


def reference(model: Any, prompt: list[int], tokens: int, step: Step = lambda: None) -> Answer:
    """Transformers' own greedy answer; end of sequence does not end it. `step`: called after each token.

    The model's generation settings hold, but for those that the engine does not support. Raises ConfigError if
    Transformers refuses them.
    """
    import torch

    from main_node.sampling import NEUTRAL
    from odmoe.commands.shared.comparison import Answer

    try:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt], device=model.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                streamer=_Streamer(step),
                **NEUTRAL,
            )
    except ValueError as error:
        raise ConfigError(
            f"Transformers refuses the settings in the model's generation_config.json: {error}; correct that file"
        ) from error
    return Answer(out.sequences[0, len(prompt) :].tolist(), [logits[0].float().cpu() for logits in out.logits])


class _Streamer:
    """What `generate` hands the prompt to, and then each token."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self._step()
        self._prompt = False

    def end(self) -> None:
        pass


def answer(cluster: Any, prompt: list[int], tokens: int, step: Step = lambda: None) -> tuple[Answer, Any]:
    """The engine's greedy answer, and its report. Logits stay on the main node unless that is in this process."""
    from odmoe.commands.shared.comparison import Answer

    main = getattr(cluster, "main", None)
    logits: list[torch.Tensor] = []
    if main is not None:
        main.on_logits = lambda _, values: logits.append(values)
    report: Any = None  # the closing step brings it
    for one in cluster.generate(prompt, tokens, ignore_eos=True):
        if one.token_id is not None:
            step()
        report = one.report
    return Answer(list(report.token_ids), logits if main is not None else None), report


def _by_design(settings: Settings) -> str:
    """Why answers may differ from Transformers'; empty if they may not."""
    changing = [f"{field} {name}" for field, name in settings.inexact.items()]
    if not changing:
        return ""
    return f"{' and '.join(changing)} {'changes' if len(changing) == 1 else 'change'} answers by design"


def _by_devices(reports: Sequence[Any]) -> str:
    """The same, of the devices that computed."""
    apart = next((report.devices for report in reports if not report.one_kind), None)
    if apart is None:
        return ""
    workers = " and ".join(dict.fromkeys(apart["workers"]))
    return f"the main node on {apart['main']} and workers on {workers} round differently"


def _counter(progress: Callable[[str, int, int], None], what: str, total: int) -> Step:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    progress(what, 0, total)
    return step
