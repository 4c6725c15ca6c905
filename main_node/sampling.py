"""Chooses the next token with Transformers' own logits processors, set up as its `generate` sets them up."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from checkpoint.devices.transfer import to_device, to_host
from main_node.checks.outputs import is_finite
from scheduler.errors import ConfigError, NonFiniteError, RequestFailedError

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "stop_strings": (None,),
}
"""Generation settings that are not supported, since they need several passes a token or the tokenizer. With them, the
values that change nothing."""

NEUTRAL = {name: values[-1] for name, values in UNSUPPORTED.items()}
"""Keyword arguments with which `generate` uses none of them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Arguments of Transformers' `generate`, and those of OpenAI's API that it lacks. None: as in the model's generation
    settings.

    A temperature above 0, top-k or top-p draw even without `draw`. Temperature 0 never does. Penalties and biases
    change the logits before temperature, top-k and top-p do; a token that is not drawn is the one whose logit is then
    the highest.
    """

    draw: bool = False
    """Draw with the model's own settings."""
    temperature: float | None = None
    top_k: int | None = None
    """0: among all tokens. Transformers' own default is 50."""
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """None: a random one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer has so far. The prompt's do not count."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the answer has it so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn. Else the most probable one is taken."""
        given = bool(self.temperature) or self.top_k is not None or self.top_p is not None
        return self.temperature != 0 and (self.draw or given)

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments for `generate`."""
        names = ("temperature", "top_k", "top_p") if self.drawn else ()
        given = {name: getattr(self, name) for name in (*names, "repetition_penalty")}
        return {"do_sample": self.drawn} | {name: value for name, value in given.items() if value is not None}


GREEDY = Sampling()


class How(TypedDict, total=False):
    """Keyword arguments of `MainNode.generate` beside prompt and length. It documents them."""

    ignore_eos: bool
    sampling: Sampling
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    schema: str | None


class Chooser:
    """Chooses one answer's tokens: those of `model.generate(...)` with the same logits and seed."""

    def __init__(self, model: Any, sampling: Sampling, prompt: list[int], room: int, ignore_eos: bool = False) -> None:
        """`room`: most new tokens. Raises ConfigError for settings that Transformers refuses."""
        self._device: torch.device = model.device
        self.ignored = ignored(model)
        """Generation settings of the model that are not supported."""
        ends: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {}
        try:
            config, _ = model._prepare_generation_config(
                None, **sampling.overrides(), **ends, **NEUTRAL, max_new_tokens=room
            )
            model._prepare_special_tokens(config, True, device=self._device)
            config = model._prepare_generated_length(config, True, True, "input_ids", len(prompt), None)
            self._processors = model._get_logits_processor(
                config, input_ids_seq_length=len(prompt), device=self._device, model_kwargs={}
            )
        except ValueError as error:
            raise ConfigError(f"Transformers refuses these generation settings: {error}") from error
        eos = config._eos_token_tensor
        self.ends: frozenset[int] = frozenset(to_host(eos)[0].tolist() if eos is not None else ())
        """End-of-sequence tokens."""
        self._drawn = sampling.drawn
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
        are not finite."""
        token = self._chosen(logits) if logits.is_cpu else self._chosen_there(logits)
        self._count += 1
        return token

    def _chosen(self, logits: torch.Tensor) -> int:
        self._check_logits(is_finite(logits))
        scores = self._scores(logits)
        if self._drawn:
            weights = torch.nn.functional.softmax(scores, dim=-1)
            self._check_weights(bool(weights.isfinite().all()))
            token = int(torch.multinomial(weights, num_samples=1, generator=self._generator))
        else:
            token = int(scores.argmax())
        self._tokens[0, self._count] = token
        return token

    def _chosen_there(self, logits: torch.Tensor) -> int:
        """On an accelerator. The host waits once, for the token and for what was found of logits and probabilities."""
        finite, scores = logits.isfinite().all(), self._scores(logits)
        drawable = finite
        if self._drawn:
            weights = torch.nn.functional.softmax(scores, dim=-1)
            drawable = weights.isfinite().all()
            weights = torch.where(drawable, weights, 1.0)  # to draw from others ends the process's use of the device
            chosen = torch.multinomial(weights, num_samples=1, generator=self._generator)[0]
        else:
            chosen = scores.argmax(-1)
        self._tokens[:, self._count] = chosen
        token, are_finite, are_drawable = to_host(torch.cat([chosen, finite[None], drawable[None]]))[0].tolist()
        self._check_logits(bool(are_finite))
        self._check_weights(bool(are_drawable))
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
                f"the logits of token {self._count - self._prompt + 1} are not finite numbers, so no token can be "
                "chosen; check that the model's weights are intact (odmoe shard --verify), and try another --dtype"
            )

    def _check_weights(self, finite: bool) -> None:
        if not finite:
            raise RequestFailedError(
                "the next token's probabilities are not finite numbers; raise the temperature or the repetition "
                "penalty, or check that the model's weights are intact"
            )


def ignored(model: Any) -> list[str]:
    """`name=value` of the model's generation settings that would change its tokens and are not supported."""
    settings = model.generation_config
    found = {name: getattr(settings, name, None) for name in UNSUPPORTED}
    return [f"{name}={value}" for name, value in found.items() if value not in UNSUPPORTED[name]]
