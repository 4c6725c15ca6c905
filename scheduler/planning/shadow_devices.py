"""The memory of a shadow whose layers share several devices, of one machine or of several."""

from __future__ import annotations

from itertools import islice

from scheduler.errors import DoesNotFitError
from scheduler.planning.cuts import cut
from scheduler.planning.scaling import Setup, memory, size_text
from scheduler.planning.shadow_bytes import SHADOW_BYTES


def shadow_shares(setup: Setup) -> list[int]:
    """Bytes on each of the shadow's devices; none if their memory is not given. Raises DoesNotFitError if it does
    not fit.

    Layers without experts are assumed to come first, and layers of a kind to be equal.
    """
    model, rooms, shadow = setup.model, setup.hardware.shadow_bytes, setup.policy.shadow
    if not rooms or shadow == "none":
        return []
    held = memory(setup, 1)["shadow"]
    experts = int(model.experts_all * SHADOW_BYTES[shadow].expert)
    embeddings, rest = ((model.dense - model.read) * 2, max(0, model.read - model.linear) * 2)
    each = (held - experts - embeddings - rest) // model.depth  # linear layers and their share of the cache
    without = model.depth - model.layers
    sizes = [each] * without + [each + experts // model.layers] * model.layers
    counts = cut(sizes, rooms, embeddings, rest)
    each_layer = iter(sizes)
    shares = [sum(islice(each_layer, count)) for count in counts]
    shares[0] += embeddings
    shares[-1] += rest
    for share, room in zip(shares, rooms, strict=True):
        if share > room:
            raise DoesNotFitError(
                f"--shadow-memory is {_texts(rooms)}, but the {shadow} shadow of {model.name} takes {size_text(held)}, "
                f"{_texts(shares)} on these devices; give more of them, or another --shadow"
            )
    return shares


def shares_text(setup: Setup) -> str:
    """`23.8 GB and 23.7 GB, which fit into 24.00 GB and 24.00 GB`, and how; empty if their memory is not given."""
    shares = shadow_shares(setup)
    if not shares:
        return ""
    fit = f"{_texts(shares)}, which fit into {_texts(setup.hardware.shadow_bytes)}"
    if len(shares) == 1:
        return fit
    return f"{fit}, devices of one machine (--shadow-device) or of a machine each (--shadow-hosts {len(shares)})"


def _texts(sizes: list[int] | tuple[int, ...]) -> str:
    return " and ".join(size_text(size) for size in sizes)
