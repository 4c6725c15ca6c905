"""A model on a running cluster, and what is known of it before a node runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from odmoe.api.asking import AnyModel, Asked
from odmoe.api.chat import chat_text
from odmoe.api.local_stream import LocalStream
from odmoe.api.options import how_asked
from odmoe.api.text_answer import TextAnswer
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from scheduler.errors import ClusterError, PromptError

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from main_node.sampling import How
    from odmoe.clusters.base import Cluster, Say
    from odmoe.terminal import Terminal


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's store and tokenizer. No node runs yet."""

    settings: Settings
    store: ExpertStore
    tokenizer: Any
    context: int
    """Most tokens of prompt and answer."""

    def encode(self, prompt: str, special: bool = True) -> list[int]:
        """A prompt's token ids. `special`: with the tokenizer's special tokens. Raises PromptError."""
        from odmoe.text import encode

        return encode(self.tokenizer, prompt, self.context, special)

    def start(self, say: Say = lambda text: None) -> Model:
        """Start the cluster of the settings, or join the one that serves this model. Raises ClusterError."""
        return Model(self, start_cluster(self.settings, self.store, say))


class Model(AnyModel):
    """Answers prompts. Several answers may be open at once, in a thread each. The end of a `with` block stops every
    node that was started for it."""

    def __init__(self, opened: OpenedModel, cluster: Cluster) -> None:
        self.opened, self.cluster = opened, cluster
        self.at_close: list[Callable[[], None]] = []
        """Called before the nodes stop."""
        self._closed = False

    def answer(
        self, prompt: list[int], max_new_tokens: int, how: How, notify: Callable[[str], None] = lambda text: None
    ) -> TextAnswer:
        """The answer to a prompt's token ids. `notify`: gets a line about each retry (`settings.retry`)."""
        settings = self.opened.settings
        return TextAnswer(
            self.cluster,
            self.opened.tokenizer,
            prompt,
            max_new_tokens,
            how,
            settings.retry,
            settings.launch_s,
            notify,
        )

    def _begin(self, asked: Asked) -> LocalStream:
        if self._closed:
            raise ClusterError("the model is closed; load it again")
        max_new_tokens, how = how_asked(self.opened.settings, asked.options)
        answer = self.answer(self._tokens(asked), max_new_tokens, how)
        return LocalStream(answer, self.opened.tokenizer)

    def _tokens(self, asked: Asked) -> list[int]:
        """Raises PromptError, ConfigError."""
        if asked.messages is not None:
            text = chat_text(self.opened.tokenizer, asked.messages)
            return self.opened.encode(text, special=False)  # the template brings its own
        prompt = asked.prompt
        if isinstance(prompt, str):
            return self.opened.encode(prompt)
        try:
            return [operator.index(token) for token in prompt or ()]
        except TypeError as error:
            raise PromptError(f"the prompt is neither text nor a list of token ids ({error})") from error

    def close(self) -> None:
        """Stop every node that was started for this model. Any number of calls."""
        if not self._closed:
            self._closed = True
            with closing(self.cluster):
                for call in self.at_close:
                    call()


def open_model(settings: Settings, terminal: Terminal) -> OpenedModel:
    """Open the model of the settings; make its store where there is none. `terminal` shows the progress.

    Raises ConfigError, CheckpointError, StoreError.
    """
    from odmoe.clusters.devices import check_devices

    check_devices(settings)
    with terminal.progress("opening the model") as progress:
        from odmoe.clusters.configuration import check_fits, forms_needed
        from odmoe.stores import prepare_store
        from odmoe.text import check_tokenizer

        needed = partial(forms_needed, settings)
        store = prepare_store(
            settings.model, settings.store, settings.dtype, progress, needed, check_tokenizer, settings.experts
        )
    check_fits(settings, store)
    with terminal.status() as say:
        return _opened(settings, store, say)


def start_model(settings: Settings, terminal: Terminal) -> Model:
    """Open the model of the settings and start its cluster; without one, join a running cluster. Raises what
    `open_model` and `join_model` raise."""
    if not settings.model:
        return join_model(settings, terminal)
    opened = open_model(settings, terminal)
    with terminal.status() as say:
        return opened.start(say)


def join_model(settings: Settings, terminal: Terminal) -> Model:
    """Join a running cluster, whatever model it serves. Raises ClusterError, StoreError."""
    from odmoe.stores import open_verified

    with ExitStack() as undo, terminal.status() as say:
        cluster = undo.enter_context(closing(start_cluster(settings, None, say)))
        opened = _opened(settings, open_verified(str(cluster.store())), say)
        undo.pop_all()
        return Model(opened, cluster)


def _opened(settings: Settings, store: ExpertStore, say: Say) -> OpenedModel:
    say("reading the tokenizer")
    from main_node.shape import limited, model_shape
    from odmoe.text import load_tokenizer

    tokenizer = load_tokenizer(store.dense)
    return OpenedModel(settings, store, tokenizer, limited(model_shape(store), settings.ctx_size).context)
