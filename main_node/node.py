"""The main node: Transformers' own model without its experts, the KV caches and the token loop."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from checkpoint import family
from checkpoint.dense import dispatch_experts, load_dense
from checkpoint.store import ExpertStore
from main_node.engine import Engine
from main_node.report import Report, Times, build_report
from main_node.sequence import Sequence
from scheduler import types as t
from scheduler.errors import ConfigError, LaunchError, PromptError

DRAIN_S = 10.0
"""After an answer, how long its last predictions are waited for, so that recall counts them."""


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
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            self._error = error

    def wait(self, deadline_s: float) -> None:
        """Until the shadow has joined. Raises LaunchError."""
        self.begin()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise LaunchError(f"the shadow was not ready within {deadline_s:g} s; try --shadow none")
        if self._error is not None:
            raise LaunchError(f"the shadow did not come up: {self._error}") from self._error


class MainNode:
    """Answers requests. Several may be open at once; their passes take turns."""

    def __init__(
        self,
        store: ExpertStore,
        engine: Engine,
        dtype: torch.dtype,
        shadow: ShadowStart | None,
        launch_s: float = 600.0,
    ) -> None:
        self.store = store
        self.engine = engine
        self.model = load_dense(store.dense, store.manifest.config, dtype)
        self.shape = model_shape(store)
        self.on_logits: Callable[[torch.Tensor], None] | None = None
        self.launch_s = launch_s
        self._shadow = shadow
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()
        self._pass = t.Visit(0, 0, 0)
        self._open: dict[int, Sequence] = {}
        self._cache_bytes_max = 0
        dispatch_experts(self.model, self._experts_of)

    def _experts_of(self, layer: int) -> Callable[..., torch.Tensor]:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.engine.experts(self._pass._replace(layer=layer), hidden, index, weights)

        return experts

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(self, prompt: list[int], max_new_tokens: int, ignore_eos: bool = False) -> Iterator[Step]:
        """Greedy decoding. Closing the iterator early gives the request up. Raises PromptError, ClusterError, ...

        The answer ends at an end-of-sequence token (unless `ignore_eos`, for measuring), after `max_new_tokens`, or
        where the context is full.
        """
        check_prompt(prompt, self.shape.context, self.model.get_input_embeddings().num_embeddings)
        if max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {max_new_tokens}; allowed: 1, 2, ...")
        from transformers import DynamicCache

        room = self.shape.context - len(prompt)
        sequence = Sequence(prompt, min(max_new_tokens, room), DynamicCache(config=self.model.config))
        number = next(self._numbers)
        self.engine.open_request(number, sequence, len(prompt))
        self._open[number] = sequence
        try:
            yield from self._answer(number, sequence, set() if ignore_eos else self._stop_tokens())
        finally:
            del self._open[number]
            self.engine.close_request(number)

    def _answer(self, number: int, sequence: Sequence, stop: set[int]) -> Iterator[Step]:
        start = time.perf_counter()
        token = self._forward(number, sequence, sequence.prompt, 0)
        first = time.perf_counter()
        shadow_wait_s = 0.0
        if self._shadow is not None:
            self._shadow.begin()
        while True:
            sequence.tokens.append(token)
            count = len(sequence.tokens)
            if token in stop or count >= sequence.max_new_tokens:
                break
            yield Step(token)
            if count == 1 and self._shadow is not None:
                waited = time.perf_counter()
                self._shadow.wait(self.launch_s)
                shadow_wait_s = time.perf_counter() - waited
            self.engine.post(t.TokenDecoded(number, count - 1))
            token = self._forward(number, sequence, [token], len(sequence.prompt) + count - 1)
        end = time.perf_counter()
        self.engine.wait_for_predictions(number, DRAIN_S)
        times = Times(first - start, end - first - shadow_wait_s, shadow_wait_s)
        full = len(sequence.prompt) + len(sequence.tokens) >= self.shape.context
        finish = "stop" if token in stop else "context" if full else "length"
        report = build_report(self, number, sequence, times, finish)
        yield Step(token, report)

    def _forward(self, number: int, sequence: Sequence, tokens: list[int], position: int) -> int:
        """One pass; the greedy next token."""
        with self._turn, torch.inference_mode():
            self._pass = t.Visit(number, position, 0)
            self.engine.post(t.PassStarted(number, position, len(tokens), prefill=position == 0))
            out = self.model(
                input_ids=torch.tensor([tokens]), past_key_values=sequence.cache, use_cache=True, logits_to_keep=1
            )
            held = sum(other.cache_bytes() for other in list(self._open.values()))
            self._cache_bytes_max = max(self._cache_bytes_max, held)
        logits = out.logits[0, -1].float()
        if self.on_logits is not None:
            self.on_logits(logits)
        return int(logits.argmax())

    @property
    def ignored(self) -> list[str]:
        """Generation settings of the model that would change greedy tokens, which we do not heed yet."""
        neutral: dict[str, tuple[object, ...]] = {
            "repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0), "min_length": (None, 0),
            "min_new_tokens": (None, 0), "bad_words_ids": (None,), "suppress_tokens": (None, []),
            "begin_suppress_tokens": (None, []), "sequence_bias": (None,), "forced_bos_token_id": (None,),
            "forced_eos_token_id": (None,), "exponential_decay_length_penalty": (None,), "num_beams": (None, 1),
            "guidance_scale": (None, 1.0), "watermarking_config": (None,),
        }  # fmt: skip
        settings = self.model.generation_config
        found = {name: getattr(settings, name, None) for name in neutral}
        return [f"{name}={value}" for name, value in found.items() if value not in neutral[name]]

    def _stop_tokens(self) -> set[int]:
        ids = self.model.generation_config.eos_token_id
        return set(ids) if isinstance(ids, list) else {ids}

    @property
    def device_bytes(self) -> int:
        """Weights, buffers and the most that the KV caches of open requests took, from the tensors."""
        return self.weight_bytes + self._cache_bytes_max

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
    config = family.config_from_dict(store.manifest.config)
    return family.shape_of(config, store.manifest.moe_layers, store.manifest.experts)


def check_prompt(prompt: list[int], context: int, vocabulary: int) -> None:
    """Raises PromptError for a prompt that is empty, leaves no room for an answer or has a token that is none."""
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        raise PromptError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten it")
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise PromptError(f"the prompt has token {wrong[0]}; allowed: 0 to {vocabulary - 1}; is it another model's?")
