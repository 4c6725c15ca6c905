"""`odmoe generate`: one prompt and one answer, or many of both."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odmoe.api.checks import check_early, check_start
from odmoe.api.options import options_from_settings
from odmoe.api.records import shadow_of, write_records
from odmoe.clusters.node_watch import NodeWatch
from odmoe.clusters.process import prepare_process
from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Config, LibrariesDebug, ResultOnly, option, switch
from odmoe.commands.shared.prompts import read_prompts
from odmoe.commands.texts.report_text import show_answer, show_answers
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.system_settings import system_name
from odmoe.settings.table import flag
from odmoe.terminal import Output, Terminal, count_text
from scheduler.errors import ODMoEError, PromptError, PromptsFailedError, RequestError

if TYPE_CHECKING:
    from main_node.report import Report
    from odmoe.api.model import Model, OpenedModel
    from odmoe.api.text_answer import Piece, TextAnswer
    from odmoe.clusters.base import Say


@with_settings(Settings)
def generate(
    flags: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="Prompt (default: standard input)")] = None,
    prompts: Annotated[Path | None, option(help="File of prompts, one per line", metavar="PATH")] = None,
    config: Config = None,
    as_json: Annotated[bool, switch("--json", help="Print one JSON object per answer")] = False,
    quiet: ResultOnly = False,
    debug: LibrariesDebug = False,
) -> None:
    """Answer a prompt, or a file of prompts.

    --cluster is embedded (in this process), local (a process for each node),
    auto or host:port (a running Ray cluster), or a cluster FILE.yaml.
    odmoe systems lists systems and policies. odmoe config shows the settings.
    """
    settings = effective(flags, config).settings
    check_start(settings, flag, "command")
    prompt_texts = read_prompts(prompt, prompts)
    output, listed = Output(as_json, quiet, debug), prompts is not None
    if settings.has_cluster_file:
        from odmoe.commands.over_ssh.generate import ask

        raise typer.Exit(ask(settings, prompt_texts, output, listed))
    run_generate(settings, prompt_texts, output, listed)


@dataclass(frozen=True, slots=True)
class Job:
    """A cluster, and what all its answers share."""

    settings: Settings
    """How to answer."""
    served: Settings
    """How the nodes run: those of a cluster that was running may have been started with other settings."""
    model: Model
    notify: Callable[[str], None] = lambda text: None
    """Gets a line about each retry."""
    under_way: set[TextAnswer] = field(default_factory=set)
    """Answers that have begun and not ended."""

    @property
    def system(self) -> str:
        """Its name, with the policies that differ from its preset."""
        return system_name(self.served.system, self.served.system_config)

    def answer(self, ids: list[int], show: Callable[[str], None]) -> tuple[str, Report | None]:
        """One answer. `show` gets the text that each token completes, often empty."""
        settings, pieces = self.settings, []
        with self.model.answer(ids, settings.max_new_tokens, options_from_settings(settings), self.notify) as answer:
            self.under_way.add(answer)
            try:
                shown = self._piece_texts(ids)
                for piece in answer:
                    pieces.append(shown(piece))
                    show(pieces[-1])
            finally:
                self.under_way.discard(answer)
        return "".join(pieces), answer.report

    def _piece_texts(self, ids: list[int]) -> Callable[[Piece], str]:
        """A function that gives the text of each piece: of chats with marks around reasoning."""
        if not self.settings.chat:
            return lambda piece: piece.text
        from odmoe.response_parsing.shown_answer import ShownAnswer

        return ShownAnswer(self.model.opened.tokenizer, ids, options_from_settings(self.settings).get("stop", ())).push

    def facts(self, text: str, report: Report) -> dict[str, Any]:
        """What --json prints of one answer."""
        figures = dataclasses.asdict(report)
        of_cluster = figures.pop("cluster")
        return {
            "text": text,
            **figures,
            **of_cluster,
            "cluster": self.served.cluster,
            "shadow": shadow_of(self.served),
            "dtype": self.model.opened.store.manifest.dtype,
            "system": self.served.system,
            **dataclasses.asdict(self.served.system_config),
            "device_memory": self.served.device_memory,
            "memory": self.served.memory,
            "memory_budget": self._budget(),
        }

    def _budget(self) -> dict[str, int] | None:
        """The shares of --memory, in bytes; `experts` have what the others leave. None without a budget."""
        from odmoe.clusters.configuration import budget_of  # imports torch, which the model has done by now

        budget = budget_of(self.served, self.model.opened.store)
        return None if budget is None else {"total": budget.total, **budget.shares, "experts": budget.bytes_left}


def run_generate(
    settings: Settings,
    prompts: list[str],
    output: Output,
    listed: bool = False,
    cluster_name: str | None = None,
) -> None:
    """Check model, store and prompts before a node is started, then answer.

    `listed`: the prompts are those of a file, and as many as `settings.parallel` are answered at once. The answer to a
    single prompt streams.
    `cluster_name`: the user's name for the cluster, if it is not `settings.cluster`.
    """
    from odmoe.api.model import start_model

    terminal = Terminal(output.quiet, output.debug)
    prepare_process(output.debug)
    check_early(settings)
    if settings.memory is not None and not listed and not settings.uses_existing_ray:
        settings = settings.model_copy(update={"parallel": 1})  # --memory keeps room for KV caches of no other request
    ids: list[list[int]] = []
    with start_model(settings, terminal, lambda opened: ids.extend(_tokens(opened, prompts))) as model:
        served = model.cluster.serves().model_copy(update={"cluster": cluster_name or settings.cluster})
        job = Job(settings, served, model, terminal.notify)
        try:
            with NodeWatch(model.cluster, terminal.notify):
                if listed:
                    _answer_all(job, ids, prompts, output, terminal)
                else:
                    _answer_one(job, ids[0], output, terminal)
        finally:
            write_records(settings, job.served, model)  # most wanted if something went wrong


def _tokens(opened: OpenedModel, prompts: list[str]) -> list[list[int]]:
    """Every prompt's token ids. Raises PromptError, ConfigError."""
    ids = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids.append(to_tokens(opened, prompt))
        except PromptError as error:
            if len(prompts) == 1:
                raise
            raise PromptError(f"prompt {number} of the file: {error}") from error
    return ids


def to_tokens(opened: OpenedModel, prompt: str) -> list[int]:
    """A prompt's token ids, with --chat in the model's chat template. Raises PromptError, ConfigError."""
    settings = opened.settings
    if not settings.chat:
        return opened.encode(prompt)
    from odmoe.chat import chat_text

    chat = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt is not None else []
    return opened.encode(chat_text(opened.tokenizer, [*chat, {"role": "user", "content": prompt}]), special=False)


def _answer_one(job: Job, ids: list[int], output: Output, terminal: Terminal) -> None:
    """The answer as its tokens come, then its figures."""
    tokens = 0
    with ExitStack() as waiting:
        say = waiting.enter_context(terminal.status("computing the first token"))

        def show(piece: str) -> None:
            nonlocal tokens
            tokens += 1
            if output.json:
                say(progress_of(tokens, job.served))
            elif piece:
                waiting.close()
                _write(piece)

        try:
            text, report = job.answer(ids, show)
        except BaseException:
            if tokens and not output.json:
                _write("\n")  # what follows begins on a line of its own
            raise
    if report is None:
        return
    if output.json:
        _write(json.dumps(job.facts(text, report)) + "\n")
    else:
        _write("\n")
        show_answer(terminal, report, job.served, job.system)
    _tell_of_limit(job, [report], terminal)


def progress_of(tokens: int, served: Settings) -> str:
    """What is shown of an answer after so many tokens. If the nodes start with the command, the second token waits
    for the shadow."""
    waits = tokens == 1 and served.has_shadow and not served.uses_existing_ray
    return f"answering: {count_text(tokens, 'token')}" + "; decoding begins when the shadow is ready" * waits


def _answer_all(job: Job, prompts: list[list[int]], texts: list[str], output: Output, terminal: Terminal) -> None:
    """Each answer when it is whole, in the prompts' order; then the figures. One that fails does not stop the others.

    Standard output is the same on a terminal and elsewhere: for each answer a line `[N]`, with the number of its
    prompt from 1, its text, and an empty line.
    """
    reports: dict[int, Report] = {}
    failed: dict[int, ODMoEError] = {}
    began = time.monotonic()
    with futures.ThreadPoolExecutor(job.settings.parallel) as pool, closing(Batch(job, prompts, pool)) as batch:
        for number in range(1, len(prompts) + 1):
            with terminal.status() as say:
                outcome = batch.wait(number - 1, say)
            if isinstance(outcome, ODMoEError):
                failed[number] = outcome
                error = {"type": type(outcome).__name__, "message": str(outcome)}
                if output.json:
                    _write(json.dumps({"prompt": number, "error": error}) + "\n")
                else:
                    terminal.print_always(f"prompt {number}: {error['type']}: {error['message']}")
                continue
            text, report = outcome
            if report is not None:
                reports[number] = report
            if output.json:
                _write(json.dumps({"prompt": number, **(job.facts(text, report) if report else {})}) + "\n")
            else:
                _write(f"[{number}]\n{text}\n\n")
    if not output.json:
        show_answers(terminal, reports, texts, time.monotonic() - began, job.served, job.system)
    _tell_of_limit(job, list(reports.values()), terminal)
    if failed:
        number, first = next(iter(failed.items()))
        raise PromptsFailedError(f"{len(failed)} of {len(prompts)} prompts failed; prompt {number}: {first}")


def _tell_of_limit(job: Job, reports: Sequence[Report], terminal: Terminal) -> None:
    """A line if answers end at the default limit: a user who gave none may not know that there is one."""
    cut = sum(report.finish == "length" for report in reports)
    if cut and not job.settings.is_given("max_new_tokens"):
        cut_text = "the answer ends" if len(reports) == 1 else f"{cut} of {len(reports)} answers end"
        terminal.notify(f"{cut_text} at {job.settings.max_new_tokens} tokens, the default limit; -n N sets another one")


class Batch:
    """Several answers under way at once, each in a thread of `pool`."""

    def __init__(self, job: Job, prompts: list[list[int]], pool: futures.Executor) -> None:
        self._job = job
        self._stopped = threading.Event()
        self._tokens = itertools.count(1)
        self._say: Say = lambda text: None
        self._running: list[futures.Future[tuple[str, Report | None] | ODMoEError]] = []
        self._running += [pool.submit(self._answer, ids) for ids in prompts]

    def wait(self, index: int, say: Say) -> tuple[str, Report | None] | ODMoEError:
        """The answer to prompt `index` from 0, or why there is none. `say` gets the progress of all of them."""
        self._say = say
        return self._running[index].result()

    def _answer(self, ids: list[int]) -> tuple[str, Report | None] | ODMoEError:
        try:
            return self._job.answer(ids, self._progress)
        except ODMoEError as error:
            return error

    def _progress(self, piece: str) -> None:
        if self._stopped.is_set():
            raise RequestError("interrupted")
        done = sum(one.done() for one in self._running)
        self._say(f"{done} of {count_text(len(self._running), 'answer')}, {count_text(next(self._tokens), 'token')}")

    def close(self) -> None:
        """Give up every answer that is not done."""
        self._stopped.set()
        for one in self._running:
            one.cancel()
        for steps in self._job.under_way.copy():  # they may wait long for their next token
            steps.cancel()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
