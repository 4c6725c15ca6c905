"""A policy of a file outside of this project, so that what it does wrong ends requests by name, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Predictor
from scheduler.types import ExpertId, ModelShape


def methods_of(protocol: type) -> dict[str, inspect.Signature]:
    """The methods that a policy of this Protocol must have."""
    return {
        name: inspect.signature(one)
        for name, one in vars(protocol).items()
        if inspect.isfunction(one) and not name.startswith("_")
    }


class Guarded:
    """Stands for a policy, and answers for it from its first failure on: an error, or an answer that the core cannot
    carry out. The core then fails every request with `failure`, in words, and its books stay whole."""

    def __init__(self, policy: Any, what: str, protocol: type, shape: ModelShape) -> None:
        """`what`: the policy's name in messages."""
        self.failure: str | None = None
        self._policy, self._what = policy, what
        self._answers = _Answers(shape, tuple(getattr(policy, "forms", ())))
        for name in methods_of(protocol):
            told = name.startswith("on_") and protocol is not Predictor  # it answers nothing
            setattr(self, name, self._watched(name, getattr(policy, name), told))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._policy, name)

    def _watched(self, name: str, method: Callable[..., Any], told: bool) -> Callable[..., Any]:
        nothing = None if told else self._answers
        allowed: Callable[..., bool] = getattr(nothing, f"allows_{name}", lambda answer, *_: True)
        instead: Callable[..., Any] = getattr(nothing, name, lambda *_: None)

        def call(*args: Any) -> Any:
            if self.failure is None:
                try:
                    answer = method(*args)
                    answer = list(answer) if name in _SEVERAL and not told else answer
                    if allowed(answer, *args):
                        return answer
                    self.failure = f"{self._what}: {name} answered {answer!r:.200}, which its Protocol does not allow"
                except ConfigError:
                    raise  # of `check`
                except Exception as error:  # noqa: BLE001 - the code is not ours
                    self.failure = f"{self._what}: {name} failed with {type(error).__name__}: {error}"
            return instead(*args)

        return call


_SEVERAL = ("on_pass_begun", "on_gate_fired", "on_foreseen", "warm", "host")
"""Methods whose answers are read more than once, though a policy may give a generator."""


class _Answers:
    """`NAME`: what is answered in place of a policy that has failed. `allows_NAME`: whether its answer can be carried
    out."""

    def __init__(self, shape: ModelShape, forms: tuple[str, ...]) -> None:
        self._experts = {layer: range(shape.count(ordinal)) for ordinal, layer in enumerate(shape.layers)}
        self._forms = forms

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId:
        return next(iter(evictable))

    def allows_victim(self, answer: Any, worker: int, incoming: ExpertId, evictable: Any) -> bool:
        return answer is None or answer in evictable

    def warm(self, slots: int) -> tuple[ExpertId, ...]:
        return ()

    def allows_warm(self, answer: Any, slots: int) -> bool:
        return all(isinstance(one, ExpertId) and one.expert in self._experts.get(one.layer, ()) for one in answer)

    def route(self, chosen: Any, scores: Any, resident: Any) -> Any:
        return chosen

    def allows_route(self, answer: Any, chosen: Any, scores: Any, resident: Any) -> bool:
        every = range(max(map(len, self._experts.values())))
        return len(answer) == len(chosen) and all(
            1 <= len(row) <= len(before) and len(set(row)) == len(row) and all(one in every for one in row)
            for row, before in zip(answer, chosen, strict=True)
        )

    def host(self, missing: Any, resident: Any, costs: Any, prefill: bool) -> tuple[int, ...]:
        return ()

    def allows_host(self, answer: Any, missing: Any, resident: Any, costs: Any, prefill: bool) -> bool:
        return all(one in missing or one in resident for one in answer)

    def form(self, importance: Any) -> str:
        return self._forms[0]

    def allows_form(self, answer: Any, importance: Any) -> bool:
        return answer in self._forms

    def serves(self, held: str, importance: Any) -> bool:
        return True

    def on_pass_begun(self, *args: Any) -> tuple[Forecast, ...]:
        return ()

    on_gate_fired = on_foreseen = on_pass_begun

    def allows_on_pass_begun(self, answer: Any, *args: Any) -> bool:
        return all(isinstance(one, Forecast) and self._can_be(one) for one in answer)

    allows_on_gate_fired = allows_on_foreseen = allows_on_pass_begun

    def _can_be(self, forecast: Forecast) -> bool:
        experts = self._experts.get(forecast.visit.layer, range(0))
        named: Iterable[int] = (*forecast.experts, *(forecast.bring or ()))
        return all(one in experts for one in named)
