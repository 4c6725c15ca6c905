"""The main node: Transformers' own model without its experts, the KV caches and the token loop."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint import family
from checkpoint.dense import dispatch_experts, load_dense
from checkpoint.store import ExpertStore
from main_node.engine import Engine
from main_node.gate_watch import Watch, wanted
from main_node.report import Report, Times, build_report
from main_node.sampling import GREEDY, Chooser, Sampling
from main_node.sequence import Sequence
from main_node.turns import Turns
from scheduler import types as t
from scheduler.errors import ConfigError, LaunchError, PromptError, RequestCancelledError, RequestFailedError

Stopper = Callable[[tuple[str, ...]], Callable[[int], bool]]
DRAIN_S = 10.0
"""After an answer, how long its last predictions are waited for, so that recall counts them."""
LOOK_S = 0.1
"""How often an answer that waits for the shadow looks whether it was cancelled."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer; the last one carries the report."""

    token_id: int
    report: Report | None = None


class ShadowStart:
    """Brings the shadow up beside the first prefill, which needs no predictions."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._join = join
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shadow-start", daemon=True)
        self._begun = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._thread.start()

    def _run(self) -> None:
        try:
            self._join()
        except Exception as error:  # noqa: BLE001 - as where a stream is read: it ends, and both ends hear of it
            self._error = error

    def wait(self, deadline_s: float, given_up: threading.Event | None = None) -> None:
        """Until the shadow has joined, or `given_up` is set. Raises LaunchError."""
        self.begin()
        end = time.monotonic() + deadline_s
        while self._thread.is_alive() and time.monotonic() < end:
            if given_up is not None and given_up.is_set():
                return
            self._thread.join(min(LOOK_S, max(0.0, end - time.monotonic())))
        if self._thread.is_alive():
            raise LaunchError(f"the shadow was not ready within {deadline_s:g} s; try --shadow none")
        if self._error is not None:
            raise LaunchError(f"the shadow did not come up: {self._error}") from self._error


class Answer(Iterator[Step]):
    """One request. Iterating gives its tokens; `close` and `cancel` give it up, loads under way included."""

    def __init__(
        self,
        main: MainNode,
        number: int,
        sequence: Sequence,
        chooser: Chooser,
        stopped: Callable[[int], bool] | None,
    ) -> None:
        self.number = number
        self.sequence = sequence
        self.chooser = chooser
        self.stopped = stopped
        self._engine = main.engine
        self._steps = main.steps(self)
        self.cancelled = threading.Event()

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        if self.cancelled.is_set():
            self.close()
            raise RequestCancelledError(f"request {self.number} was cancelled")
        try:
            return next(self._steps)
        except RequestFailedError as error:
            if self.cancelled.is_set():
                raise RequestCancelledError(f"request {self.number} was cancelled") from error
            raise

    def cancel(self) -> None:
        """From any thread, at any time: its loads end at once, and whoever waits for its next token hears of it."""
        self.cancelled.set()
        self._engine.close_request(self.number)

    def close(self) -> None:
        """Give the answer up, from the thread that iterates over it."""
        self._steps.close()  # type: ignore[attr-defined]


class MainNode:
    """Answers requests. Several may be open at once; their passes take turns, first come first served.

    `stopper`: texts -> a function that is told every token of an answer, in order, and says when one of the texts is
    complete. `context`: most tokens of prompt and answer, where that is less than the model's own limit.
    `token_predictor`: weights of the token-wise predictor, where the scheduler has one.
    """

    def __init__(
        self,
        store: ExpertStore,
        engine: Engine,
        dtype: torch.dtype,
        shadow: ShadowStart | None,
        launch_s: float = 600.0,
        stopper: Stopper | None = None,
        context: int | None = None,
        token_predictor: Path | None = None,
    ) -> None:
        self.store = store
        self.engine = engine
        self.model = load_dense(store.dense, store.manifest.config, dtype)
        self.shape = limited(model_shape(store), context)
        self.stopper = stopper
        self.on_logits: Callable[[torch.Tensor], None] | None = None
        self.launch_s = launch_s
        self._shadow = shadow
        self._numbers = itertools.count(1)
        self._turns = Turns(launch_s)
        self._pass = t.Visit(0, 0, 0)
        self._open: dict[int, Sequence] = {}
        self._cache_bytes_max = 0
        self._sequence: Sequence | None = None
        strategy = engine.core.strategy
        if wanted(strategy):
            engine.watch = Watch(self.model, strategy, self.shape, self._cache, token_predictor)
        dispatch_experts(self.model, self._experts_of)

    def _cache(self) -> Any:
        """Of the request whose pass is under way."""
        return self._sequence.cache if self._sequence is not None else None

    @contextlib.contextmanager
    def _passing(self, sequence: Sequence) -> Iterator[None]:
        """Around a pass: an answer that is over leaves no cache behind."""
        self._sequence = sequence
        try:
            yield
        finally:
            self._sequence = None

    def _experts_of(self, layer: int) -> Callable[..., torch.Tensor]:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.engine.experts(self._pass._replace(layer=layer), hidden, index, weights)

        return experts

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
        stop: tuple[str, ...] = (),
    ) -> Answer:
        """The answer, a token at a time. Raises PromptError, ConfigError; iterating raises ClusterError, ...

        It ends at an end-of-sequence token (unless `ignore_eos`, for measuring), with the token that completes one of
        the texts in `stop`, after `max_new_tokens`, or where the context is full.
        """
        check_prompt(prompt, self.shape.context, self.model.get_input_embeddings().num_embeddings)
        if max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {max_new_tokens}; allowed: 1, 2, ...")
        if stop and self.stopper is None:
            raise ConfigError(f"stop is {stop}; this main node was made without a tokenizer to find it")
        room = min(max_new_tokens, self.shape.context - len(prompt))
        chooser = Chooser(self.model, sampling, prompt, room, ignore_eos)
        sequence = Sequence(prompt, room, family.new_cache(self.model.config))
        stopped = self.stopper(stop) if stop and self.stopper else None
        return Answer(self, next(self._numbers), sequence, chooser, stopped)

    def steps(self, answer: Answer) -> Iterator[Step]:
        """What `answer` iterates over."""
        self.engine.open_request(answer.number, answer.sequence, len(answer.sequence.prompt))
        self._open[answer.number] = answer.sequence
        try:
            if answer.cancelled.is_set():  # before the engine had heard of it
                raise RequestCancelledError(f"request {answer.number} was cancelled")
            yield from self._answer(answer)
        finally:
            del self._open[answer.number]
            self.engine.close_request(answer.number)

    def _answer(self, answer: Answer) -> Iterator[Step]:
        sequence, number = answer.sequence, answer.number
        start = time.perf_counter()
        token = self._forward(answer, sequence.prompt, 0)
        first = time.perf_counter()
        carried = self.engine.carried(number)
        shadow_wait_s = longest_s = 0.0
        last = first
        if self._shadow is not None:
            self._shadow.begin()
        while (finish := self._finish(answer, token)) is None:
            yield Step(token)
            count = len(sequence.tokens)
            if count == 1 and self._shadow is not None:
                waited = time.perf_counter()
                self._shadow.wait(self.launch_s, answer.cancelled)
                last = time.perf_counter()
                shadow_wait_s = last - waited
            self.engine.pace.decoded()
            self.engine.post(t.TokenDecoded(number, count - 1))
            token = self._forward(answer, [token], len(sequence.prompt) + count - 1)
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now
        end = time.perf_counter()
        self.engine.wait_for_predictions(number, DRAIN_S)
        times = Times(first - start, end - first - shadow_wait_s, shadow_wait_s, longest_s, carried)
        yield Step(token, build_report(self, answer, times, finish))

    def _finish(self, answer: Answer, token: int) -> str | None:
        """Take a token into the answer; why it ends there, None where it goes on."""
        tokens = answer.sequence.tokens
        tokens.append(token)
        if token in answer.chooser.ends:
            return "stop"
        if answer.stopped is not None and answer.stopped(token):
            return "stop_text"
        if len(answer.sequence.prompt) + len(tokens) >= self.shape.context:
            return "context"
        return "length" if len(tokens) >= answer.sequence.max_new_tokens else None

    def _forward(self, answer: Answer, tokens: list[int], position: int) -> int:
        """One pass; the next token."""
        number, sequence = answer.number, answer.sequence
        with self._turns, torch.inference_mode(), sequence.passing(), self._passing(sequence):
            self._pass = t.Visit(number, position, 0)
            self.engine.pace.begin_pass(len(tokens), first=position == 0)
            self.engine.record.begin_pass(number, position)
            self.engine.post(t.PassStarted(number, position, len(tokens), prefill=position == 0))
            out = self.model(
                input_ids=torch.tensor([tokens]), past_key_values=sequence.cache, use_cache=True, logits_to_keep=1
            )
            held = sum(other.cache_bytes() for other in list(self._open.values()))
            self._cache_bytes_max = max(self._cache_bytes_max, held)
            logits = out.logits[0, -1].float()
            if self.on_logits is not None:
                self.on_logits(logits)
            token = answer.chooser.choose(logits)
            self.engine.record.end_pass()
        return token

    @property
    def device_bytes(self) -> int:
        """Weights, those of a predictor too, buffers and the most that the KV caches of open requests took, from the
        tensors."""
        watch = self.engine.watch
        return self.weight_bytes + self._cache_bytes_max + (watch.nbytes if watch is not None else 0)

    @property
    def weight_bytes(self) -> int:
        """Weights and buffers, tied ones once."""
        tensors: dict[int, torch.Tensor] = {}
        for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
            tensors[tensor.untyped_storage().data_ptr()] = tensor
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())

    def close(self) -> None:
        self.engine.close()


def model_shape(store: ExpertStore) -> t.ModelShape:
    """What the scheduler must know of a store's model."""
    manifest = store.manifest
    config = family.config_from_dict(manifest.config)
    by_layer = tuple(len(manifest.layers[layer].blobs) for layer in manifest.moe_layers)
    return family.shape_of(config, manifest.moe_layers, manifest.experts, by_layer)


def limited(shape: t.ModelShape, context: int | None) -> t.ModelShape:
    """The shape with a smaller context. Raises ConfigError for one beyond the model's own."""
    if context is None:
        return shape
    if not 2 <= context <= shape.context:
        raise ConfigError(f"ctx-size is {context}; allowed: 2 to {shape.context}, the model's own limit")
    return replace(shape, context=context)


def check_prompt(prompt: list[int], context: int, vocabulary: int) -> None:
    """Raises PromptError for a prompt that is empty, leaves no room for an answer or has a token that is none."""
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        raise PromptError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten it")
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise PromptError(f"the prompt has token {wrong[0]}; allowed: 0 to {vocabulary - 1}; is it another model's?")
