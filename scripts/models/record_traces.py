"""Routing traces of the models in models/, which come along: `odmoe simulate --routes many-moe`.

    .venv/bin/python -m scripts.models.record_traces                       # some minutes
    .venv/bin/python -m scripts.models.record_traces --models demo-moe

Each model answers a prompt of each kind of text in scripts/data/prompts, once with each predictor that foresees
something: the next layers' gates, the next layer with its attention, the next token. The cache has room for a quarter
of the experts. Answers are exact, so the routes are the same each time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import odmoe
from scheduler.eventlog.recording import read_recording
from scheduler.simulation.routing_trace import SHIPPED, read_trace, write_trace
from scheduler.simulation.trace_sources import trace_of
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import ROOT

PREDICTORS = ("impact", "next-layer", "token-wise")
KINDS = ("speeches", "plays", "code", "instructions")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["many-moe", "fine-moe", "demo-moe", "deep-moe"])
    parser.add_argument("--tokens", type=positive, default=96, help="of each answer")
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    for name in args.models:
        file = args.folder / f"{name}.npz"
        _record(ROOT / "models" / name, args.tokens, file)
        trace = read_trace(file)
        print(f"{file}: {file.stat().st_size} bytes, {len(trace.experts)} tokens, {', '.join(trace.foresight)}")


def _record(model: Path, tokens: int, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recordings = []
        for predictor in PREDICTORS:
            recording = Path(folder) / predictor
            _answer(model, predictor, tokens, recording)
            recordings.append((predictor, read_recording(recording)))
        trace = trace_of(recordings)
        trace.about["model"] = model.name  # type: ignore[index]
        write_trace(file, trace, half=True)


def _answer(model: Path, predictor: str, tokens: int, recording: Path) -> None:
    how: dict[str, Any] = {"system": "hybrimoe", "placement": "device", "device_memory": "25%"}
    with odmoe.load(str(model), predictor=predictor, record=str(recording), **how) as opened:
        for kind in KINDS:
            opened.generate(_prompt(kind), max_new_tokens=tokens, ignore_eos=True)


def _prompt(kind: str) -> str:
    """The first of this kind."""
    lines = (ROOT / "scripts" / "data" / "prompts" / f"{kind}.txt").read_text("utf-8").splitlines()
    return str(json.loads(lines[0]))


if __name__ == "__main__":
    main()
