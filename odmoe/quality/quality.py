"""What quantised experts and approximate systems cost: perplexity and right answers of a checkpoint's model and of a
changed one on the same text, and how far apart their predictions are.

The first is Transformers' own model. The second is that model with the store's experts, whose bits an exact system's
answers have; or this engine, whose router or precision changes answers. Intervals are of 95 %, paired, by bootstrap
over passages or items, which are drawn together for both models.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint.direct_io import open_direct, read_at, room_for
from checkpoint.encoded_dense import EncodedFiles
from checkpoint.family import expert_parameters, experts_modules
from checkpoint.native.parameters import ExpertParameters
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from odmoe.quality.passages import divergence, losses
from odmoe.quality.readers import Reader
from odmoe.quality.tasks import Decode, Task
from scheduler.errors import ConfigError

DRAWS = 2000
_TAILS = (0.025, 0.975)

Step = Callable[[], None]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scored:
    """A task: the share of right answers, or of a text nats a token, of both models."""

    name: str
    form: str
    items: int
    original: float
    changed: float
    difference: float
    difference_interval: Interval


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a changed model beside its checkpoint's."""

    model: str
    dtype: str
    experts: str
    """How the store keeps them, and what a system changes, in words."""
    text: str
    passages: int
    tokens: int
    """That were asked about."""
    original_perplexity: float
    perplexity: float
    ratio: float
    """`perplexity` over `original_perplexity`."""
    ratio_interval: Interval
    divergence: float
    """KL(original || changed), nats a token."""
    divergence_interval: Interval
    same_best: float
    """The share of places at which both models think the same token most probable."""
    tasks: tuple[Scored, ...] = ()
    missing: tuple[str, ...] = ()
    """Tasks whose files are not there."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Sums over the tokens of a passage that were asked about."""

    tokens: int
    original_nats: float
    nats: float
    divergence: float
    same_best: int


def measure(
    original: Reader,
    change: Callable[[], Reader],
    passages: Sequence[list[int]],
    given: int = 1,
    tasks: Sequence[Task] = (),
    decode: Decode = lambda ids: "",
    step: Step = lambda: None,
) -> tuple[list[Passage], list[Scored]]:
    """`change` makes the other model, once the original has read everything. Of each passage the first `given` tokens
    are a prompt, and the others are asked about. `step` is called for each passage and item, of both models.

    The logits of the original, tokens times vocabulary in the model's dtype, lie in a temporary file meanwhile. Raises
    ConfigError where there is no room for it, StoreError.
    """
    rows = sum(len(passage) - given for passage in passages)
    first = original.logits(passages[0], given)
    step()
    with _kept((rows, first.shape[1]), first.dtype) as kept:
        places = kept.split([len(passage) - given for passage in passages])
        places[0].copy_(first)
        for place, passage in zip(places[1:], passages[1:], strict=True):
            place.copy_(original.logits(passage, given))
            step()
        before = _scores(tasks, original, decode, step)
        changed, found = change(), []
        for place, passage in zip(places, passages, strict=True):
            found.append(_compared(place, changed.logits(passage, given), passage[given - 1 :]))
            step()
        after = _scores(tasks, changed, decode, step)
    return found, [_scored(*each) for each in zip(tasks, before, after, strict=True)]


def _scores(tasks: Sequence[Task], reader: Reader, decode: Decode, step: Step) -> list[list[float]]:
    """Of each item of each task."""
    found: list[list[float]] = []
    for task in tasks:
        found.append([])
        for item in task.items:
            found[-1].append(task.score(item, reader, decode))
            step()
    return found


def _scored(task: Task, before: list[float], after: list[float]) -> Scored:
    more = torch.tensor(after).double() - torch.tensor(before).double()
    return Scored(
        task.name,
        task.form,
        len(before),
        sum(before) / len(before),
        sum(after) / len(after),
        float(more.mean()),
        _interval(more[_drawn(len(more))].mean(1)),
    )


def load_weights(model: Any, store: ExpertStore) -> None:
    """Replace the weights of Transformers' model that a store may keep otherwise: experts, and encoded dense weights.
    Raises StoreError, OSError."""
    load_experts(model, store)
    EncodedFiles(store.dense).restore_into(model)


def load_experts(model: Any, store: ExpertStore) -> None:
    """Replace the experts of Transformers' model by those of a store. Raises StoreError, OSError."""
    restored = ExpertParameters(store.manifest, threads=torch.get_num_threads())
    for layer, (name, module) in experts_modules(model).items():
        held = expert_parameters(name, module)
        for expert in range(len(store.manifest.layers[layer].blobs)):
            for key, value in restored.of(_blob(store, layer, expert), layer).items():
                held[key].data[expert].copy_(value)


def _blob(store: ExpertStore, layer: int, expert: int) -> torch.Tensor:
    file, blob = store.locate(layer, expert)
    descriptor = open_direct(file, os.O_RDONLY)
    try:
        return read_at(descriptor, blob.offset, blob.length, aligned_buffer(room_for(blob.offset, blob.length)))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _kept(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor in a temporary file. Raises ConfigError where the disk has no room."""
    count = shape[0] * shape[1]
    nbytes = count * dtype.itemsize
    with tempfile.NamedTemporaryFile(prefix="odmoe-logits-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise ConfigError(
                f"the logits of {shape[0]} tokens take {nbytes:,} bytes, for which {tempfile.gettempdir()} has no room "
                f"({error.strerror}); lower --text-tokens, or set TMPDIR to another folder"
            ) from error
        yield torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


def _compared(original: torch.Tensor, logits: torch.Tensor, passage: list[int]) -> Passage:
    return Passage(
        len(passage) - 1,
        sum(losses(original, passage)),
        sum(losses(logits, passage)),
        float(divergence(original, logits).sum()),
        int((original.argmax(-1) == logits.argmax(-1)).sum()),
    )


def as_quality(passages: Sequence[Passage], **of: Any) -> Quality:
    """`of`: the other fields of `Quality`."""
    sums = torch.tensor([[p.tokens, p.original_nats, p.nats, p.divergence, p.same_best] for p in passages]).double()
    tokens, original, ours, apart, same = sums.sum(0).tolist()
    draws = sums[_drawn(len(sums))].sum(1)  # [DRAWS, 5]
    ratios, divergences = ((draws[:, 2] - draws[:, 1]) / draws[:, 0]).exp(), draws[:, 3] / draws[:, 0]
    exp = torch.tensor([original / tokens, ours / tokens, (ours - original) / tokens]).double().exp().tolist()
    return Quality(
        **of,
        passages=len(passages),
        tokens=int(tokens),
        original_perplexity=exp[0],
        perplexity=exp[1],
        ratio=exp[2],
        ratio_interval=_interval(ratios),
        divergence=apart / tokens,
        divergence_interval=_interval(divergences),
        same_best=same / tokens,
    )


def _drawn(count: int) -> torch.Tensor:
    """Numbers below `count`, drawn with replacement: [DRAWS, count], the same at each call."""
    return torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))


def _interval(draws: torch.Tensor) -> Interval:
    low, high = draws.quantile(torch.tensor(_TAILS, dtype=draws.dtype)).tolist()
    return low, high
