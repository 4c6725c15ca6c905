"""Hardware whose times are whole seconds, for figures that are worked out by hand."""

from __future__ import annotations

import math

from scheduler.timing.profile import Profile

ONE_LAYER = Profile(
    name="one",
    layers=1,
    experts=3,
    top_k=3,
    hidden_bytes=1,
    kv_bytes=0,
    workers=1,
    group_size=1,
    main_layer_s=4.0,
    expert_s=1.0,
    expert_extra_s=0.0,
    load_s=10.0,
    hop_s=0.0,
    link_bits_per_s=math.inf,
    shadow_layer_s=1.0,
)
"""Every token needs all three experts of the only layer, one after the other. What travels takes no time."""
