"""Bytes of device memory that each role takes, of a model's size."""

from __future__ import annotations

from scheduler.planning.shadow_bytes import SHADOW_BYTES
from scheduler.types import ModelSize

MINI_BATCH = 128
GPU_REST_BYTES, CPU_REST_BYTES = 2, 4
"""Per element of what a shadow does not quantise, KV rows included. On a processor it is in float32."""


def main_bytes(model: ModelSize, kept: int = 0) -> int:
    """The dense part and a KV cache. `kept`: bytes for KV caches of earlier prompts."""
    return model.dense_bytes + model.cache * model.item_bytes + kept


def worker_bytes(model: ModelSize, slots: int) -> int:
    return slots * model.expert_bytes + workspace_bytes(model)


def workspace_bytes(model: ModelSize) -> int:
    """The memory that a worker needs beside its slots, to restore an expert and compute a mini-batch with it."""
    return model.restoring_bytes + MINI_BATCH * (model.expert // model.hidden + model.hidden) * model.item_bytes


def shadow_bytes(model: ModelSize, scheme: str, rest_bytes: int = GPU_REST_BYTES) -> int:
    """`scheme`: of `SHADOW_BYTES`. With a KV cache like the main node's."""
    return quantised_bytes(model, scheme) + (model.dense - model.linear + model.cache) * rest_bytes


def quantised_bytes(model: ModelSize, scheme: str) -> int:
    """Of a shadow's linear layers and experts."""
    item = SHADOW_BYTES[scheme]
    return int(model.linear * item.linear + model.experts_all * item.expert)
