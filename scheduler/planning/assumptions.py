"""What a plan takes for granted."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.planning.scaling import Hardware, Policy
from scheduler.planning.shadow_bytes import RECALLS
from scheduler.timing.profile import Profile


def list_assumptions(profile: Profile, hardware: Hardware, policy: Policy) -> list[str]:
    """The values that were not given, and where they come from."""
    base = hardware.base
    found = [
        f"times of main node, workers and shadow: those of {base.name}, with the part that moves bytes scaled to "
        f"the model"
    ]
    if base.fits:
        loads, shadows = zip((base.load_s, base.shadow_layer_s), *base.fits, strict=True)
        found.append(
            f"fit: {base.name} is one of {1 + len(base.fits)} sets of times that give the measured speed: loads "
            f"of {_range(loads)}, with layers of the shadow of {_range(shadows)}; the shorter the ones, the longer the "
            "others"
        )
    if hardware.device_bytes is None:
        found.append("device memory of a worker: for one expert")
    if hardware.load_bytes_per_s is None and base.model_sizes and base.load_s:
        found.append(f"load bandwidth: {base.model_sizes[0] / base.load_s / 1e9:.1f} GB/s, as in {base.name}")
    if not base.cancellable:
        found.append(f"loads: one that has begun cannot be given up, as in {base.name} (cancellable: false)")
    if hardware.link_bits_per_s is None:
        found.append(f"links: {profile.link_bits_per_s / 1e9:g} Gbit/s, as in {base.name}")
    if policy.recall is None and policy.shadow in RECALLS:
        found.append(
            f"recall: {RECALLS[policy.shadow]:.2%}, as the paper measured for {policy.shadow} with alignment "
            f"every token"
        )
    found.append(
        "routes: each token chooses at random, independently of the others. Tokens of real text are more alike: eight "
        "requests of models/deep-moe need 5.7 of 8 experts in a layer, random ones 7.2. So several requests share more "
        "loads than planned here"
    )
    shadowed = policy.shadow != "none"
    found.append(
        f"devices: {'main node, shadow' if shadowed else 'main node'} and workers compute on devices as fast as those "
        f"of {base.name}, each on its own (--device). This version has not been run on a GPU yet (docs/devices.md). A "
        "node on a processor is slower than planned"
        + ", and a shadow there takes twice the bytes for weights that are not quantised"
        * shadowed
    )
    return found


def _range(seconds: Iterable[float]) -> str:
    found = sorted(seconds)
    return f"{found[0] * 1e3:g} to {found[-1] * 1e3:g} ms"
