"""A model on nodes that this process starts or joins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from odmoe.chat import chat_text
from odmoe.conversation.chat_model import Delta, Figures, Message
from odmoe.conversation.transcript import plain_text
from scheduler.errors import ConfigError, ODMoEError, PromptError, RequestError

if TYPE_CHECKING:
    from odmoe.api.completion import Stream
    from odmoe.api.model import Model, OpenedModel
    from odmoe.settings.settings import Settings
    from odmoe.terminal import Terminal


class LocalModel:
    """The model of the settings."""

    def __init__(self, settings: Settings, terminal: Terminal, use_template: bool, most_tokens: int | None) -> None:
        """Starts its nodes. `most_tokens`: of an answer; None: as many as the context has room for.

        Raises ConfigError where it has no chat template and `use_template` asks for it, before a node is started;
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
        if self._use_template:
            ids = opened.encode(chat_text(opened.tokenizer, given), special=False)
        else:
            ids = opened.encode(plain_text(given))
        room = opened.context - len(ids)
        if room < 1:
            raise PromptError(f"the conversation has {len(ids)} tokens, and the context {opened.context}; /reset it")
        return _LocalAnswer(self._model.stream(ids, max_new_tokens=min(room, self._most_tokens or room)))

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


class _LocalAnswer:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Delta]:
        with self._stream as chunks:
            for chunk in chunks:
                yield Delta(chunk.text)

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def figures(self) -> Figures:
        try:
            report = self._stream.completion.report
        except RequestError:  # it was given up
            return Figures(None, None, None, None, None, None)
        return Figures(
            report.prompt_tokens,
            getattr(report, "cached_tokens", None),
            report.new_tokens,
            report.ttft_s,
            report.decode_tokens_per_s,
            report.finish,
        )
