"""What every forked process needs: imported once, in the process that they are forked from."""

from __future__ import annotations

from odmoe.clusters.process import prepare_process

prepare_process()

import transformers.models.mixtral.modeling_mixtral  # noqa: E402, F401

import shadow_node.node  # noqa: E402, F401
