"""The settings of a cluster and its answers, one declaration each: `Declared` says what follows from it. This module
does not import torch, so a wrong setting is rejected at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from odmoe.settings.bounds import LEAST_PENALTY, MOST_PENALTY, TEMPERATURES, check_temperature
from odmoe.settings.memory_settings import MemorySettings
from odmoe.settings.system_settings import SystemSettings, chosen_by_preset, load_policies
from odmoe.settings.table import Count, Number, again, count, flag, one_of, setting
from odmoe.settings.units import (
    AUDIT,
    DEVICE,
    DEVICES,
    DRAFTS,
    Audit,
    Device,
    Devices,
    Drafts,
)
from scheduler.alignment import ALL_ROWS, NEWEST_ROWS
from scheduler.limits import MAX_CONTEXT, MAX_SHADOW_HOSTS, MAX_THREADS, MAX_WORKERS

MAX_PARALLEL, MAX_QUEUE = 64, 1024
"""Maximum numbers of requests that a main node answers at once, and that wait for it: each needs a thread."""

CLUSTERS = ("embedded", "local", "auto")
SHADOWS = ("fp16", "int8", "nf4", "int8-nf4", "int8-int2", "none")
LOADERS = ("disk", "memory", "cuda")
LOAD_CHECKS = ("auto", "all", "none")
DTYPES = ("float32", "bfloat16", "float16")
EXPERTS = ("native", "dequantised", "int4", "int8", "mxfp4")
DENSE = ("plain", "int8", "int4", "published")
KERNELS = ("exact", "fast")
ROLES = ("main", "shadow", "worker")
KV_MEMORY = 512 << 20
"""Bytes of `kv_memory` where earlier prompts are kept and it is not given."""
CUDA = "cuda"
"""The loader onto a GPU, and torch's name of the GPU's type."""


def _period(default: int | None, about: str) -> Any:
    """A number of tokens between two alignments."""
    return setting(default, "0 (never), 1, 2, ...", about, heading="Prediction", ge=0, fixed="running", verify=True)


class Declarations(MemorySettings):
    """The fields of `odmoe.settings.settings.Settings`, which checks them together. The preset chooses those that are
    not given. Raises ConfigError."""

    may_be_automatic: ClassVar[bool] = True
    system: str = again(SystemSettings, "system", about="Preset of policies (default: auto)")

    model: str = setting(
        "",
        "text",
        "Model directory, GGUF file or org/name",
        "-m",
        heading="Model",
        common=True,
        here_only=True,
        keyword=False,
    )
    store: str | None = setting(
        None,
        "a path",
        "Expert store (default: found in the cache, or made there)",
        heading="Model",
        here_only=True,
        verify=True,
    )
    dtype: str | None = one_of(
        None,
        DTYPES,
        "Data type of the weights (default: as stored)",
        heading="Model",
        fixed="running",
        from_cluster=True,
        verify=True,
    )
    experts: str | None = one_of(
        None,
        EXPERTS,
        "How a new store keeps experts: as published (native), dequantised, or quantised here (default: native)",
        heading="Model",
        fixed="running",
        from_cluster=True,
        verify=True,
    )
    dense: str | None = one_of(
        None,
        DENSE,
        "How a new store keeps the linear layers of the dense part (default: plain, in the model's data type)",
        heading="Model",
        fixed="running",
        from_cluster=True,
        verify=True,
    )

    cluster: str = setting(
        "embedded",
        f"{', '.join(CLUSTERS)}, a Ray head's host:port or a cluster file (.yaml)",
        "Where the nodes run (default: embedded)",
        heading="Cluster",
        common=True,
        here_only=True,
        keyword=False,
        verify=True,
    )
    workers: Count = count(
        8,
        "Worker nodes (default: 8, or the system's)",
        heading="Cluster",
        common=True,
        most=MAX_WORKERS,
        fixed="running",
        from_cluster=True,
        verify=True,
    )
    group_size: Count | None = count(
        None,
        "Workers that serve a layer together (default: the model's top-k)",
        heading="Cluster",
        most=MAX_WORKERS,
        fixed="running",
        from_cluster=True,
        verify=True,
    )
    threads: Count | None = count(
        None,
        "Threads of each node (default: 1 for small experts, else all cores; half with a shadow or --cluster local)",
        heading="Cluster",
        most=MAX_THREADS,
        fixed="running",
        verify=True,
    )
    parallel: Count = setting(
        8,
        f"1, 2, ... {MAX_PARALLEL}",
        "Requests that a cluster answers at once, and prompts of --prompts that are sent at once",
        heading="Cluster",
        ge=1,
        le=MAX_PARALLEL,
        fixed="up",
    )
    queue: Count = setting(
        64,
        f"0, 1, ... {MAX_QUEUE}",
        "Requests that may wait for one of the --parallel places; one more fails",
        heading="Cluster",
        ge=0,
        le=MAX_QUEUE,
        fixed="running",
    )
    prefill_chunk: Count = count(
        256,
        "Tokens of prompts read in one step while other requests are answered; 0: all",
        heading="Cluster",
        least=0,
        fixed="running",
    )
    audit: Audit = setting(
        "auto",
        AUDIT,
        "Share of the computations that are done twice and compared (default: auto, 0.01 if workers are idle)",
        heading="Cluster",
        metavar="SHARE",
        fixed="running",
    )
    retry: Count = count(
        0,
        "Times to send a request again when the main node of a lasting cluster is lost (default: 0)",
        heading="Cluster",
        least=0,
        most=1000,
        lasting_only=True,
    )
    launch_timeout: Number = setting(
        600.0, "a number from 1 to 1000000", "Seconds to wait for a node to be ready", heading="Cluster", ge=1, le=1e6
    )
    worker_wait: Number = setting(
        60.0,
        "a number from 0 to 86400",
        "Seconds that open requests wait for lost workers to come back; 0: they fail at once",
        heading="Cluster",
        ge=0,
        le=86400,
        fixed="running",
    )
    host: str = setting(
        "127.0.0.1",
        "an address of this machine",
        "Address that nodes of a local cluster listen on",
        heading="Cluster",
        here_only=True,
    )
    node_port: Count = setting(
        0,
        "0 (any that is free), 1, ... 65535",
        "Port that workers and shadow of a Ray cluster listen on; 0: any",
        heading="Cluster",
        ge=0,
        le=65535,
        here_only=True,
    )
    tls: str | None = setting(
        None,
        "a directory",
        "Directory of ca.pem, node.pem, node.key and secret; needed beyond loopback (odmoe certs)",
        heading="Cluster",
        here_only=True,
    )
    secret: str | None = setting(
        None,
        "a text that only you know",
        "Shared secret of nodes beyond loopback",
        heading="Cluster",
        min_length=1,
        repr=False,
        here_only=True,
        secret=True,
    )

    shadow: str = one_of(
        "int8",
        SHADOWS,
        "Precision of the shadow",
        heading="Prediction",
        fixed="running",
        verify=True,
    )
    align_token: Count = _period(1, "Align the shadow's token every N tokens; 0: never")
    align_kv: Count = _period(1, "Align the shadow's KV cache every N tokens; 0: never")
    align_kv_rows: str = one_of(
        ALL_ROWS,
        (ALL_ROWS, NEWEST_ROWS),
        "KV rows of an alignment: all since the last one, or the newest token's",
        heading="Prediction",
        fixed="running",
        verify=True,
    )
    align_states: Count | None = _period(
        None, "Align states of recurrent layers every N tokens; 0: never (default: at most 1 MiB a token over a link)"
    )
    draft: Drafts = setting(
        0,
        DRAFTS,
        "Tokens that are drafted and then verified together; the answer stays the same (default: 0)",
        heading="Prediction",
        metavar="auto|N",
        fixed="running",
    )
    draft_from: str = one_of(
        "shadow",
        ("shadow", "prompt", "mtp", "none"),
        "What drafts; mtp: the model's own MTP head",
        heading="Prediction",
        fixed="running",
    )
    token_predictor: str | None = setting(
        None,
        "a file",
        "Weights of the token-wise predictor (default: those beside the model)",
        heading="Prediction",
        fixed="running",
        verify=True,
    )
    predictor_learning_rate: Number = setting(
        0.0,
        "a number from 0 (none) to 10",
        "How far the token-wise predictor learns from each decoded token (default: 0, it does not)",
        heading="Prediction",
        ge=0,
        le=10,
        fixed="running",
        verify=True,
    )

    loader: str = one_of(
        "disk", LOADERS, "Where experts are loaded from", heading="Memory", fixed="running", verify=True
    )
    device: Device = setting(
        "auto",
        DEVICE,
        "Device of every node (default: auto, the processor, or with --loader cuda the GPU where it fits)",
        heading="Cluster",
        metavar="DEVICE",
        fixed="running",
        verify=True,
    )
    main_device: Device | None = setting(
        None,
        DEVICE,
        "Device of the main node (default: --device)",
        heading="Cluster",
        metavar="DEVICE",
        fixed="running",
        verify=True,
    )
    shadow_device: Devices | None = setting(
        None,
        DEVICES,
        "Device of the shadow, or several that share its layers: cuda:0,cuda:1 (default: --device)",
        heading="Cluster",
        metavar="DEVICES",
        fixed="running",
        verify=True,
    )
    shadow_hosts: Count = count(
        1,
        "Processes that share the shadow's layers, each on a host of its own (default: 1, or the cluster file's)",
        heading="Cluster",
        most=MAX_SHADOW_HOSTS,
        fixed="running",
        from_cluster=True,
        verify=True,
    )
    worker_device: Device | None = setting(
        None,
        DEVICE,
        "Device of the workers (default: --device; auto: a GPU with --loader cuda, else cpu)",
        heading="Cluster",
        metavar="DEVICE",
        fixed="running",
        verify=True,
    )
    check_loads: str = one_of(
        "auto",
        LOAD_CHECKS,
        "Loads that are compared with the store's checksums (auto takes up to 2 % of their time)",
        heading="Memory",
        fixed="running",
    )

    max_new_tokens: Count = count(128, "Maximum number of tokens", "-n", heading="Sampling", common=True, serve=False)
    temperature: Annotated[Number, AfterValidator(check_temperature)] | None = setting(
        None, TEMPERATURES, "Temperature (default: 0, greedy)", "--temp", heading="Sampling", common=True
    )
    ctx_size: Count | None = count(
        None,
        "Maximum number of tokens, prompt and answer together",
        "-c",
        heading="Sampling",
        least=2,
        most=MAX_CONTEXT,
        fixed="running",
    )
    sample: bool = setting(False, "true, false", "Sample with the model's own generation settings", heading="Sampling")
    top_k: Count | None = count(None, "Sample among the k likeliest tokens; 0: all", heading="Sampling", least=0)
    top_p: Number | None = setting(
        None,
        "a number above 0, at most 1",
        "Sample among the likeliest tokens up to this total probability",
        heading="Sampling",
        gt=0,
        le=1,
    )
    repetition_penalty: Number | None = setting(
        None,
        f"a number from {LEAST_PENALTY:g} to {MOST_PENALTY:g}",
        "Divisor of the scores of tokens that occurred before; 1: off",
        heading="Sampling",
        ge=LEAST_PENALTY,
        le=MOST_PENALTY,
    )
    seed: Count | None = setting(
        None, "0, 1, ... 2^63 - 1", "Random seed of the sampling", heading="Sampling", ge=0, lt=1 << 63, serve=False
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (), "text of at least one character", "Stop before this text; repeatable", heading="Sampling", serve=False
    )
    ignore_eos: bool = setting(
        False, "true, false", "Continue past the end-of-sequence token", heading="Sampling", serve=False
    )
    chat: bool = setting(
        False,
        "true, false",
        "Apply the model's chat template to the prompt",
        heading="Sampling",
        serve=False,
        keyword=False,
    )
    system_prompt: str | None = setting(
        None, "text", "System message of the chat; needs --chat", heading="Sampling", serve=False, keyword=False
    )

    trace: str | None = setting(
        None,
        "a file",
        "Write a trace of every node, for ui.perfetto.dev",
        heading="Output",
        serve=False,
        output_file=True,
    )
    record: str | None = setting(
        None,
        "a file",
        "Write the scheduler's events and commands, for odmoe simulate",
        heading="Output",
        serve=False,
        output_file=True,
    )

    predictions: str = one_of(
        "auto",
        ("auto", "always"),
        "Have the main model predict where that saves time (auto), or always, as the papers and recordings do",
        heading="Experiments",
        fixed="running",
    )
    smaller_forms: str = one_of(
        "auto",
        ("auto", "always"),
        "Load int4 and int2 where that saves time (auto), or as the precision's paper does",
        heading="Experiments",
        fixed="running",
    )
    mini_batch: Count | None = count(
        None,
        "Rows of one expert that prefill sends and computes at once (default: embedded all, else 16, or more to make "
        "at most 8 parts)",
        heading="Experiments",
        fixed="running",
        verify=True,
    )
    kernel: str = one_of(
        "exact",
        KERNELS,
        "Products on a CPU; fast leaves integers, FP8 and MXFP4 encoded, and may change the last bit",
        heading="Experiments",
        fixed="running",
    )
    batch_dense: bool = setting(
        False,
        "true, false",
        "Multiply rows of several requests together outside of experts too; may change the last bit",
        heading="Experiments",
        fixed="running",
    )
    profile: str | None = setting(
        None, "a name or a file", "Emulate the times of a hardware profile", heading="Experiments", fixed="running"
    )

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        load_policies(values, named or flag)
        chosen = chosen_by_preset(values)
        super().__init__(named, **(chosen | values))
        self.__pydantic_fields_set__.difference_update(chosen)
