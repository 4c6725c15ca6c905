"""A model's gates: their last scores, their scores for another input, and the weights of another choice.

A trial finds the routing module and the rule by which scores become weights: a copy of the MoE block gets random rows,
and the module that returns the experts to which those rows go is the gate. So no family is listed here.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkpoint import family
from scheduler.errors import UnsupportedFamilyError

_ROWS, _SPREAD, _CLOSE = 16, 2.0, 1e-4
_SQUASHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrt(softplus)": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
GateOutput = dict[int, Any]
"""Layer -> what its gate returned."""
_ADVICE = (
    "take a system whose predictor, router and residency need no gate scores (predictor sep or none, router top-k)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How logits become routing weights."""

    squash: str
    """The function from logits to scores."""
    normalised: bool
    """Whether the weights of a row are the scores divided by their sum over the chosen experts."""
    scale: float
    """A factor on the weights."""
    plain: bool
    """Whether the chosen experts are always those of the highest scores, without groups or correction."""


@dataclass(frozen=True, slots=True)
class _Gate:
    """The routing module of one MoE block."""

    path: str
    """Name of the module in its block."""
    extra: tuple[Any, ...]
    """Arguments after the rows, by position."""
    keywords: dict[str, Any]
    """Arguments after the rows, by name."""
    place: int
    """Position of the logits in the module's result."""
    index_place: int
    """Position of the chosen experts in the result."""
    rule: Rule


class _Asked(torch.nn.Module):
    """Replaces the experts in a copy of a block and keeps the arguments of their call."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.weights = torch.empty(0)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *_: Any) -> torch.Tensor:
        self.index, self.weights = index, weights
        return torch.zeros_like(hidden)


class Gates:
    """The gates of a model's MoE layers; T rows, H hidden elements, E experts, k of them chosen a row.

    Hooks keep each gate's last output; the model computes as before. The constructor raises
    UnsupportedFamilyError for a model whose routing weights are neither its scores, scaled or normalised (PhiMoE), or
    whose gate cannot be called on its own.
    """

    def __init__(self, model: Any) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._forwards: dict[int, Callable[..., Any]] = {}
        self._gates: dict[int, _Gate] = {}
        self._last: GateOutput = {}
        self._into = self._last
        known: dict[tuple[type, int], _Gate] = {}
        for layer, (name, experts) in family.experts_modules(model).items():
            block = model.get_submodule(name.rpartition(".")[0])
            kind = (type(block), family.expert_count(experts))
            if kind not in known:
                known[kind] = _find(model, block, experts, name)
            self._add(layer, block, known[kind])

    def _add(self, layer: int, block: torch.nn.Module, gate: _Gate) -> None:
        module = block.get_submodule(gate.path)
        self._modules[layer], self._forwards[layer] = module, module.forward
        own = {name: value for name, value in _tensors(block)}
        extra = tuple(own[v] if isinstance(v, str) else v for v in gate.extra)
        keywords = {key: own[v] if isinstance(v, str) else v for key, v in gate.keywords.items()}
        self._gates[layer] = _Gate(gate.path, extra, keywords, gate.place, gate.index_place, gate.rule)

        def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._into[layer] = output

        module.register_forward_hook(keep)

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers, ascending."""
        return tuple(self._gates)

    def module(self, layer: int) -> torch.nn.Module:
        """The routing module."""
        return self._modules[layer]

    def rule(self, layer: int) -> Rule:
        """How this layer's scores become weights."""
        return self._gates[layer].rule

    def scores(self, layer: int) -> torch.Tensor:
        """Scores [T, E], float32, of the last call; a row's routing weights are proportional to them."""
        return self._scores(layer, self._last[layer])

    def ranked(self, layer: int, heard: GateOutput | None = None) -> torch.Tensor:
        """As `scores`, of the last call or of `heard` from `aside`, but the k highest of a row are the gate's choice.
        If the gate chooses by more than its scores (DeepSeek's groups and correction), the highest score is added to
        those of the chosen experts."""
        return self._ranked(layer, (self._last if heard is None else heard)[layer])

    def forget(self, layer: int) -> None:
        """Free the last output of this gate; for a long prompt it is megabytes a layer."""
        self._last.pop(layer, None)

    def at(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [T, E] of any gate inputs [T, H]. `scores` is unaffected."""
        return self._scores(layer, self._ask(layer, hidden))

    def expected(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """As `at`, ordered as by `ranked`."""
        return self._ranked(layer, self._ask(layer, hidden))

    def _ask(self, layer: int, hidden: torch.Tensor) -> Any:
        gate = self._gates[layer]
        return self._forwards[layer](hidden, *gate.extra, **gate.keywords)

    def _scores(self, layer: int, output: Any) -> torch.Tensor:
        gate = self._gates[layer]
        logits = output[gate.place]
        return _SQUASHES[gate.rule.squash](logits.reshape(-1, logits.shape[-1]).float())

    def _ranked(self, layer: int, output: Any) -> torch.Tensor:
        scores, gate = self._scores(layer, output), self._gates[layer]
        if gate.rule.plain:
            return scores
        index = output[gate.index_place].reshape(len(scores), -1).long()
        top = scores.topk(index.shape[1]).indices
        other = (top.sort(1).values != index.sort(1).values).any(1, keepdim=True)
        return scores.scatter_add(1, index, (scores.amax(1, keepdim=True) * other).expand_as(index))

    @contextlib.contextmanager
    def aside(self) -> Iterator[GateOutput]:
        """Collect the gates' outputs here, in place of `scores`, while the context lasts."""
        before, self._into = self._into, {}
        try:
            yield self._into
        finally:
            self._into = before

    def reweigh(
        self, layer: int, index: torch.Tensor, weights: torch.Tensor, chosen: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(index, weights), each [T, most chosen], for the experts `chosen` in each row in place of the gate's.

        `index` and `weights` [T, k] are from the gate's last call. A row with the gate's own experts keeps both bit for
        bit. A row with fewer experts than others repeats its last one, with weight 0.
        """
        if all(set(new) == set(old) for new, old in zip(chosen, index.tolist(), strict=True)):
            return index, weights
        scores, rule = self.scores(layer).to(weights.device), self._gates[layer].rule
        width = max(map(len, chosen))
        padded = [list(row) + [row[-1]] * (width - len(row)) for row in chosen]
        real = torch.tensor([[n < len(row) for n in range(width)] for row in chosen], device=weights.device)
        new_index = torch.tensor(padded, dtype=index.dtype, device=index.device)
        raw = scores.gather(1, new_index.long()) * real
        if rule.normalised:
            raw = raw / raw.sum(1, keepdim=True)
        new = (raw * rule.scale).to(weights.dtype)
        if not rule.normalised:
            new = _kept(new_index, new, index, weights, real)
        for row, (experts, own) in enumerate(zip(chosen, index.tolist(), strict=True)):
            if set(experts) == set(own) and len(own) == width:
                new_index[row], new[row] = index[row], weights[row]
        return new_index, new

    def digest(self) -> str:
        """A digest of all gates' parameters, rounded to bfloat16, so that it does not depend on the loaded dtype."""
        sums = hashlib.sha256()
        for module in self._modules.values():
            for _, value in sorted(module.named_parameters()):
                sums.update(value.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        return sums.hexdigest()[:32]


def _kept(
    new_index: torch.Tensor, new: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """For weights that do not depend on the other experts of a row: keep the gate's own where it chose the expert."""
    same = (new_index[:, :, None] == index[:, None, :]) & real[:, :, None]
    own = torch.where(same, weights[:, None, :], 0).sum(-1)
    return torch.where(same.any(-1), own, new)


# --- how a family's gate is found ---------------------------------------------------------------------------------


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _find(model: Any, block: torch.nn.Module, experts: torch.nn.Module, name: str) -> _Gate:
    """Raises UnsupportedFamilyError."""
    count = family.expert_count(experts)
    where = f"{model.config.model_type}: {name.rpartition('.')[0]} ({type(block).__name__})"
    asked = _Asked()
    trial = copy.deepcopy(block, {id(experts): asked}).float().eval()
    heard: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
    for path, module in trial.named_modules():
        if path and module is not asked:
            _listen(module, path, heard)
    config = model.config.get_text_config()
    device = next((value.device for _, value in _tensors(block)), torch.device("cpu"))
    rows = torch.randn(_ROWS, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        with torch.inference_mode():
            trial(rows[None])
            found = _router(heard, asked.index, count)
            if found is None:
                raise UnsupportedFamilyError(f"{where} has no module that says which experts it chose; {_ADVICE}")
            path, extra, keywords, place, index_place = found
            logits = next(output for p, _, _, output in heard if p == path)[place]
            heard.clear()
            trial((rows * _SPREAD / max(float(logits.float().std()), 1e-6))[None])
    except (TypeError, RuntimeError, AttributeError, KeyError, ValueError) as error:
        raise UnsupportedFamilyError(f"{where} cannot be asked by itself ({error!r}); {_ADVICE}") from error
    logits = next(output for p, _, _, output in heard if p == path)[place].reshape(_ROWS, count).float()
    rule = _rule(logits, asked.index.reshape(_ROWS, -1).long(), asked.weights.reshape(_ROWS, -1).float())
    own = [value for _, value in _tensors(trial.get_submodule(path))]
    if rule is not None and (len(own) > 1 or extra or keywords):  # a correction may be zero in the tested layer
        rule = replace(rule, plain=False)
    if rule is None:
        raise UnsupportedFamilyError(
            f"{where}: the weights of its gate ({type(trial.get_submodule(path)).__name__}) are not proportional to "
            f"{', '.join(_SQUASHES)} of its logits, nor those normalised; {_ADVICE}"
        )
    names = {id(value): key for key, value in _tensors(trial)}
    if any(isinstance(v, torch.Tensor) and id(v) not in names for v in (*extra, *keywords.values())):
        raise UnsupportedFamilyError(f"{where}: its gate reads more than a row and its own weights; {_ADVICE}")
    return _Gate(
        path, tuple(names.get(id(v), v) for v in extra), {key: names.get(id(v), v) for key, v in keywords.items()},
        place, index_place, rule,
    )  # fmt: skip


def _listen(module: torch.nn.Module, path: str, heard: list[Any]) -> None:
    def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        heard.append((path, args, kwargs, output))

    module.register_forward_hook(hook, with_kwargs=True)


def _router(heard: list[Any], index: torch.Tensor, count: int) -> tuple[Any, ...] | None:
    """(path, arguments after the rows, those by name, position of the logits, position of the index) of the module that
    returned `index`."""
    for path, args, kwargs, output in heard:
        if not isinstance(output, tuple | list) or not args:
            continue
        chose = [n for n, v in enumerate(output) if _is(v, index.shape[-1]) and not v.is_floating_point()]
        chose = [n for n in chose if torch.equal(output[n].reshape(index.shape), index)]
        logits = [n for n, v in enumerate(output) if _is(v, count) and v.is_floating_point()]
        if chose and logits:
            return path, args[1:], kwargs, logits[0], chose[0]
    return None


def _is(value: Any, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[-1] == width


def _rule(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Rule | None:
    """The first rule that explains all rows; None if no rule does, or if the rows are too similar to tell."""
    if float(logits.std()) < _CLOSE:
        return None
    for name, squash in _SQUASHES.items():
        scores = squash(logits)
        ratio = weights / scores.gather(1, index)
        top = scores.topk(index.shape[1]).indices
        plain = bool((top.sort(1).values == index.sort(1).values).all())
        if _alike(ratio.flatten()):
            return Rule(name, False, _snapped(ratio), plain)
        sums = weights.sum(1)
        if all(map(_alike, ratio)) and _alike(sums):
            return Rule(name, True, _snapped(sums), plain)
    return None


def _alike(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all()) and bool((values - values[0]).abs().max() <= _CLOSE * values[0].abs())


def _snapped(values: torch.Tensor) -> float:
    """The mean of `values`, rounded to few digits, since a scaling factor has few and float32 sums leave noise."""
    return float(f"{float(values.double().mean()):.5g}")
