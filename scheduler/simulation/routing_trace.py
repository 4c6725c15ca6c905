"""Routing traces: which experts every token of some requests chose, in every MoE layer, as one documented file.

The file is NumPy's .npz without pickled objects. Its arrays, with T tokens of R requests, prompts and answers, L MoE
layers and E experts a layer:

- `schema`: the text `odmoe-routes`; `version`: 1; `model`, `source`: texts, for people.
- `num_experts`: E.
- `experts` [T, L, top-k], integers: the experts that a token's gate chose, best first if the source has an order.
- `request` [T]: the number of the token's request, from 0, ascending. `prompt_tokens` [R]: how many of the request's
  first tokens are its prompt.
- `scores` [T, L, E], floats, optional: what the gate gave every expert; routing weights are proportional to it.
- `foresight_KIND_place` [N, 4] and `foresight_KIND_scores` [N, E], optional, for each kind of predictor (`Foresight`):
  the scores that were foreseen. A place is (token, layer) of the gate after which, how many tokens ahead, and the layer
  for which. With `attention` they depend on the experts that were resident.
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from scheduler.errors import ConfigError
from scheduler.limits import MAX_COUNT, MAX_EXPERTS
from scheduler.policies.predictors.base import Foresight
from scheduler.simulation.recorded_routes import RecordedWorkload
from scheduler.simulation.workload import Gate

SCHEMA, VERSION = "odmoe-routes", 1
MAX_BYTES = 4 << 30
"""Of a file's arrays together, unpacked."""
SHIPPED = Path(__file__).parent / "traces"
"""Traces of this project's own models."""
KINDS: tuple[str, ...] = get_args(Foresight)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """Scores that were foreseen. `place` [N, 4]: token, layer, tokens ahead, layer. `scores` [N, E]."""

    place: Array
    scores: Array


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The arrays of a file; see the module. Raises ConfigError for arrays that do not fit together."""

    experts: Array
    num_experts: int
    request: Array
    prompt_tokens: Array
    scores: Array | None = None
    foresight: Mapping[str, Foretold] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    """`model`, `source`."""

    def __post_init__(self) -> None:
        experts, request, prompts = self.experts, self.request, self.prompt_tokens
        if experts.ndim != 3 or not experts.size or experts.dtype.kind not in "iu":
            raise ConfigError(f"experts has shape {experts.shape} of {experts.dtype}; expected: integers [T, L, top-k]")
        if not 1 <= self.num_experts <= MAX_EXPERTS or max(experts.shape) > MAX_COUNT:
            raise ConfigError(f"num_experts is {self.num_experts}; allowed: 1 to {MAX_EXPERTS}")
        if experts.min() < 0 or experts.max() >= self.num_experts:
            raise ConfigError(
                f"experts has {experts.min()} to {experts.max()}; allowed: 0 to {self.num_experts - 1}, as there are "
                f"{self.num_experts} experts"
            )
        ordered = np.sort(experts, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            token, layer = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2))[0]
            raise ConfigError(
                f"token {token} chooses an expert twice in layer {layer}; each expert of a row is another"
            )
        self._check_requests(request, prompts)
        if self.scores is not None and self.scores.shape != (*experts.shape[:2], self.num_experts):
            raise ConfigError(
                f"scores has shape {self.scores.shape}; expected: {(*experts.shape[:2], self.num_experts)}"
            )
        for kind, foretold in self.foresight.items():
            self._check_foresight(kind, foretold)

    def _check_requests(self, request: Array, prompts: Array) -> None:
        tokens = self.experts.shape[0]
        if request.shape != (tokens,) or prompts.ndim != 1 or not prompts.size or request.dtype.kind not in "iu":
            raise ConfigError(f"request has shape {request.shape}; expected: a number for each of {tokens} tokens")
        counts = np.bincount(request, minlength=len(prompts)) if request.min() >= 0 else request[:0]
        if len(counts) != len(prompts) or (np.diff(request.astype(np.int64)) < 0).any():
            raise ConfigError(f"request has {len(counts)} numbers for {len(prompts)} prompts; they ascend from 0")
        wrong = np.flatnonzero((prompts < 1) | (prompts > counts))
        if wrong.size:
            at = int(wrong[0])
            raise ConfigError(f"request {at} has {counts[at]} tokens, and a prompt of {prompts[at]}; allowed: 1 to all")

    def _check_foresight(self, kind: str, foretold: Foretold) -> None:
        place, scores = foretold.place, foretold.scores
        if kind not in KINDS:
            raise ConfigError(f"foresight is of kind {kind!r}; allowed: {', '.join(KINDS)}")
        if place.shape != (len(scores), 4) or scores.shape != (len(place), self.num_experts):
            raise ConfigError(f"the foresight {kind} has places {place.shape} and scores {scores.shape}")
        tokens, layers, _ = self.experts.shape
        within = (place >= 0).all() and (place[:, [1, 3]] < layers).all() and (place[:, 2] <= 1).all()
        if len(place) and not (within and (place[:, 0] < tokens).all()):
            raise ConfigError(f"the foresight {kind} has a place outside of {tokens} tokens and {layers} layers")

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """For each request: its first token, the first one of its answer, and the end."""
        ends = np.cumsum(np.bincount(self.request, minlength=len(self.prompt_tokens)))
        for number, (end, prompt) in enumerate(zip(ends, self.prompt_tokens, strict=True)):
            first = int(ends[number - 1]) if number else 0
            yield first, first + int(prompt), int(end)


# --- files ------------------------------------------------------------------------------------------------------


def is_trace(path: Path) -> bool:
    """Whether the file begins as a trace does, and not as a recording."""
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def find_trace(name: str) -> Path | None:
    """A file of this path; else the trace of this project's model of that name, if there is one."""
    path = Path(name)
    shipped = SHIPPED / f"{name}.npz"
    if not path.exists() and path.name == name and shipped.is_file():
        return shipped
    return path if is_trace(path) else None


def read_trace(path: Path) -> RoutingTrace:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as packed:
            unpacked = sum(member.file_size for member in packed.infolist())
        if unpacked > MAX_BYTES:
            raise ConfigError(f"its arrays have {unpacked} bytes; allowed: {MAX_BYTES}; leave scores out")
        with np.load(path, allow_pickle=False) as found:
            return _read({name: found[name] for name in found.files})
    except OSError as error:
        raise ConfigError(f"routing trace {path} cannot be read: {error.strerror or error}; check the path") from error
    except (ConfigError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not a routing trace: {error}; make one with odmoe routes export") from error


def _read(arrays: dict[str, Array]) -> RoutingTrace:
    if str(arrays.get("schema")) != SCHEMA:
        raise ConfigError("it has no array schema with the text odmoe-routes")
    if int(arrays["version"]) != VERSION:
        raise ConfigError(f"it has version {int(arrays['version'])}, but this odmoe reads version {VERSION}")
    kinds = [name.split("_")[1] for name in arrays if name.startswith("foresight_") and name.endswith("_place")]
    foresight = {
        kind: Foretold(arrays[f"foresight_{kind}_place"].astype(np.int64), arrays[f"foresight_{kind}_scores"])
        for kind in kinds
    }
    about: dict[str, str] = {name: str(arrays[name]) for name in ("model", "source") if name in arrays}
    return RoutingTrace(
        arrays["experts"],
        int(arrays["num_experts"]),
        arrays["request"],
        arrays["prompt_tokens"],
        arrays.get("scores"),
        foresight,
        about,
    )


def write_trace(path: Path, trace: RoutingTrace, half: bool = False) -> None:
    """`half`: scores in float16. Raises ConfigError if the file cannot be written."""
    arrays: dict[str, Any] = {
        "schema": np.array(SCHEMA),
        "version": np.array(VERSION),
        **{name: np.array(text) for name, text in trace.about.items()},
        "num_experts": np.array(trace.num_experts),
        "experts": trace.experts.astype(np.uint8 if trace.num_experts <= 256 else np.uint16),
        "request": trace.request.astype(np.int32),
        "prompt_tokens": trace.prompt_tokens.astype(np.int32),
    }
    kind = np.float16 if half else np.float32
    if trace.scores is not None:
        arrays["scores"] = trace.scores.astype(kind)
    for name, foretold in trace.foresight.items():
        arrays[f"foresight_{name}_place"] = foretold.place.astype(np.int32)
        arrays[f"foresight_{name}_scores"] = foretold.scores.astype(kind)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"routing trace {path} cannot be written: {error.strerror or error}") from error


# --- workloads --------------------------------------------------------------------------------------------------


def traced_workloads(trace: RoutingTrace, kind: str | None = None) -> list[RecordedWorkload]:
    """Every request, as one pass over its prompt and then a pass a token. `kind`: of the foresight that comes along, if
    the trace has it."""
    foretold = _foretold(trace, kind)
    return [_Request(trace, number, span, kind, foretold).workload() for number, span in enumerate(trace.spans())]


def _foretold(trace: RoutingTrace, kind: str | None) -> Foretold | None:
    """`gates` look at several next layers; the first of them is what `gate` looks at."""
    if kind is None or kind in trace.foresight or kind != "gate":
        return trace.foresight.get(kind or "")
    several = trace.foresight.get("gates")
    if several is None:
        return None
    following = several.place[:, 3] == several.place[:, 1] + 1
    return Foretold(several.place[following], several.scores[following])


class _Request:
    """One request's tokens."""

    def __init__(
        self, trace: RoutingTrace, number: int, span: tuple[int, int, int], kind: str | None, foretold: Foretold | None
    ) -> None:
        self._trace, self._number, self._kind = trace, number, kind
        self._first, self._answer, self._end = span
        self._foretold = foretold

    def workload(self) -> RecordedWorkload:
        trace, prompt = self._trace, self._answer - self._first
        one = RecordedWorkload(self._number, prompt, trace.num_experts)
        layers = range(trace.layers)
        one.prefill = [[self._prompt_rows(layer) for layer in layers]]
        one.chunks = (prompt,)
        one.passes = [
            [tuple(sorted(row)) for row in trace.experts[token].tolist()] for token in range(self._answer, self._end)
        ]
        foreseen = self._foreseen()
        one.foresight = self._kind if self._foretold is not None else None
        if trace.scores is not None or self._foretold is not None:
            for index in range(-1, len(one.passes)):
                for layer in layers:
                    one.gates[index, layer] = self._gate(index, layer, tuple(foreseen.get((index, layer), ())))
        return one

    def _tokens_of(self, index: int) -> slice:
        """Of a pass."""
        return slice(self._first, self._answer) if index < 0 else slice(self._answer + index, self._answer + index + 1)

    def _gate(self, index: int, layer: int, foreseen: tuple[Any, ...]) -> Gate:
        rows, trace = self._tokens_of(index), self._trace
        scores = _tuples(trace.scores[rows, layer].tolist()) if trace.scores is not None else ()
        return Gate(_tuples(trace.experts[rows, layer].tolist()), scores, foreseen)

    def _prompt_rows(self, layer: int) -> tuple[tuple[int, int], ...]:
        chosen = self._trace.experts[self._first : self._answer, layer]
        return tuple(sorted(Counter(chosen.ravel().tolist()).items()))

    def _foreseen(self) -> dict[tuple[int, int], list[tuple[int, int, Any]]]:
        """(index, layer) of a gate -> what was foreseen after it: index, layer, a row of scores for each of the pass's
        rows, or one."""
        found: dict[tuple[int, int], list[tuple[int, int, Any]]] = {}
        if self._foretold is None:
            return found
        within = (self._foretold.place[:, 0] >= self._first) & (self._foretold.place[:, 0] < self._end)
        rows: dict[tuple[int, int, int, int], list[Any]] = {}
        for (token, layer, ahead, of), scores in zip(
            self._foretold.place[within].tolist(), self._foretold.scores[within].tolist(), strict=True
        ):
            if ahead and token < self._answer - 1:
                continue  # for a token of the prompt, which is read in the same pass
            index = max(-1, token - self._answer)
            target = index if not ahead else max(0, token + 1 - self._answer)
            rows.setdefault((index, layer, target, of), []).append(tuple(scores))
        for (index, layer, target, of), scores in rows.items():
            found.setdefault((index, layer), []).append((target, of, tuple(scores)))
        return found


def _tuples(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))
