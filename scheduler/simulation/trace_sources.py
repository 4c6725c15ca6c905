"""Where routing traces come from: recordings of this engine, and what other engines and tools write."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording
from scheduler.policies.registry import foresight_of
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_workloads
from scheduler.simulation.routing_trace import Array, Foretold, RoutingTrace

# --- recordings -------------------------------------------------------------------------------------------------


def trace_of(recordings: Sequence[tuple[str, Recording]]) -> RoutingTrace:
    """Of recordings, with their names, that answer the same prompts with the same routes: each adds the foresight of
    its predictor, and the first one's scores are taken. Raises ConfigError."""
    found: RoutingTrace | None = None
    for name, recording in recordings:
        one = _trace(name, recording)
        if found is None:
            found = one
            continue
        if not _same_routes(found, one):
            raise ConfigError(f"{name} has other routes than {recordings[0][0]}; record the same prompts, exactly")
        found = RoutingTrace(
            found.experts,
            found.num_experts,
            found.request,
            found.prompt_tokens,
            found.scores,
            {**one.foresight, **found.foresight},
            found.about,
        )
    if found is None:
        raise ConfigError("no recording is given; give one or more")
    return found


def _same_routes(one: RoutingTrace, other: RoutingTrace) -> bool:
    return (
        np.array_equal(np.sort(one.experts, axis=2), np.sort(other.experts, axis=2))
        and np.array_equal(one.request, other.request)
        and np.array_equal(one.prompt_tokens, other.prompt_tokens)
    )


def _trace(name: str, recording: Recording) -> RoutingTrace:
    config = recording.core_config
    workloads = recorded_workloads(recording)
    if not workloads:
        raise ConfigError(f"recording {name} has no request with a complete prefill; record a whole answer")
    kind = foresight_of(config.shape, config.system)
    rows: list[list[tuple[int, ...]]] = []
    scores: list[list[tuple[float, ...]]] = []
    places: list[tuple[int, int, int, int]] = []
    foreseen: list[tuple[float, ...]] = []
    for one in workloads:
        first = len(rows)
        rows += _rows(name, one)
        scores += _scores(one)
        for place, row in _foretold(one, first):
            places.append(place)
            foreseen.append(row)
    experts = config.shape.experts
    foresight: dict[str, Foretold] = {}
    if kind is not None and places:
        foresight[kind] = Foretold(np.array(places, np.int64), np.array(foreseen, np.float32).reshape(-1, experts))
    lengths = [one.prompt_tokens + len(one.passes) for one in workloads]
    return RoutingTrace(
        np.array(rows, np.int64),
        experts,
        np.repeat(np.arange(len(workloads)), lengths),
        np.array([one.prompt_tokens for one in workloads]),
        np.array(scores, np.float32) if all(one.has_scores for one in workloads) else None,
        foresight,
        {"model": str(recording.about.get("model", "")), "source": f"odmoe {recording.about.get('odmoe', '')}".strip()},
    )


def _rows(name: str, one: RecordedWorkload) -> list[list[tuple[int, ...]]]:
    """By token and layer."""
    found: list[list[tuple[int, ...]]] = []
    layers = range(len(one.prefill[0]))
    for number, tokens in enumerate(one.chunks):
        gates = [one.gates.get((-1 - number, layer)) for layer in layers]
        chosen = [gate.chosen for gate in gates if gate is not None and len(gate.chosen) == tokens]
        if len(chosen) < len(gates):
            raise ConfigError(
                f"recording {name} does not say what each token of the prompt chose; record a system that reads scores "
                "of gates, such as --system hybrimoe"
            )
        found += [[layer[token] for layer in chosen] for token in range(tokens)]
    for index, passes in enumerate(one.passes):
        gates = [one.gates.get((index, layer)) for layer in layers]
        found.append(
            [gate.chosen[0] if gate and len(gate.chosen) == 1 else row for gate, row in zip(gates, passes, strict=True)]
        )
    return found


def _scores(one: RecordedWorkload) -> list[list[tuple[float, ...]]]:
    if not one.has_scores:
        return []
    layers = range(len(one.prefill[0]))
    found: list[list[tuple[float, ...]]] = []
    for index in (*(-1 - number for number in range(len(one.chunks))), *range(len(one.passes))):
        tokens = one.chunks[-1 - index] if index < 0 else 1
        found += [[one.gates[index, layer].scores[token] for layer in layers] for token in range(tokens)]
    return found


def _foretold(one: RecordedWorkload, first: int) -> Iterable[tuple[tuple[int, int, int, int], tuple[float, ...]]]:
    """Places and scores. `first`: number of the request's first token."""
    begins = {index: first + one.prompt_tokens + index for index in range(len(one.passes))}
    at = first
    for number, tokens in enumerate(one.chunks):
        begins[-1 - number] = at
        at += tokens
    for (index, layer), gate in sorted(one.gates.items(), key=lambda item: begins[item[0][0]]):
        tokens = one.chunks[-1 - index] if index < 0 else 1
        for target, of, rows in gate.foreseen:
            ahead = int(target != index)
            for row, scores in enumerate(rows):
                token = begins[index] + (row if len(rows) == tokens else tokens - 1)
                yield (token, layer, ahead, of), scores


# --- others -----------------------------------------------------------------------------------------------------


def imported(
    files: Sequence[Path], top_k: int | None = None, num_experts: int | None = None, prompt_tokens: int = 1
) -> RoutingTrace:
    """A request a file: what vLLM and SGLang return as routed experts, [T, L, top-k], as .npy; a response of vLLM's
    server, as .json; or `layer,expert` rows of llama.cpp's moe-trace, as .csv. Raises ConfigError.

    `top_k`: of a .csv. `num_experts`: those of a layer; None: as many as the largest number says. `prompt_tokens`: of a
    file that does not tell the prompt from the answer.
    """
    if not files:
        raise ConfigError("no file is given; give a .npy, .json or .csv file for each request")
    read = [_read(file, top_k, prompt_tokens) for file in files]
    shapes = {experts.shape[1:] for experts, _ in read}
    if len(shapes) > 1:
        raise ConfigError(f"the files have routes of different models: layers and top-k are {sorted(shapes)}")
    experts = np.concatenate([experts for experts, _ in read])
    return RoutingTrace(
        experts,
        num_experts or int(experts.max()) + 1,
        np.repeat(np.arange(len(read)), [len(experts) for experts, _ in read]),
        np.array([prompt for _, prompt in read]),
        about={"source": ", ".join(file.name for file in files)},
    )


def _read(file: Path, top_k: int | None, prompt_tokens: int) -> tuple[Array, int]:
    """Experts [T, L, top-k], and the tokens of the prompt."""
    readers = {".npy": _read_npy, ".json": _read_json, ".csv": _read_csv}
    reader = readers.get(file.suffix)
    if reader is None:
        raise ConfigError(f"{file} ends with {file.suffix!r}; allowed: {', '.join(readers)}")
    try:
        experts, prompt = reader(file, top_k)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}; check the path") from error
    except (ValueError, TypeError, KeyError, IndexError, EOFError) as error:
        raise ConfigError(f"{file} has no routed experts: {error}") from error
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise ConfigError(f"{file} has an array {experts.shape} of {experts.dtype}; expected: integers [T, L, top-k]")
    return experts.astype(np.int64), prompt or min(prompt_tokens, len(experts))


def _read_npy(file: Path, top_k: int | None) -> tuple[Array, int | None]:
    return np.load(file, allow_pickle=False), None


def _read_json(file: Path, top_k: int | None) -> tuple[Array, int | None]:
    """vLLM 0.21: `prompt_routed_experts` [prompt, L, top-k] of the response, `routed_experts` [answer, L, top-k] of a
    choice."""
    given = json.loads(file.read_text("utf-8"))
    prompt = np.array(given["prompt_routed_experts"])
    return np.concatenate([prompt, np.array(given["choices"][0]["routed_experts"])]), len(prompt)


def _read_csv(file: Path, top_k: int | None) -> tuple[Array, int | None]:
    """Rows come layer by layer for each batch of tokens, top-k rows a token."""
    if top_k is None:
        raise ConfigError(f"{file} does not say how many experts a token chooses; give --top-k")
    rows: dict[int, list[int]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines), 1):
            if number == 1 and row and not row[0].strip().isdigit():
                continue  # a head
            if len(row) < 2:
                raise ValueError(f"line {number} is {row}; expected: layer,expert")
            rows.setdefault(int(row[0]), []).append(int(row[1]))
    counts = {layer: len(experts) for layer, experts in rows.items()}
    if not counts or len(set(counts.values())) > 1 or next(iter(counts.values())) % top_k:
        raise ValueError(f"layers have {counts} rows; expected: a multiple of {top_k}, for each layer the same")
    layers: list[Any] = [np.array(rows[layer]).reshape(-1, top_k) for layer in sorted(rows)]
    return np.stack(layers, axis=1), None
