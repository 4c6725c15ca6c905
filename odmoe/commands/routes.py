"""`odmoe routes`: routing traces, files that say which experts each token chose."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odmoe.commands.shared.options import Json, option, switch
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from scheduler.simulation.routing_trace import RoutingTrace


class Action(StrEnum):
    """What to do with the files."""

    INFO = "info"
    EXPORT = "export"
    IMPORT = "import"


def routes(
    action: Annotated[Action, typer.Argument(help="info; export: from recordings; import: from other engines")],
    files: Annotated[list[Path], typer.Argument(help="Traces, recordings, or .npy, .json, .csv files", metavar="FILE")],
    output: Annotated[Path | None, option("--output", "-o", help="Trace to write", metavar="FILE")] = None,
    half: Annotated[bool, switch("--half", help="Write scores in float16")] = False,
    top_k: Annotated[int | None, option(help="Experts of a token, for .csv", metavar="N", min=1)] = None,
    experts: Annotated[int | None, option(help="Experts of a layer", metavar="N", min=1)] = None,
    prompt_tokens: Annotated[int, option(help="Tokens of a prompt (default: 1)", metavar="N", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Export, import and describe routing traces.

    odmoe simulate --routes TRACE simulates any system with them. Traces of many-moe, fine-moe, demo-moe and deep-moe
    are here by these names. docs/running.md describes the file.
    """
    from scheduler.eventlog.recording import read_recording
    from scheduler.simulation.routing_trace import find_trace, read_trace, write_trace
    from scheduler.simulation.trace_sources import imported, trace_of

    if action is Action.INFO:
        found = {str(file): read_trace(find_trace(str(file)) or file) for file in files}
        facts = {name: _facts(trace) for name, trace in found.items()}
        print(json.dumps(facts) if as_json else "\n".join(_text(name, one) for name, one in facts.items()))
        return
    if output is None:
        raise ConfigError(f"odmoe routes {action.value} writes a trace; say where with --output FILE")
    if action is Action.EXPORT:
        trace = trace_of([(str(file), read_recording(file)) for file in files])
    else:
        trace = imported(files, top_k, experts, prompt_tokens)
    write_trace(output, trace, half)
    facts = _facts(trace)
    print(json.dumps(facts) if as_json else _text(str(output), facts))


def _facts(trace: RoutingTrace) -> dict[str, Any]:
    spans = list(trace.spans())
    return {
        **trace.about,
        "requests": len(spans),
        "prompt_tokens": [answer - first for first, answer, _ in spans],
        "decode_tokens": [end - answer for _, answer, end in spans],
        "layers": trace.layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "scores": trace.scores is not None,
        "foresight": sorted(trace.foresight),
    }


def _text(name: str, facts: dict[str, Any]) -> str:
    tokens = f"{sum(facts['prompt_tokens'])} tokens of prompts, {sum(facts['decode_tokens'])} decoded"
    lines = {
        "model": facts.get("model") or "not named",
        "source": facts.get("source") or "not named",
        "requests": f"{facts['requests']}: {tokens}",
        "routes": f"{facts['layers']} MoE layers, top-{facts['top_k']} of {facts['experts']} experts",
        "scores": "of every expert" if facts["scores"] else "none",
        "foresight": ", ".join(facts["foresight"]) or "none",
    }
    return "\n".join([name, *(f"  {label:<10} {text}" for label, text in lines.items())])
