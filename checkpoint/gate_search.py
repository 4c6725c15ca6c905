"""Which module of an MoE block is its gate, and by which rule its scores become routing weights.

Found by trial, so that no family is listed here: a copy of the block computes random rows, and the module that returns
the experts to which those rows are sent is the gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from checkpoint import family
from checkpoint.devices.inference import inference
from checkpoint.native.encoded_linear import EncodedLinear
from scheduler.errors import UnsupportedFamilyError

SCORE_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrt(softplus)": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
"""Functions from a gate's logits to its scores."""

_ROWS = 16
_SPREAD = 2.0
"""Standard deviation of the trial's logits. With less, rules could not be told apart."""
_TOLERANCE = 1e-4
_ADVICE = (
    "take a system whose predictor, router and residency need no gate scores (predictor sep or none, router top-k)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores become routing weights: times `scale`, after normalisation over the chosen experts or without it."""

    score_function: str
    """A key of `SCORE_FUNCTIONS`."""
    normalised: bool
    scale: float
    plain: bool
    """The chosen experts are certainly those of the highest scores (no groups, no correction)."""


@dataclass(frozen=True, slots=True)
class GateSpec:
    """How to call a block's gate, and how to read its output. A tensor of the block stands here as its name."""

    path: str
    """Of the module in its MoE block."""
    extra: tuple[Any, ...]
    """Its arguments after the rows."""
    keywords: dict[str, Any]
    logits_place: int
    """Index of the logits in its output."""
    index_place: int
    """Index of the chosen experts in its output."""
    rule: Rule

    def bound_to(self, block: torch.nn.Module) -> GateSpec:
        """With the tensors of `block` in place of their names."""
        own = dict(named_tensors(block))
        extra = tuple(own[v] if isinstance(v, str) else v for v in self.extra)
        keywords = {key: own[v] if isinstance(v, str) else v for key, v in self.keywords.items()}
        return replace(self, extra=extra, keywords=keywords)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def find_gate(model: Any, block: torch.nn.Module, experts: torch.nn.Module, name: str) -> GateSpec:
    """The gate of `block`, in which `experts` is the experts module. `name`: of `experts` in `model`.

    Raises UnsupportedFamilyError.
    """
    count = family.expert_count(experts)
    where = f"{model.config.model_type}: {name.rpartition('.')[0]} ({type(block).__name__})"
    trial = _Trial(block, experts)
    rows = _random_rows(model, block)
    try:
        with inference():
            trial.run(rows)
            call = _routing_call(trial, count)
            if call is None:
                raise UnsupportedFamilyError(f"{where} has no module that returns the experts it chose; {_ADVICE}")
            trial.run(rows * _SPREAD / max(float(trial.logits(call).float().std()), 1e-6))
    except (TypeError, RuntimeError, AttributeError, KeyError, ValueError) as error:
        raise UnsupportedFamilyError(f"{where} cannot be computed by itself ({error!r}); {_ADVICE}") from error
    gate = trial.block.get_submodule(call.path)
    index, weights = trial.experts.index, trial.experts.weights
    logits = trial.logits(call).reshape(_ROWS, count).float()
    rule = _rule(logits, index.reshape(_ROWS, -1).long(), weights.reshape(_ROWS, -1).float())
    if rule is None:
        raise UnsupportedFamilyError(
            f"{where}: the weights of its gate ({type(gate).__name__}) are not proportional to "
            f"{', '.join(SCORE_FUNCTIONS)} of its logits, nor those normalised; {_ADVICE}"
        )
    if len([*named_tensors(gate)]) > 1 or call.extra or call.keywords:
        rule = replace(rule, plain=False)  # there is a correction, which may be zero in this layer
    names = {id(value): key for key, value in named_tensors(trial.block)}
    if any(isinstance(v, torch.Tensor) and id(v) not in names for v in (*call.extra, *call.keywords.values())):
        raise UnsupportedFamilyError(f"{where}: its gate reads more than a row and its own weights; {_ADVICE}")
    extra = tuple(names.get(id(v), v) for v in call.extra)
    keywords = {key: names.get(id(v), v) for key, v in call.keywords.items()}
    return GateSpec(call.path, extra, keywords, call.logits_place, call.index_place, rule)


class _RecordedExperts(torch.nn.Module):
    """Stands in for the experts in a copy of a block, and keeps their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.weights = torch.empty(0)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *_: Any) -> torch.Tensor:
        self.index, self.weights = index, weights
        return torch.zeros_like(hidden)


class _RoutingCall(NamedTuple):
    path: str
    extra: tuple[Any, ...]
    keywords: dict[str, Any]
    logits_place: int
    index_place: int


class _Trial:
    """A copy of an MoE block in float32, without its experts. Keeps all calls of its modules in its last run."""

    def __init__(self, block: torch.nn.Module, experts: torch.nn.Module) -> None:
        self.experts = _RecordedExperts()
        memo: dict[int, Any] = {id(experts): self.experts}
        memo |= {id(layer): layer.restored() for layer in block.modules() if isinstance(layer, EncodedLinear)}
        self.block = copy.deepcopy(block, memo).float().eval()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []  # path, arguments, keywords, output
        for path, module in self.block.named_modules():
            if path and module is not self.experts:
                module.register_forward_hook(self._recorder(path), with_kwargs=True)

    def _recorder(self, path: str) -> Callable[..., None]:
        def record(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls.append((path, args, kwargs, output))

        return record

    def run(self, rows: torch.Tensor) -> None:
        """`rows`: [n, H]."""
        self.calls.clear()
        self.block(rows[None])

    def logits(self, call: _RoutingCall) -> torch.Tensor:
        """Of the last run."""
        logits: torch.Tensor = next(output for path, _, _, output in self.calls if path == call.path)[call.logits_place]
        return logits


def _random_rows(model: Any, block: torch.nn.Module) -> torch.Tensor:
    device = next((value.device for _, value in named_tensors(block)), torch.device("cpu"))
    width = model.config.get_text_config().hidden_size
    return torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(device)


def _routing_call(trial: _Trial, count: int) -> _RoutingCall | None:
    """The call whose output has the experts' own index, and logits of `count` experts."""
    index = trial.experts.index
    for path, args, kwargs, output in trial.calls:
        if not isinstance(output, tuple | list) or not args:
            continue
        whole = [n for n, v in enumerate(output) if _is_row_of(v, index.shape[-1]) and not v.is_floating_point()]
        chosen = [n for n in whole if torch.equal(output[n].reshape(index.shape), index)]
        logits = [n for n, v in enumerate(output) if _is_row_of(v, count) and v.is_floating_point()]
        if chosen and logits:
            return _RoutingCall(path, args[1:], kwargs, logits[0], chosen[0])
    return None


def _is_row_of(value: Any, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[-1] == width


def _rule(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Rule | None:
    """The first rule that explains all rows. None: no rule does, or the rows are too similar to tell."""
    if float(logits.std()) < _TOLERANCE:
        return None
    for name, function in SCORE_FUNCTIONS.items():
        scores = function(logits)
        ratio = weights / scores.gather(1, index)
        top = scores.topk(index.shape[1]).indices
        plain = bool((top.sort(1).values == index.sort(1).values).all())
        if _equal(ratio.flatten()):
            return Rule(name, False, _rounded_mean(ratio), plain)
        sums = weights.sum(1)
        if all(map(_equal, ratio)) and _equal(sums):
            return Rule(name, True, _rounded_mean(sums), plain)
    return None


def _equal(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all()) and bool((values - values[0]).abs().max() <= _TOLERANCE * values[0].abs())


def _rounded_mean(values: torch.Tensor) -> float:
    """Without the last digits, which are float32's rounding: a scaling factor has few."""
    return float(f"{float(values.double().mean()):.5g}")
