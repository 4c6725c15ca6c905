"""A cache of one's own: the expert leaves whose layer comes last from now.

odmoe simulate --policy-file docs/examples/own_cache.py --system own --routes many-moe --slots 128
"""

from scheduler.policies.registry import Choice
from scheduler.policies.residency.base import ResidencyBase
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import Preset


class FarthestLayer(ResidencyBase):
    """Layers take turns, so the expert of the layer that was computed last is needed last."""

    def __init__(self, shape):
        self.turn = {layer: number for number, layer in enumerate(shape.layers)}

    def keeps(self, worker, expert, predicted):
        return True

    def victim(self, worker, incoming, evictable):
        now = self.turn[incoming.layer]
        return max(evictable, key=lambda expert: (self.turn[expert.layer] - now) % len(self.turn))


POLICIES = {"residency": {"farthest-layer": Choice("The farthest layer leaves", lambda shape, c: FarthestLayer(shape))}}
SYSTEMS = {"own": Preset("On demand, with a cache of one's own", SystemConfig("none", "farthest-layer"))}
