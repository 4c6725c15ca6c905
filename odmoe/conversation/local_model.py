"""A model on nodes that this process starts or joins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from odmoe.api.options import merge_options
from odmoe.chat import chat_text
from odmoe.conversation.chat_model import Delta, Figures, Message
from odmoe.conversation.transcript import plain_text
from scheduler.errors import ConfigError, ODMoEError, PromptError

if TYPE_CHECKING:
    from main_node.sampling import GenerateOptions
    from odmoe.api.model import Model, OpenedModel
    from odmoe.api.text_answer import TextAnswer
    from odmoe.serve.openai.answer_reader import AnswerReader
    from odmoe.settings.settings import Settings
    from odmoe.terminal import Terminal


class LocalModel:
    """The model of the settings."""

    def __init__(self, settings: Settings, terminal: Terminal, use_template: bool, most_tokens: int | None) -> None:
        """Starts its nodes. `most_tokens`: of an answer; None: as many as the context has room for.

        Raises ConfigError if it has no chat template and `use_template` asks for it, before a node is started;
        CheckpointError, StoreError, ClusterError.
        """
        self._settings, self._terminal = settings, terminal
        self._use_template, self._most_tokens = use_template, most_tokens
        self._nodes = ExitStack()
        self._model = self._start(settings)

    @property
    def name(self) -> str:
        return self._settings.model or self._model.opened.store.manifest.family

    def names(self) -> list[str]:
        return []

    def choose(self, name: str) -> None:
        settings = self._settings.replace(model=name, store=None)
        self._nodes.close()
        try:
            self._model = self._start(settings)
        except ODMoEError:
            self._model = self._start(self._settings)
            raise
        self._settings = settings

    def answer(self, messages: Sequence[Message]) -> _LocalAnswer:
        opened, given = self._model.opened, [dict(one) for one in messages]
        text = chat_text(opened.tokenizer, given) if self._use_template else plain_text(given)
        ids = opened.encode(text, special=not self._use_template)
        room = opened.context - len(ids)
        if room < 1:
            raise PromptError(f"the conversation has {len(ids)} tokens, and the context {opened.context}; /reset it")
        most, how = merge_options(opened.settings, {"max_new_tokens": min(room, self._most_tokens or room)})
        reader = _reader(opened, text, ids, how) if self._use_template else None
        return _LocalAnswer(self._model.answer(ids, most, how, self._terminal.notify), reader)

    def close(self) -> None:
        self._nodes.close()

    def _start(self, settings: Settings) -> Model:
        from odmoe.api.model import start_model
        from odmoe.clusters.node_watch import NodeWatch

        with ExitStack() as undo:
            model = undo.enter_context(start_model(settings, self._terminal, self._check_template))
            undo.enter_context(NodeWatch(model.cluster, self._terminal.notify))
            self._nodes = undo.pop_all()
        return model

    def _check_template(self, opened: OpenedModel) -> None:
        if self._use_template and not getattr(opened.tokenizer, "chat_template", None):
            raise ConfigError(
                f"model {opened.settings.model} has no chat template; use an instruct model, or have it continue plain "
                "text with --no-template"
            )


def _reader(opened: OpenedModel, text: str, ids: list[int], how: GenerateOptions) -> AnswerReader:
    """Tells what the model thinks from its answer. `text`: the chat in the model's template."""
    from odmoe.response_parsing.forms import find_form, marking_tokens
    from odmoe.response_parsing.parsers import make_parser
    from odmoe.serve.openai.answer_reader import AnswerReader
    from odmoe.text import StoppedText, without_marks

    form = find_form(opened.tokenizer)
    shown = marking_tokens(opened.tokenizer, form)
    marked = StoppedText(opened.tokenizer, how.get("stop", ()), ids, shown) if shown else None
    return AnswerReader(make_parser(form, without_marks(text), []), marked)


class _LocalAnswer:
    def __init__(self, answer: TextAnswer, reader: AnswerReader | None) -> None:
        self._answer, self._reader = answer, reader

    def __iter__(self) -> Iterator[Delta]:
        from odmoe.serve.openai.parts import Part

        with self._answer as pieces:
            for text, step in pieces:
                if self._reader is None:
                    yield Delta(text)
                    continue
                for found in self._reader.push(Part(0, text, [step], step.finish)):
                    yield Delta(found.get("content") or "", found.get("reasoning_content") or "")

    def cancel(self) -> None:
        self._answer.cancel()

    @property
    def figures(self) -> Figures:
        report = self._answer.report
        if report is None:  # it was given up
            return Figures(None, None, None, None, None, None)
        return Figures(
            report.prompt_tokens,
            getattr(report, "cached_tokens", None),
            report.new_tokens,
            report.ttft_s,
            report.decode_tokens_per_s,
            report.finish,
        )
