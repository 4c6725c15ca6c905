"""The tables of settings as keywords of Python's functions, for type checkers: the tables check the values.

Made by scripts/generate_keywords.py. Not edited by hand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

File = str | os.PathLike[str]
Size = int | str
"""Bytes, or a text such as `512MiB`; of `device_memory` and `memory` also a share such as `25%`."""
Rate = float | str
"""As a number, or a text such as `25GB/s` or `1Gbit`."""


class PolicyKeywords(TypedDict, total=False):
    """The preset of a system, and its policies."""

    predictor: str
    residency: str
    router: str
    placement: str
    precision: str
    prefill: str
    departure: str
    host_residency: str
    alpha: float | None
    prefetch: int | None
    system: str
    policy_file: File | None


class LoadKeywords(PolicyKeywords, total=False):
    """Of `odmoe.load`."""

    device_memory: Size | None
    memory: Size | None
    host_memory: str
    slots: int | Literal["auto"]
    kv_memory: Size
    kv_disk: File | None
    kv_disk_size: Size
    store: File | None
    dtype: str | None
    experts: str | None
    dense: str | None
    workers: int
    group_size: int | None
    threads: int | None
    parallel: int
    queue: int
    prefill_chunk: int
    audit: float | Literal["auto"]
    retry: int
    launch_timeout: float
    worker_wait: float
    host: str
    node_port: int
    tls: File | None
    secret: str | None
    shadow: str
    align_token: int
    align_kv: int
    align_kv_rows: str
    align_states: int | None
    draft: int | Literal["auto"]
    draft_from: str
    token_predictor: File | None
    predictor_learning_rate: float
    loader: str
    device: str
    main_device: str | None
    shadow_device: str | None
    shadow_hosts: int
    worker_device: str | None
    check_loads: str
    max_new_tokens: int
    temperature: float | None
    ctx_size: int | None
    sample: bool
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    trace: File | None
    record: File | None
    predictions: str
    smaller_forms: str
    mini_batch: int | None
    kernel: str
    batch_dense: bool
    profile: File | None


class PlanKeywords(TypedDict, total=False):
    """Of `odmoe.plan`."""

    dtype: str | None
    experts: str | None
    dense: str | None
    context: int | None
    workers: int | None
    load_bandwidth: Rate | None
    link: Rate | None
    profile: File
    group_size: int | None
    shadow: str
    recall: float | None
    worker_memory: Size | None
    shadow_memory: str | None
    slots: int | None
    kv_memory: Size
    prefill: str


class SimulateKeywords(PolicyKeywords, total=False):
    """Of `odmoe.simulate`."""

    tokens: int
    prompt_tokens: int
    requests: int
    interval: float
    parallel: int | None
    prefill_chunk: int
    batch_dense: bool
    routes: File | None
    route_model: str | None
    seed: int
    layers: int | None
    experts: int | None
    top_k: int | None
    profile: File
    workers: int | None
    group_size: int | None
    speeds: str
    replicas: int | None
    recall: float | None
    draft: int | Literal["auto"]
    acceptance: float | None
    align_token: int
    align_kv: int
    align_kv_rows: str
    align_states: int | None
    slots: int | Literal["auto"]
    host_memory: str | None
    mini_batch: int | None
    trace: File | None
