"""Whether an answer is exact: its tokens are those of Transformers' `generate` with every expert in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from checkpoint.manifest import Manifest
from checkpoint.quantisation import BITS
from main_node.request import Request

if TYPE_CHECKING:
    from main_node.engine.engine import Engine


def inexact(
    engine: Engine, request: Request, kernel: str, of_model: Iterable[str], doubted: bool, one_kind: bool
) -> list[str]:
    """Every reason why a token may be another one, in words, each once; empty for an exact answer.

    `of_model`: what is not followed of the model's own `generate` (see `OwnPath`), and `changed_weights`. `doubted`,
    `one_kind`: see `Report`.
    """
    found = {
        **dict.fromkeys(engine.core.inexact, True),
        f"--kernel {kernel}": kernel != "exact",
        "--batch-dense": request.rounded,
        "--prefill-chunk": request.chunked,
        "--kv-memory": request.is_cut,
        "devices of different kinds": not one_kind,
        "ignored generation settings": bool(request.chooser.ignored),
        "suspect workers": doubted,
        **dict.fromkeys(of_model, True),
    }
    return [reason for reason, holds in found.items() if holds]


def changed_weights(manifest: Manifest) -> list[str]:
    """Which weights of a store are not those of its checkpoint, because they were quantised for it, in words."""
    found = [f"experts in {manifest.described}"] if manifest.quantised_to else []
    return found + dense_changes(manifest)


def dense_changes(manifest: Manifest) -> list[str]:
    """The same, of the dense part alone."""
    changes = bool(manifest.dense_weights) and manifest.dense_kept in BITS
    return [f"dense {manifest.dense_kept} of {manifest.dtype}"] if changes else []
