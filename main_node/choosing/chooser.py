"""Chooses the next token with Transformers' own logits processors, set up as its `generate` sets them up."""

from __future__ import annotations

import copy
import math
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from checkpoint.devices.transfer import to_device, to_host
from checkpoint.formats.unreadable import is_out_of_memory
from main_node.checks.outputs import is_finite
from main_node.choosing.guide import Guide
from main_node.choosing.processors import processors_of
from main_node.logprobs import Logprobs, TokenLogprobs, logprobs_of
from main_node.sampling import GREEDY, NEUTRAL, Sampling, ignored_settings
from scheduler.errors import ConfigError, NonFiniteError, RequestFailedError

_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""How Transformers takes settings that it does not check."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens that end an answer."""

    ignore_eos: bool = False
    """The model's end-of-sequence tokens do not."""
    own: int | None = None
    """One more end-of-sequence token, the tokenizer's."""
    stop_token_ids: tuple[int, ...] = ()
    """These do in any case."""


class Chooser:
    """Chooses one answer's tokens: those of `model.generate(...)` with the same logits and seed, and with our
    processors as its `logits_processor`."""

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        prompt: list[int],
        room: int,
        logprobs: int | None = None,
        follow: Callable[[frozenset[int], int], Guide] | None = None,
        ends: Ends = Ends(),
    ) -> None:
        """`room`: most new tokens. `logprobs`: how many of the most probable tokens to tell at each place. `follow`:
        (end-of-sequence tokens, tokens of the vocabulary) -> a guide. Raises ConfigError for settings that
        Transformers refuses, and for what the model does not have."""
        self._device: torch.device = model.device
        self.ignored = ignored_settings(model)
        """Generation settings of the model that are not supported."""
        vocabulary = model.get_input_embeddings().num_embeddings
        for token in ends.stop_token_ids:
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"stop_token_ids has {token}; allowed: 0 to {vocabulary - 1}, the model has {vocabulary} tokens"
                )

        def make_config(model: Any) -> Any:
            eos = {"eos_token_id": None} if ends.ignore_eos else _with_end(model, ends.own, vocabulary)
            config, _ = model._prepare_generation_config(
                None, **sampling.overrides(), **eos, **NEUTRAL, max_new_tokens=room
            )
            model._prepare_special_tokens(config, True, device=self._device)
            return model._prepare_generated_length(config, True, True, "input_ids", len(prompt), None)

        config = _of_transformers(model, make_config)
        eos = config._eos_token_tensor
        self.ends: frozenset[int] = frozenset(to_host(eos)[0].tolist() if eos is not None else ())
        """End-of-sequence tokens."""
        self.last_tokens = self.ends | frozenset(ends.stop_token_ids)
        """The answer ends with any of these, which is no part of its text."""
        self._guide = follow(self.ends, vocabulary) if follow is not None else None
        own = processors_of(sampling, len(prompt), self._guide, vocabulary, self._device)

        def processors(other: Any) -> Any:
            used = config if other is model else make_config(other)
            return other._get_logits_processor(
                used, len(prompt), logits_processor=own, device=self._device, model_kwargs={}
            )

        self._processors = _of_transformers(model, processors)
        self._top = logprobs
        self.logprobs: deque[TokenLogprobs] = deque()
        """Of the tokens chosen, in their order, where they are to be told."""
        self.complete_at: int | None = None
        """The number of tokens with which the text was complete, as the guide says."""
        self._drawn = sampling.is_random
        self.seed: int | None = None
        """Seed of the draws. None where tokens are not drawn."""
        if self._drawn:
            self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            self._generator = torch.Generator(self._device).manual_seed(self.seed)
        tokens = torch.zeros(1, len(prompt) + room, dtype=torch.long)
        tokens[0, : len(prompt)] = torch.tensor(prompt)
        (self._tokens,) = to_device(self._device, tokens)
        self._count = self._prompt = len(prompt)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from logits [V], float32. Raises NonFiniteError, and RequestFailedError for probabilities that
        are not finite and where the guide leaves no token."""
        token = self._choose_on_host(logits) if logits.is_cpu else self._choose_on_device(logits)
        self._count += 1
        if self._guide is not None and token not in self.ends:
            self._guide.take(token)
            if self._guide.complete:
                self.complete_at = self._count - self._prompt
        return token

    @property
    def count(self) -> int:
        """Tokens chosen."""
        return self._count - self._prompt

    def _choose_on_host(self, logits: torch.Tensor) -> int:
        self._check_logits(is_finite(logits))
        scores = self._scores(logits)
        if self._drawn:
            weights = torch.nn.functional.softmax(scores, dim=-1)
            self._check_scores(bool(weights.isfinite().all()))
            token = int(torch.multinomial(weights, num_samples=1, generator=self._generator))
        else:
            token = int(scores.argmax())
            self._check_scores(self._guide is None or float(scores[0, token]) > -math.inf)
        self._tokens[0, self._count] = token
        if self._top is not None:
            self.logprobs += logprobs_of(logits[None], torch.tensor([token]), self._top).of_tokens([token])
        return token

    def _choose_on_device(self, logits: torch.Tensor) -> int:
        """On an accelerator. The host waits once, for the token and for what was found of logits, probabilities and
        log-probabilities."""
        finite, scores = logits.isfinite().all(), self._scores(logits)
        usable = finite
        if self._drawn:
            weights = torch.nn.functional.softmax(scores, dim=-1)
            usable = weights.isfinite().all()
            weights = torch.where(usable, weights, 1.0)  # to draw from others ends the process's use of the device
            chosen = torch.multinomial(weights, num_samples=1, generator=self._generator)[0]
        else:
            chosen = scores.argmax(-1)
            if self._guide is not None:
                usable = scores.amax() > -math.inf
        self._tokens[:, self._count] = chosen
        found = torch.cat([chosen, finite[None], usable[None]])
        there = logprobs_of(logits[None], chosen, self._top) if self._top is not None else None
        found, *rest = to_host(found, *(there or ()))
        token, are_finite, are_usable = found.tolist()
        self._check_logits(bool(are_finite))
        self._check_scores(bool(are_usable))
        if there is not None:
            self.logprobs += Logprobs(*rest).of_tokens([token])
        return int(token)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[1, V], after the processors."""
        if not self._processors:
            return logits[None]
        scores: torch.Tensor = self._processors(self._tokens[:, : self._count], logits[None].clone())
        return scores

    def _check_logits(self, finite: bool) -> None:
        if not finite:
            raise NonFiniteError(
                f"the logits of token {self.count + 1} are not finite numbers, so no token can be "
                "chosen; check that the model's weights are intact (odmoe shard --verify), and try another --dtype"
            )

    def _check_scores(self, usable: bool) -> None:
        if usable:
            return
        if self._guide is not None:
            raise RequestFailedError(
                f"no token is left for place {self.count + 1} of the answer: settings of the sampling, or the model's "
                "own (suppressed tokens, repeated n-grams), rule out those that the schema allows; change the schema"
            )
        raise RequestFailedError(
            "the next token's probabilities are not finite numbers; raise the temperature or the repetition "
            "penalty, or check that the model's weights are intact"
        )


def _with_end(model: Any, own_end: int | None, vocabulary: int) -> dict[str, Any]:
    """The model's end-of-sequence tokens and one more, as an argument of `generate`."""
    given = model.generation_config.eos_token_id
    known = [] if given is None else [given] if isinstance(given, int) else list(given)
    if own_end is None or own_end in known or not own_end < vocabulary:
        return {}
    return {"eos_token_id": [*known, own_end]}


def check_settings(model: Any) -> None:
    """Raises ConfigError where the model's own generation settings cannot be used, with the one that is wrong."""
    logits = torch.zeros(model.get_input_embeddings().num_embeddings, device=model.device)
    _of_transformers(model, lambda model: Chooser(model, GREEDY, [0], 2).choose(logits))


def _of_transformers(model: Any, made: Callable[[Any], Any]) -> Any:
    """What `made` returns of the model. Raises ConfigError where Transformers refuses or cannot use its settings."""
    try:
        return made(model)
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        wrong = _wrong_setting(model, made)
        cause = f"; generation_config.json: {wrong}; correct that file" if wrong else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Transformers refuses these generation settings: {reason}{cause}") from error


def _wrong_setting(model: Any, made: Callable[[Any], Any]) -> str:
    """The setting of the model without which `made` succeeds. Empty: none."""
    defaults = GenerationConfig()
    for name, value in model.generation_config.to_diff_dict().items():
        other = copy.copy(model)
        other.generation_config = copy.copy(model.generation_config)
        setattr(other.generation_config, name, getattr(defaults, name, None))
        try:
            made(other)
        except (*_REFUSALS, ConfigError):
            continue
        return f"{name} is {value!r:.80}"
    return ""
