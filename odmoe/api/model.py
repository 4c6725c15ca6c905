"""A model on a running cluster, and what is known of it before a node runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Unpack

from odmoe.api.asking import Message, Prompt, Query, chat_query, prompt_query
from odmoe.api.async_stream import AsyncStream
from odmoe.api.completion import Completion, Stream
from odmoe.api.names import named_as_keywords
from odmoe.api.options import Options, merge_options
from odmoe.api.text_answer import TextAnswer
from odmoe.chat import chat_text
from odmoe.clusters.retries import Retrying
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from scheduler.closing import Closing
from scheduler.errors import ClusterError

if TYPE_CHECKING:
    from checkpoint.store import ExpertStore
    from main_node.sampling import GenerateOptions
    from odmoe.clusters.base import Cluster, Say
    from odmoe.terminal import Terminal
    from odmoe.token_texts import TokenTexts


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's store and tokenizer. No node runs yet."""

    settings: Settings
    store: ExpertStore
    tokenizer: Any
    context: int
    """Most tokens of prompt and answer."""
    choice: str = ""
    """The system that was chosen by this machine's memory, and why; empty if one was named."""
    _encoding: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    """A tokenizer's settings are changed while it encodes."""

    def encode(self, prompt: str, special: bool = True, most: int | None = None) -> list[int]:
        """A prompt's token ids, in any thread. `special`: with the tokenizer's special tokens. `most`: fewer than so
        many; None: than the model's context has. Raises PromptError."""
        from odmoe.text import encode

        with self._encoding:
            return encode(self.tokenizer, prompt, self.context if most is None else most, special)

    def start(self, say: Say = lambda text: None) -> Model:
        """Start the cluster of the settings, or join the one that serves this model. Raises ClusterError."""
        return Model(self, start_cluster(self.settings, self.store, say))


class Model(Closing):
    """Answers prompts and chats. Several answers may be open at once, in a thread or a task each. The end of a `with`
    block stops every node that was started for it."""

    def __init__(self, opened: OpenedModel, cluster: Cluster) -> None:
        self.opened, self.cluster = opened, cluster
        self.before_end, self.after_end = ExitStack(), ExitStack()
        """Closed before the nodes stop, and after it."""
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._closed = False

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to a prompt. Raises PromptError, ConfigError, RequestError, ClusterError."""
        return self._stream(prompt_query(prompt, options)).read()

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The whole answer to a chat, in the model's chat template. Raises what `generate` raises."""
        return self._stream(chat_query(messages, options)).read()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to a prompt, in chunks as they come. Iterating raises what `generate` raises."""
        return self._stream(prompt_query(prompt, options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Stream:
        """The answer to a chat, in chunks as they come."""
        return self._stream(chat_query(messages, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """As `generate`. If the task is cancelled, the answer is given up at once."""
        return await self._astream(prompt_query(prompt, options)).read()

    async def achat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """As `chat`. If the task is cancelled, the answer is given up at once."""
        return await self._astream(chat_query(messages, options)).read()

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """As `stream`, for `async for`."""
        return self._astream(prompt_query(prompt, options))

    def astream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncStream:
        """As `stream_chat`, for `async for`."""
        return self._astream(chat_query(messages, options))

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        how: GenerateOptions,
        notify: Callable[[str], None] = lambda text: None,
    ) -> TextAnswer:
        """The answer to a prompt's token ids. `notify`: gets a line about each retry (`settings.retry`)."""
        settings = self.opened.settings
        return TextAnswer(
            self.cluster,
            self.opened.tokenizer,
            prompt,
            max_new_tokens,
            how,
            Retrying(settings.retry, settings.launch_s, notify),
        )

    def _stream(self, query: Query) -> Stream:
        """Nothing is computed before its first chunk is asked for. Raises ConfigError, PromptError, and ClusterError
        once the model is closed."""
        if not self._closed:
            with named_as_keywords():
                max_new_tokens, how = merge_options(self.opened.settings, query.options)
                answer = self.answer(self._tokens(query), max_new_tokens, how)
            stream = Stream(answer, lambda token: self._texts.text_of(token))
            with self._lock:
                if not self._closed:
                    self._open.add(stream)
                    return stream
        raise ClusterError("the model is closed; load it again")

    def _astream(self, query: Query) -> AsyncStream:
        begin: Callable[[], Stream] = lambda: self._stream(query)  # noqa: E731 - the type is checked
        return AsyncStream(begin)

    @cached_property
    def _texts(self) -> TokenTexts:
        from odmoe.token_texts import TokenTexts

        return TokenTexts(self.opened.tokenizer)

    def _tokens(self, query: Query) -> list[int]:
        """Raises PromptError, ConfigError."""
        if query.messages is not None:
            text = chat_text(self.opened.tokenizer, query.messages)
            return self.opened.encode(text, special=False)  # the template brings its own
        return self.opened.encode(query.prompt) if isinstance(query.prompt, str) else query.prompt or []

    def close(self) -> None:
        """Give up the open answers, and stop every node that was started for this model. Any number of calls."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_streams = list(self._open)
        for stream in open_streams:
            stream.cancel()
        with self.after_end, closing(self.cluster), self.before_end:
            pass


def open_model(settings: Settings, terminal: Terminal) -> OpenedModel:
    """Open the model of the settings; make its store if there is none. `terminal` shows the progress.

    Raises ConfigError, CheckpointError, StoreError.
    """
    from odmoe.clusters.devices import check_devices

    check_devices(settings)
    with terminal.progress("opening the model") as progress:
        from odmoe.clusters.configuration import check_checkpoint, check_fits
        from odmoe.clusters.system_choice import with_system
        from odmoe.clusters.threads import with_threads
        from odmoe.stores import store_of

        store = store_of(settings, progress, partial(check_checkpoint, settings))
    settings, choice = with_system(settings, store)
    settings = with_threads(settings, store)
    check_fits(settings, store)
    with terminal.status() as say:
        return replace(_open_model(settings, store, say), choice=choice)


def start_model(
    settings: Settings, terminal: Terminal, look: Callable[[OpenedModel], None] = lambda opened: None
) -> Model:
    """Open the model of the settings and start its cluster; without one, join a running cluster. `look`: gets the model
    before a node is started for it. Raises what `open_model`, `join_model` and `look` raise."""
    if not settings.model:
        model = join_model(settings, terminal)
        with ExitStack() as undo:
            undo.enter_context(model)
            look(model.opened)
            undo.pop_all()
        return model
    opened = open_model(settings, terminal)
    look(opened)
    if opened.choice:
        terminal.notify(opened.choice)
    with terminal.status() as say:
        return opened.start(say)


def join_model(settings: Settings, terminal: Terminal) -> Model:
    """Join a running cluster, whatever model it serves. Raises ClusterError, StoreError."""
    from odmoe.stores import open_verified

    with ExitStack() as undo, terminal.status() as say:
        cluster = undo.enter_context(closing(start_cluster(settings, None, say)))
        opened = _open_model(settings, open_verified(str(cluster.store())), say)
        undo.pop_all()
        return Model(opened, cluster)


def _open_model(settings: Settings, store: ExpertStore, say: Say) -> OpenedModel:
    say("reading the tokenizer")
    from main_node.shape import model_shape, with_context
    from odmoe.text import load_tokenizer

    tokenizer = load_tokenizer(store.dense)
    return OpenedModel(settings, store, tokenizer, with_context(model_shape(store), settings.ctx_size).context)
