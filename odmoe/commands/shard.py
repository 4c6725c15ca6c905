"""`odmoe shard`: make a store, or check one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from odmoe.terminal import Terminal


def run_shard(
    model: str,
    store: str,
    dtype: str | None,
    verify: bool,
    as_json: bool,
    terminal: Terminal,
    forms: Sequence[str] = (),
) -> None:
    """Make the store of a model at `store`, unless it is there, add these `forms` to it, and say what is in it.

    `verify`: read every byte of it back from the disk. A store that was there and has changed since it was last read is
    verified in any case; one that this call writes has had its checksums taken from the very bytes that were written.
    Raises ConfigError, CheckpointError, StoreError.
    """
    from checkpoint.family import parse_dtype
    from checkpoint.sharding.source import find_model, open_source
    from odmoe.clusters.process import prepare_process
    from odmoe.stores import make_or_open, stamps_dir, with_forms

    if dtype is not None:
        parse_dtype(dtype)
    prepare_process(terminal.debug)
    with terminal.progress() as progress:
        start = time.monotonic()
        made = make_or_open(open_source(find_model(model)), Path(os.path.expanduser(store)), dtype, progress)
        took = time.monotonic() - start
        opened, checked = made.store, None
        if made.written:
            opened.trust(stamps_dir())
        elif not verify:
            opened.verify_once(stamps_dir(), lambda done, total: progress("verify", done, total))
        begun, had = time.monotonic(), set(opened.manifest.forms)
        opened = with_forms(opened, forms, progress)
        adding = time.monotonic() - begun
        start = time.monotonic()
        if verify:
            checked = opened.verify(lambda done, total: progress("verify", done, total))
            opened.trust(stamps_dir())
        checking = time.monotonic() - start
    manifest = opened.manifest
    facts: dict[str, object] = {
        "store": str(opened.path), "family": manifest.family, "dtype": manifest.dtype,
        "moe_layers": len(manifest.layers), "experts": manifest.experts,
        "expert_bytes": manifest.blob_bytes, "all_expert_bytes": manifest.expert_bytes,
    }  # fmt: skip
    facts |= {f"expert_bytes_{name}": manifest.form_bytes(name) for name in manifest.forms}
    if set(manifest.forms) - had:
        facts["quantised_s"] = round(adding, 2)
    if made.written:
        facts |= {"layers_resumed": made.resumed, "written_s": round(took, 2)}
    if checked:
        facts |= {
            "verified_blobs": checked.blobs, "verified_dense_files": checked.files, "verified_bytes": checked.nbytes,
            "verified_gb_per_s": round(checked.nbytes / checking / 1e9, 2),
        }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
    else:
        terminal.facts("expert store", facts)
