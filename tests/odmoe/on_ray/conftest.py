"""Ray reads how it authenticates when it is imported, as test files of this folder do: that is settled here."""

from __future__ import annotations

from odmoe.clusters.process import prepare_ray

prepare_ray("local")
