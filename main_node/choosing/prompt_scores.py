"""Log-probabilities of a prompt's tokens, a part of the prompt at a time.

A pass computes logits of its last token only. Where those of all are wanted, the model's hidden states before its
output layer are kept until the pass has ended, and the model's own `forward` makes logits of some of them at a time:
so the logits of a long prompt are never there at once, and what a family does to its logits is done to these.

The pass itself stays as it is without: the answer's logits and tokens are the same, bit for bit. Logits of a prompt's
tokens are products of several rows, and may differ in the last bits from those that a pass computes of its last token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from checkpoint.devices.transfer import token_ids
from checkpoint.linear_batch import at_once
from main_node.logprobs import Logprobs, TokenLogprobs, logprobs_of
from scheduler.errors import NonFiniteError

LOGITS_BYTES = 64 << 20
"""Of logits that are there at once, in float32. Their log-probabilities, and the logits as the model computes them,
take as much again."""


class PromptScores:
    """Of one prompt. Its tokens get their log-probabilities in the order in which they are read."""

    def __init__(self, prompt: list[int], top: int) -> None:
        """`top`: how many of the most probable tokens to tell at each place."""
        self.states: torch.Tensor | None = None
        """Of the pass that has just run: [1, T, H]."""
        self.found: list[TokenLogprobs | None] = [None]
        """Of the tokens so far. The first follows nothing."""
        self._prompt, self._top = prompt, top

    @property
    def unscored_tokens(self) -> list[int]:
        """Tokens whose log-probabilities are not there."""
        return self._prompt[len(self.found) :]

    def read(self, output: OutputLayer, check: Callable[[], None]) -> None:
        """Of the tokens after those of a pass that has just run. `check`: called now and then; raises where the request
        has been given up. Raises NonFiniteError."""
        states, self.states = self.states, None
        if states is None:
            raise RuntimeError("the pass has kept no hidden states")
        tokens = self.unscored_tokens[: states.shape[1]]
        there = token_ids(tokens, states.device)[0]
        parts: list[Logprobs] = []
        for at in range(0, len(tokens), output.rows):
            check()
            some = there[at : at + output.rows]
            parts.append(logprobs_of(output.logits(states[:, at : at + len(some)]), some, self._top))
        if not parts:
            return
        whole = Logprobs(*(torch.cat(one) for one in zip(*parts, strict=True)))
        for one in whole.of_tokens(tokens):
            if math.isnan(one.logprob):
                raise NonFiniteError(
                    f"the logits of the prompt's token {len(self.found) + 1} are not finite numbers; check that the "
                    "model's weights are intact (odmoe shard --verify), and try another --dtype"
                )
            self.found.append(one)


class _Given(torch.nn.Module):
    """Takes the place of a model's layers: its output is given."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class OutputLayer:
    """A model from the last hidden states on: its own `forward`, on the same weights."""

    def __init__(self, model: Any, reading: Callable[[], PromptScores | None]) -> None:
        """`reading`: of the prompt whose pass is under way on this thread, if its log-probabilities are wanted."""
        layers = model.base_model
        self._reading = reading
        self._kind: Any = None
        self._given = _Given()
        self._head = copy.copy(model)
        self._head._modules = {
            name: self._given if module is layers else module for name, module in model._modules.items()
        }
        self._device = model.device
        vocabulary = model.get_input_embeddings().num_embeddings
        self.rows = max(1, LOGITS_BYTES // (vocabulary * torch.float32.itemsize))
        """Of hidden states, whose logits are there at once."""
        layers.register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        scores = self._reading()
        if scores is not None:
            self._kind, scores.states = type(output), output.last_hidden_state

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Of hidden states [1, T, H]: [T, V], float32."""
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=self._device)
        self._given.output = self._kind(last_hidden_state=states)
        try:
            with at_once():
                out = self._head(input_ids=ids, use_cache=False)
        finally:
            self._given.output = None
        return out.logits[0].float()  # type: ignore[no-any-return]
