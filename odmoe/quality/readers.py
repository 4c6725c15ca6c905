"""Two models that read the same tokens: Transformers' own, and this engine, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from main_node.sampling import NEUTRAL


class Reader(Protocol):
    """A model that is asked what follows, and what it would answer."""

    def logits(self, window: list[int], given: int = 1) -> torch.Tensor:
        """[T - given, V] on the CPU: row n says what follows token `given` - 1 + n. The first `given` tokens are read
        in one pass, as a prompt is."""

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """The greedy answer of at most `tokens` tokens, without the end of sequence."""


class Whole:
    """Transformers' own model, with all experts in memory."""

    def __init__(self, model: Any, ends: frozenset[int] = frozenset(), stepwise: bool = False) -> None:
        """`ends`: tokens that end an answer. `stepwise`: tokens after the given ones are read one by one, as `generate`
        does; a single pass rounds otherwise, in 16 bits visibly."""
        self.model, self._ends, self._stepwise = model, ends, stepwise

    def logits(self, window: list[int], given: int = 1) -> torch.Tensor:
        if self._stepwise:
            return torch.cat(list(self._steps(window, given)))
        return self._pass(window[:-1])[0][given - 1 :]

    def _steps(self, window: list[int], given: int) -> Iterator[torch.Tensor]:
        found, cache = self._pass(window[:given], use_cache=True)
        yield found[-1:]
        for token in window[given:-1]:
            found, cache = self._pass([token], use_cache=True, past_key_values=cache)
            yield found

    def _pass(self, tokens: list[int], **how: Any) -> tuple[torch.Tensor, Any]:
        """[T, V] on the CPU, and the KV cache."""
        ids = torch.tensor([tokens], device=self.model.device)
        with torch.inference_mode():
            found = self.model(ids, **({"use_cache": False} | how))
        return found.logits[0].cpu(), found.past_key_values if how else None

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **NEUTRAL,
            )
        return until_end(found[0, len(prompt) :].tolist(), self._ends)


class Engine:
    """An embedded cluster. Attention, predictions, loads, the router and the forms of experts are those of any answer,
    so what an approximate system changes is measured."""

    def __init__(self, cluster: Any, ends: frozenset[int] = frozenset()) -> None:
        self._cluster, self._ends = cluster, ends

    def logits(self, window: list[int], given: int = 1) -> torch.Tensor:
        return forced_logits(self._cluster, window, given)

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        steps = list(self._cluster.generate(prompt, tokens))
        return until_end(list(steps[-1].report.token_ids), self._ends)


class Forced:
    """A chooser that always chooses the text's next token, and keeps the logits [V] that it was shown."""

    def __init__(self, text: list[int]) -> None:
        self.ignored: list[str] = []
        self.seed = None
        self.ends: frozenset[int] = frozenset()
        self.last_tokens = self.ends
        self.complete_at: int | None = None
        self.logits: list[torch.Tensor] = []
        self._text = text

    def choose(self, logits: torch.Tensor) -> int:
        self.logits.append(logits.clone())
        return self._text[len(self.logits) - 1]


def forced_logits(cluster: Any, window: list[int], given: int = 1) -> torch.Tensor:
    """[T - given, V] float32 from an embedded cluster's own passes over the window: its first `given` tokens are the
    prompt, taken in one pass as any prompt is, and each other token is a decode pass of its own. Row n says what
    follows token `given` - 1 + n.

    A main node keeps the logits of a pass's last token only, so every other token is forced: whatever the logits say,
    the text's own token comes next.
    """
    answer = cluster.main.generate(window[:given], len(window) - given, ignore_eos=True)
    answer.request.chooser = forced = Forced(window[given:])
    for _ in answer:
        pass
    return torch.stack(forced.logits)


def until_end(tokens: list[int], ends: frozenset[int] | set[int]) -> list[int]:
    """An answer up to its first end of sequence."""
    return tokens[: next((n for n, token in enumerate(tokens) if token in ends), len(tokens))]
