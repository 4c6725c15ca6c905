"""`odmoe generate`: one prompt and one answer, or many of both."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.clusters.process import prepare_process
from odmoe.commands.checks import check_early
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.terminal import Terminal
from scheduler.errors import ODMoEError, PromptError, RequestError
from scheduler.files import write_whole
from scheduler.policies.registry import forms_of
from scheduler.trace import write_trace

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from main_node.report import Report
    from odmoe.clusters.base import Answering, Cluster, Say


@dataclass(frozen=True, slots=True)
class Job:
    """A cluster, and all that its answers need. `settings`: how to answer; `served`: how the nodes run, which somebody
    else may have said. `under_way`: answers that are."""

    settings: Settings
    served: Settings
    tokenizer: Any
    cluster: Cluster
    dtype: str
    under_way: set[Answering] = field(default_factory=set)

    def answer(self, ids: list[int], show: Callable[[str], None]) -> tuple[str, Report | None]:
        """One answer; `show` gets its text as it comes."""
        from odmoe.text import StoppedText

        text, pieces, report = StoppedText(self.tokenizer, self.settings.stop), [], None
        with closing(self.cluster.generate(ids, **answering(self.settings))) as steps:
            self.under_way.add(steps)
            try:
                for step in steps:
                    pieces.append(text.push(step.token_id) + (text.flush() if step.report else ""))
                    show(pieces[-1])
                    report = step.report
            finally:
                self.under_way.discard(steps)
        return "".join(pieces), report

    def facts(self, text: str, report: Report) -> dict[str, Any]:
        """What --json prints of one answer."""
        return {
            "text": text, **dataclasses.asdict(report), "cluster": self.served.cluster,
            "shadow": shadow_of(self.served), "dtype": self.dtype, "system": self.served.system,
            **{choice: getattr(self.served, choice) for choice in (*CHOICES, *NUMBERS)},
            "device_memory": self.served.device_memory,
        }  # fmt: skip


def run_generate(
    settings: Settings,
    prompts: list[str],
    as_json: bool,
    terminal: Terminal,
    parallel: int = 1,
    many: bool = False,
    cluster_name: str | None = None,
) -> None:
    """Everything that can be wrong with model, store or prompts is found before a node is started.

    `many`: prompts of a file, `parallel` of them at once; even if there is only one. `cluster_name`: how whoever asked
    calls the cluster.
    """
    prepare_process(terminal.debug)
    check_early(settings)
    if settings.model:
        with terminal.progress() as progress:
            from odmoe.stores import prepare_store

            forms = forms_of(settings.precision)
            store = prepare_store(settings.model, settings.store, settings.dtype, progress, forms)
        from odmoe.clusters.nodes import check_fits

        check_fits(settings, store)
        with terminal.status() as say:
            tokenizer, ids = _tokens(settings, prompts, store, many, say)
            cluster = start_cluster(settings, store, say)
    else:  # whatever the cluster serves
        with terminal.status() as say:
            cluster = start_cluster(settings, None, say)
    with closing(cluster):
        if not settings.model:
            from odmoe.stores import open_verified

            store = open_verified(str(cluster.store()))
            tokenizer, ids = _tokens(settings, prompts, store, many)
        served = cluster.serves().model_copy(update={"cluster": cluster_name or settings.cluster})
        job = Job(settings, served, tokenizer, cluster, store.manifest.dtype)
        try:
            if many:
                _many(job, ids, parallel, as_json, terminal)
            else:
                _one(job, ids[0], as_json, terminal)
        finally:
            _write_records(settings, job)  # most wanted where something went wrong


def _tokens(
    settings: Settings, prompts: list[str], store: ExpertStore, many: bool, say: Say = lambda text: None
) -> tuple[Any, list[list[int]]]:
    """The store's tokenizer, and every prompt's tokens. Raises PromptError."""
    say("reading the tokenizer")
    from main_node.shape import limited, model_shape
    from odmoe.text import load_tokenizer

    tokenizer = load_tokenizer(store.dense)
    context = limited(model_shape(store), settings.ctx_size).context
    return tokenizer, [
        to_tokens(settings, tokenizer, prompt, context, n if many else 0) for n, prompt in enumerate(prompts, 1)
    ]


def _write_records(settings: Settings, job: Job) -> None:
    failing = sys.exc_info()[0] is not None
    cluster = job.cluster
    try:
        with ExitStack() as both:  # one that cannot be written does not keep the other from being
            if settings.record is not None:
                both.callback(lambda path: write_whole(path, cluster.recording()), Path(settings.record))
            if settings.trace is not None:
                both.callback(lambda path: write_trace(path, cluster.trace(), about(job.served)), Path(settings.trace))
    except (ODMoEError, OSError):
        if not failing:  # else what failed first is what is told
            raise


CHOICES = ("predictor", "residency", "router", "placement", "precision", "prefill")
NUMBERS = ("alpha", "prefetch")


def system_of(settings: Settings) -> str:
    """Its name, and what was chosen otherwise: `fate + residency lru`."""
    preset = settings.preset
    changed = [name for name in (*CHOICES, *NUMBERS) if getattr(settings, name) != getattr(preset, name)]
    return " + ".join([settings.system, *(f"{name} {getattr(settings, name)}" for name in changed)])


def shadow_of(settings: Settings) -> str:
    """The precision of the shadow that runs; none where nothing asks it."""
    return settings.shadow if settings.shadowed else "none"


def about(settings: Settings) -> dict[str, Any]:
    """What a trace says of itself."""
    shown = (
        "model", "cluster", "workers", "slots", "device_memory", "system", *CHOICES, *NUMBERS, "align_token",
        "align_kv", "dtype", "loader",
    )  # fmt: skip
    values = {name: getattr(settings, name) for name in shown}
    if settings.device_memory is not None:
        del values["slots"]  # as many as that has room for
    return values | {"shadow": shadow_of(settings), "emulated": settings.profile}


def to_tokens(settings: Settings, tokenizer: Any, prompt: str, context: int, number: int = 0) -> list[int]:
    """A prompt's token ids, in the chat template if --chat says so. Raises PromptError, saying which prompt it is where
    it has a `number`; ConfigError."""
    from odmoe.text import as_chat, encode

    text = as_chat(tokenizer, prompt, settings.system_prompt) if settings.chat else prompt
    try:
        return encode(tokenizer, text, context, special=not settings.chat)
    except PromptError as error:
        if not number:
            raise
        raise PromptError(f"prompt {number} of the file: {error}") from error


def answering(settings: Settings) -> dict[str, Any]:
    """How to answer, as arguments of `Cluster.generate`."""
    from main_node.sampling import Sampling

    sampling = Sampling(
        settings.sample, settings.temperature, settings.top_k, settings.top_p, settings.repetition_penalty,
        settings.seed,
    )  # fmt: skip
    return {
        "max_new_tokens": settings.max_new_tokens, "sampling": sampling, "stop": settings.stop,
        "ignore_eos": settings.ignore_eos,
    }  # fmt: skip


def _one(job: Job, ids: list[int], as_json: bool, terminal: Terminal) -> None:
    """The answer as it comes, then its figures."""
    text, report = job.answer(ids, (lambda piece: None) if as_json else _show)
    if report is None:
        return
    if as_json:
        print(json.dumps(job.facts(text, report)))
        return
    _show("\n")
    terminal.report(report, job.served.cluster, system_of(job.served))


def _many(job: Job, prompts: list[list[int]], parallel: int, as_json: bool, terminal: Terminal) -> None:
    """`parallel` answers at once, printed in the prompts' order. One that fails does not stop the others."""
    failed: list[ODMoEError] = []
    with terminal.progress() as progress, futures.ThreadPoolExecutor(parallel) as pool:
        for number, outcome in enumerate(_in_order(job, prompts, pool)):
            progress("answers", number + 1, len(prompts))
            if isinstance(outcome, ODMoEError):
                failed.append(outcome)
                fact: dict[str, Any] = {"error": {"type": type(outcome).__name__, "message": str(outcome)}}
                text = f"[{type(outcome).__name__}: {outcome}]"
            else:
                text, report = outcome
                fact = job.facts(text, report) if report else {}
            out = sys.stderr if not as_json and isinstance(outcome, ODMoEError) else sys.stdout
            print(json.dumps({"prompt": number, **fact}) if as_json else text, file=out, flush=True)
    if failed:
        raise RequestError(f"{len(failed)} of {len(prompts)} prompts failed; the first: {failed[0]}")


def _in_order(
    job: Job, prompts: list[list[int]], pool: futures.Executor
) -> Iterator[tuple[str, Report | None] | ODMoEError]:
    stop = threading.Event()

    def answer(ids: list[int]) -> tuple[str, Report | None] | ODMoEError:
        def show(piece: str) -> None:
            if stop.is_set():
                raise RequestError("interrupted")

        try:
            return job.answer(ids, show)
        except ODMoEError as error:
            return error

    running = [pool.submit(answer, ids) for ids in prompts]
    try:
        for one in running:
            yield one.result()
    finally:
        stop.set()
        for one in running:
            one.cancel()
        for steps in job.under_way.copy():  # they may wait long for their next token
            steps.cancel()


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
