"""Runs the model ahead, from a layer's experts to the next gate, with an assumed output of these experts.

The model's own code runs. A decoder layer is called again with its arguments; parts that have run return their earlier
result, and the experts the assumed one. So residuals, shared experts, norms and attention are the family's own. The KV
cache that it reads is a copy which shares every row.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint import family, kv
from checkpoint.gates import Gates
from scheduler.errors import UnsupportedFamilyError

_BLOCK = re.compile(r"^(.*?)\.(\d+)\.")
_TRIAL_TOKENS, _TRIAL_STEPS = 5, 3


class _ReachedError(Exception):
    """The next gate has fired, or its input is there; nothing after it is needed."""


@dataclass(slots=True)
class Captured:
    """What was kept of the pass under way."""

    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """Layer -> its arguments."""
    done: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    """Layer -> the results of its parts, in the order of their calls, by the part's id."""


class RunAhead:
    """Computes the next MoE layer's gate while this layer's experts are in progress. For single tokens only.

    `cache` returns the KV cache of the current pass's request. Meanwhile the model must not change. The constructor
    runs a trial with random experts. It raises UnsupportedFamilyError if the experts' true output does not give the
    next gate's scores, or if running ahead changes the model's answer or its cache.
    """

    def __init__(self, model: Any, gates: Gates, cache: Callable[[], Any]) -> None:
        self._gates, self._cache = gates, cache
        self._config = model.config
        self._kept = Captured()
        self._ahead: _Ahead | None = None
        self._trial: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        self._ends_at_block = True
        """What the next gate's block is called with is the gate's input, so that nothing of the block need run."""
        self._undo: list[Callable[[], object]] = []
        self._blocks = _blocks(model)
        self._kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["?"] * len(self._blocks)
        for layer, (name, experts) in family.experts_modules(model).items():
            moe = model.get_submodule(name.rpartition(".")[0])
            self._undo.append(
                self._blocks[layer].register_forward_pre_hook(self._make_call_hook(layer), with_kwargs=True).remove
            )
            self._wrap(experts, self._experts(layer, experts.forward))
            self._undo.append(moe.register_forward_pre_hook(self._make_block_hook(layer)).remove)
            for part in _parts_before(self._blocks[layer], experts):
                self._wrap(part, self._part(layer, part))
        for layer, block in enumerate(self._blocks):
            if layer not in gates.layers and layer < gates.layers[-1]:  # nothing runs ahead after the last gate
                self._undo.append(block.register_forward_pre_hook(self._make_call_hook(layer), with_kwargs=True).remove)
        try:
            if not self._is_proved(model):
                self._ends_at_block = False
                self._prove(model)
        except UnsupportedFamilyError:
            self.close()
            raise

    def use(self, kept: Captured) -> None:
        """Keep there what the pass does: passes that take turns layer by layer have one each."""
        self._kept = kept

    def next_layer(self, layer: int) -> int | None:
        """The MoE layer after this one."""
        return next((other for other in self._gates.layers if other > layer), None)

    def scores(self, layer: int, given: torch.Tensor) -> torch.Tensor | None:
        """`Gates.ranked_scores` [1, E] of the next MoE layer's gate, if `layer`'s experts output `given` [1, H].

        Call it from within these experts. None after the last MoE layer, for a pass of several tokens, or if a layer
        before the next gate has attention of another kind, whose arguments are not known yet in this pass.
        """
        until = self.next_layer(layer)
        if until is None or layer not in self._kept.calls:
            return None
        cache = self._cache()
        copied = _Borrowed(cache, layer, until)
        self._ahead = ahead = _Ahead(layer, given)
        try:
            with self._gates.aside() as outputs:
                args, kwargs = self._kept.calls[layer]
                hidden = None
                for at in range(layer, until + 1):
                    known = self._kept.calls.get(self._like(at, layer))
                    if known is None:
                        return None
                    args, kwargs = copied.swap(known, hidden)
                    self._ahead.counts.clear()
                    hidden = self._blocks[at](*args, **kwargs)
                    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        except _ReachedError:
            if ahead.gate_input is not None:
                return self._gates.ranked_at(until, ahead.gate_input)
            return self._gates.ranked_scores(until, outputs)
        finally:
            self._ahead = None
        return None

    def forget(self) -> None:
        """Release the pass's cache."""
        self._kept.calls.clear()
        self._kept.done.clear()

    def close(self) -> None:
        """Remove everything from the model."""
        self.forget()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _like(self, layer: int, last: int) -> int:
        """The layer up to `last` that gets the same arguments as this one: itself, or the nearest of its kind."""
        return next((n for n in range(min(layer, last), -1, -1) if self._kinds[n] == self._kinds[layer]), -1)

    # --- what is put around the model's own modules -------------------------------------------------------------

    def _wrap(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        vars(module)["forward"] = forward
        self._undo.append(lambda: vars(module).pop("forward", None))

    def _make_call_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._ahead is not None:
                return
            if layer == 0:
                self._kept.calls.clear()
            self._kept.done.pop(layer, None)
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and hidden.shape[1] == 1:
                self._kept.calls[layer] = (args, kwargs)
                self._kept.done[layer] = {}

        return hook

    def _part(self, layer: int, part: torch.nn.Module) -> Callable[..., Any]:
        """A forward that repeats, while running ahead, the part's results of this pass, in order."""
        forward, key = part.forward, id(part)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            ahead = self._ahead
            if ahead is None:
                output = forward(*args, **kwargs)
                if (done := self._kept.done.get(layer)) is not None:
                    done.setdefault(key, []).append(output)
                return output
            if ahead.layer == layer:
                number = ahead.counts.get(key, 0)
                ahead.counts[key] = number + 1
                said_before = self._kept.done[layer].get(key, [])
                if number < len(said_before):
                    return said_before[number]
            return forward(*args, **kwargs)

        return run

    def _experts(self, layer: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(forward)
        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._ahead is None:
                return self._trial(layer, hidden) if self._trial else forward(hidden, *args, **kwargs)
            if self._ahead.layer != layer:
                raise _ReachedError
            return self._ahead.given

        return run

    def _make_block_hook(self, layer: int) -> Callable[..., None]:
        """Of the block of a layer's gate and experts."""

        def hook(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            ahead = self._ahead
            if ahead is not None and ahead.layer != layer and self._ends_at_block and args:
                ahead.gate_input = args[0].reshape(-1, args[0].shape[-1])
                raise _ReachedError

        return hook

    # --- does it fit this family? -------------------------------------------------------------------------------

    def _is_proved(self, model: Any) -> bool:
        try:
            self._prove(model)
        except UnsupportedFamilyError:
            return False
        return True

    def _prove(self, model: Any) -> None:
        """Raises UnsupportedFamilyError."""
        wrong: set[int] = set()
        right: set[int] = set()
        foretold: dict[int, torch.Tensor] = {}
        own = self._cache

        def experts(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            if layer in foretold:
                (right if torch.equal(foretold.pop(layer), self._gates.ranked_scores(layer)) else wrong).add(layer)
            given = hidden.roll(1, -1) * 0.5
            until, scores = self.next_layer(layer), self.scores(layer, given)
            if until is not None and scores is not None:
                foretold[until] = scores
            return given

        try:
            plain, plain_cache = self._trial_pass(model, lambda _, hidden: hidden.roll(1, -1) * 0.5)
            output, cache = self._trial_pass(model, experts)
        except (TypeError, RuntimeError, AttributeError, KeyError, IndexError, ValueError) as error:
            raise self._unsupported_error(f"its layers cannot be run ahead: {error!r}") from error
        finally:
            self._trial, self._cache = None, own
        if wrong:
            raise self._unsupported_error(
                f"the gates of layers {sorted(wrong)} are not told by their block's output alone"
            )
        if not torch.equal(plain, output) or not _same(plain_cache, cache):
            raise self._unsupported_error("its answer changes where layers are run ahead")
        if not right:
            raise self._unsupported_error("no layer's arguments are known before its turn")

    def _trial_pass(self, model: Any, experts: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        cache = family.new_cache(model.config)
        self._trial, self._cache = experts, lambda: cache
        device, vocabulary = model.device, model.get_input_embeddings().num_embeddings
        logits = []
        with torch.inference_mode():
            for step in range(1 + _TRIAL_STEPS):
                count = 1 if step else _TRIAL_TOKENS
                ids = torch.arange(7 * step + 1, 7 * step + 1 + count, device=device)[None] % vocabulary
                logits.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(logits), cache

    def _unsupported_error(self, why: str) -> UnsupportedFamilyError:
        return UnsupportedFamilyError(
            f"{self._config.model_type}: what the next gate will say cannot be computed ahead, since {why}; take a "
            "system with another predictor (next-gate, cross-layer, sep)"
        )


class _Ahead:
    """One run ahead, in which `layer`'s experts output `given`. `counts` are the calls of each part in it.
    `gate_input` [1, H]: of the next gate, where the run has ended before it."""

    __slots__ = ("counts", "gate_input", "given", "layer")

    def __init__(self, layer: int, given: torch.Tensor) -> None:
        self.layer, self.given = layer, given
        self.counts: dict[int, int] = {}
        self.gate_input: torch.Tensor | None = None


class _Borrowed:
    """A copy of a cache that shares its rows: Transformers' caches grow by making new tensors. States are copied, since
    they are overwritten."""

    def __init__(self, cache: Any, first: int, last: int) -> None:
        self._cache = cache
        self._copy = _shallow(cache)
        for layer in range(first, min(last + 1, len(self._copy.layers))):
            self._copy.layers[layer] = _shallow(self._copy.layers[layer])

    def swap(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], hidden: torch.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments with this cache in place of the true one and, if given, other hidden states."""
        args = tuple(self._copy if value is self._cache else value for value in call[0])
        kwargs = {key: self._copy if value is self._cache else value for key, value in call[1].items()}
        if hidden is not None and args:
            args = (hidden, *args[1:])
        elif hidden is not None:
            kwargs["hidden_states"] = hidden
        return args, kwargs


def _shallow(value: Any) -> Any:
    """A shallow copy with lists and dictionaries of its own, and copies of the tensors in them."""
    copied = object.__new__(type(value))
    for name, held in vars(value).items():
        if isinstance(held, dict):
            held = {key: _clone(one) for key, one in held.items()}
        elif isinstance(held, list):
            held = [_clone(one) for one in held]
        vars(copied)[name] = held
    return copied


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    length = one.get_seq_length()
    a, b = kv.take(one, 0, length), kv.take(other, 0, length)
    rows = zip(a.rows, b.rows, strict=True)
    return all(torch.equal(x.tensor, y.tensor) for x, y in rows) and all(
        torch.equal(x, y) for x, y in zip(a.states, b.states, strict=True)
    )


def _blocks(model: Any) -> list[torch.nn.Module]:
    """The decoder layers. Raises UnsupportedFamilyError."""
    name = next(iter(family.experts_modules(model).values()))[0]
    match = _BLOCK.match(name)
    if match is None:
        raise UnsupportedFamilyError(
            f"{model.config.model_type}: {name} is in no numbered layer; take another predictor"
        )
    return list(model.get_submodule(match.group(1)))


def _parts_before(block: torch.nn.Module, experts: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The largest modules of a decoder layer that do not hold its experts."""
    for child in block.children():
        if child is experts:
            continue
        if isinstance(child, torch.nn.ModuleList) or any(module is experts for module in child.modules()):
            yield from _parts_before(child, experts)
        else:
            yield child
