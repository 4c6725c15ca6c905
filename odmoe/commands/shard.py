"""`odmoe shard`: make a store, add forms to it, or check one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkpoint.quantisation import BITS, DEFAULT_GROUP, GROUPS, Quantisation
from odmoe.commands.shared.options import Json, LibrariesDebug, ResultOnly, option, switch
from odmoe.settings.declarations import DENSE, DTYPES, EXPERTS
from odmoe.settings.settings import Settings
from odmoe.settings.table import declaration_of
from odmoe.terminal import Output, Terminal
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from checkpoint.manifest import Manifest
    from checkpoint.sharding.shard import Made
    from checkpoint.store import ExpertStore
    from odmoe.stores import Progress

REPLICAS = 2
"""Parts that hold each expert, if nothing is said."""
LABELS = {
    "written_s": "written in seconds",
    "quantised_s": "quantised in seconds",
    "layers_resumed": "layers already there",
    "verified_gb_per_s": "verified, GB/s",
    "moe_layers": "MoE layers",
    "largest_part_of_store": "largest part over the store",
}
"""Facts whose label is not their name in the JSON object."""


def shard(
    model: Annotated[str, typer.Argument(help="Model directory, GGUF file or org/name on the Hub")],
    store: Annotated[str, typer.Argument(help="Directory of the new expert store")],
    dtype: Annotated[
        str | None,
        option(help=f"Data type of the weights: {', '.join(DTYPES)} (default: the checkpoint's)", metavar="TEXT"),
    ] = None,
    experts: Annotated[
        str | None, option(help=f"{declaration_of(Settings, 'experts').about}: {', '.join(EXPERTS)}", metavar="TEXT")
    ] = None,
    group: Annotated[
        int | None,
        option(
            help=f"Weights with a scale of their own, for int4 and int8: {', '.join(map(str, GROUPS))} "
            f"(default: {DEFAULT_GROUP})",
            metavar="N",
        ),
    ] = None,
    dense: Annotated[
        str | None, option(help=f"{declaration_of(Settings, 'dense').about}: {', '.join(DENSE)}", metavar="TEXT")
    ] = None,
    forms: Annotated[
        str | None, option(help="Also store every expert in fewer bits: int4, int2 or int4,int2", metavar="TEXT")
    ] = None,
    parts: Annotated[
        int | None,
        option(
            help="Also write so many folders with a part of the experts each, in STORE-parts, for workers", metavar="N"
        ),
    ] = None,
    replicas: Annotated[
        int | None, option(help=f"Parts that hold each expert (default: {REPLICAS})", metavar="N")
    ] = None,
    verify: Annotated[bool, switch("--verify", help="Read every expert back and compare its checksum")] = False,
    as_json: Json = False,
    quiet: ResultOnly = False,
    debug: LibrariesDebug = False,
) -> None:
    """Split a model into dense weights and an expert store.

    An interrupted run resumes where it stopped.
    """
    for name, value, allowed in (("dtype", dtype, DTYPES), ("experts", experts, EXPERTS), ("dense", dense, DENSE)):
        if value is not None and value not in allowed:
            raise ConfigError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}")
    if group is not None:
        experts = _grouped(experts, group)
    form_names = [name.strip() for name in forms.split(",")] if forms else []
    split = _split_of(parts, replicas)
    run_shard(model, store, Output(as_json, quiet, debug), dtype, form_names, verify, experts, dense, split)


def _grouped(experts: str | None, group: int) -> str:
    """The name of this quantisation. Raises ConfigError."""
    if experts not in BITS:
        raise ConfigError(f"--group is {group}; it is for --experts {' and '.join(BITS)}")
    if group not in GROUPS:
        raise ConfigError(f"--group is {group}; allowed: {', '.join(map(str, GROUPS))}")
    return Quantisation(experts, group).experts


def _split_of(parts: int | None, replicas: int | None) -> tuple[int, int] | None:
    """Both numbers; None if no parts are asked for. Raises ConfigError."""
    if parts is None:
        if replicas is not None:
            raise ConfigError(f"--replicas is {replicas}; it is for --parts")
        return None
    if parts < 1:
        raise ConfigError(f"--parts is {parts}; allowed: 1 or more")
    chosen = min(REPLICAS, parts) if replicas is None else replicas
    if not 1 <= chosen <= parts:
        raise ConfigError(f"--replicas is {chosen}; allowed: 1 to {parts}, the number of parts")
    return parts, chosen


def run_shard(
    model: str,
    store: str,
    output: Output,
    dtype: str | None = None,
    forms: Sequence[str] = (),
    verify: bool = False,
    experts: str | None = None,
    dense: str | None = None,
    split: tuple[int, int] | None = None,
) -> None:
    """Make the store of a model at `store` unless it is there, add `forms` to it, and show what it holds. `split`: also
    write so many parts of it, of which so many hold each expert.

    `verify`: read every byte back from the disk. A store that has changed since it was last read is verified in any
    case. One that this call writes need not be: its checksums are of the bytes that were written. `experts`: as for
    `checkpoint.sharding.shard.make_store`, with a group or without.
    Raises ConfigError, CheckpointError, StoreError.
    """
    from checkpoint.family import parse_dtype
    from checkpoint.hub import find_model
    from checkpoint.sharding.source import open_source
    from checkpoint.store import ExpertStore
    from odmoe.clusters.process import prepare_process
    from odmoe.store_parts import make_parts
    from odmoe.stores import make_or_open
    from odmoe.text import has_vocabulary

    if dtype is not None:
        parse_dtype(dtype)
    prepare_process(output.debug)
    terminal = Terminal(output.quiet, output.debug)
    with terminal.progress("opening the model") as progress:
        with _stopwatch() as writing:
            source, target = open_source(find_model(model)), Path(os.path.expanduser(store))
            if not has_vocabulary(source.path):
                terminal.notify(
                    f"{source.path} has no tokenizer (tokenizer.json, tokenizer.model, ...): odmoe generate will "
                    "refuse its store; add the tokenizer files that the model was published with, and shard it again"
                )
            made = make_or_open(source, target, dtype, progress, experts=experts, dense=dense)
        facts = _finish(made, forms, verify, progress)
        if split:
            facts |= make_parts(ExpertStore.open(made.store.path), *split, progress)
    if made.written:
        facts |= {"layers_resumed": made.resumed, "written_s": round(writing(), 2)}
    if output.json:
        print(json.dumps(facts))
    else:
        there = not made.written and "quantised_s" not in facts
        terminal.facts(
            f"expert store{' (already complete)' * there}",
            {LABELS.get(name, name.replace("_", " ")): facts[name] for name in facts},
        )


def _finish(made: Made, forms: Sequence[str], verify: bool, progress: Progress) -> dict[str, object]:
    """Verify the store and add what it lacks; its facts, by their names in the JSON object."""
    from odmoe.stores import stamps_dir, with_forms

    opened = made.store
    if made.written:
        opened.trust(stamps_dir())
    elif not verify:
        opened.verify_once(stamps_dir(), lambda done, total: progress("verify", done, total))
    had = set(opened.manifest.forms)
    with _stopwatch() as adding:
        opened = with_forms(opened, forms, progress)
    facts = _facts(opened)
    if set(opened.manifest.forms) - had:
        facts["quantised_s"] = round(adding(), 2)
    if verify:
        with _stopwatch() as checking:
            checked = opened.verify(lambda done, total: progress("verify", done, total))
        opened.trust(stamps_dir())
        facts |= {
            "verified_blobs": checked.blobs,
            "verified_dense_files": checked.files,
            "verified_bytes": checked.nbytes,
            "verified_gb_per_s": round(checked.nbytes / checking() / 1e9, 2),
        }
    return facts


def _facts(store: ExpertStore) -> dict[str, object]:
    manifest = store.manifest
    return {
        "store": str(store.path),
        "family": manifest.family,
        "dtype": manifest.dtype,
        **_encoding(manifest),
        **_dense(manifest),
        "moe_layers": len(manifest.layers),
        "experts": manifest.experts,
        "expert_bytes": manifest.blob_bytes,
        "all_expert_bytes": manifest.expert_bytes,
        **{f"expert_bytes_{name}": manifest.form_bytes(name) for name in manifest.forms},
    }


def _encoding(manifest: Manifest) -> dict[str, object]:
    """How a quantised checkpoint's experts are kept; nothing for any other."""
    if manifest.encoding:
        return {"encoding": manifest.described, "restored_expert_bytes": manifest.restored_bytes}
    return {"dequantised_because": manifest.plain_because} if manifest.plain_because else {}


def _dense(manifest: Manifest) -> dict[str, object]:
    """How linear layers of the dense part are kept; nothing where they are plain."""
    if not manifest.dense_weights:
        return {}
    return {"dense": manifest.dense_kept, "encoded_dense_bytes": manifest.dense_bytes}


@contextmanager
def _stopwatch() -> Iterator[Callable[[], float]]:
    """A function that gives the seconds between entry and exit."""
    began, ended = time.monotonic(), 0.0
    yield lambda: ended - began
    ended = time.monotonic()
