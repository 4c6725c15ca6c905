"""The settings of a cluster and its answers. This module does not import torch, so a wrong setting is rejected at
once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from odmoe.settings.bounds import LEAST_PENALTY, MOST_PENALTY, TEMPERATURES, check_slots, check_temperature
from odmoe.settings.system_settings import SystemSettings, chosen_by_preset
from odmoe.settings.table import Count, Number, count, declared, flag, one_of, setting
from odmoe.settings.units import (
    AUDIT,
    DEVICE,
    DRAFTS,
    MEMORY,
    SLOTS,
    TOTAL,
    Audit,
    Device,
    Drafts,
    Memory,
    Slots,
    is_address,
)
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.limits import MAX_CONTEXT, MAX_THREADS, MAX_WORKERS, MAX_WORKERS_HERE
from scheduler.policies.registry import inexact, needs_host, reads_scores

MAX_PARALLEL, MAX_QUEUE = 64, 1024
"""Maximum numbers of requests that a main node answers at once, and that wait for it: each needs a thread."""

CLUSTERS = ("embedded", "local", "auto")
SHADOWS = ("fp16", "int8", "nf4", "none")
LOADERS = ("disk", "memory", "cuda")
LOAD_CHECKS = ("auto", "all", "none")
DTYPES = ("float32", "bfloat16", "float16")
EXPERTS = ("native", "dequantised")
KERNELS = ("exact", "fast")
ROLES = ("main", "shadow", "worker")
CUDA = "cuda"
"""The loader onto a GPU, and torch's name of the GPU's type."""


class Settings(SystemSettings):
    """One cluster and how it answers. Raises ConfigError naming the setting, its value and what is allowed."""

    model: str = setting("", "text", "Model directory, GGUF file or org/name", "-m", heading="Model", common=True)
    store: str | None = setting(
        None, "a path", "Expert store (default: found in the cache, or made there)", heading="Model"
    )
    dtype: str | None = one_of(None, DTYPES, "Data type of the weights (default: as stored)", heading="Model")
    experts: str | None = one_of(
        None,
        EXPERTS,
        "How a new store keeps the experts of a quantised model (default: native, as published)",
        heading="Model",
    )

    cluster: str = setting(
        "embedded",
        f"{', '.join(CLUSTERS)}, a Ray head's host:port or a cluster file (.yaml)",
        "Where the nodes run (default: embedded)",
        heading="Cluster",
        common=True,
    )
    workers: Count = count(
        8, "Worker nodes (default: 8, or the system's)", heading="Cluster", common=True, most=MAX_WORKERS
    )
    group_size: Count | None = count(
        None, "Workers that serve a layer together (default: the model's top-k)", heading="Cluster", most=MAX_WORKERS
    )
    threads: Count | None = count(
        None,
        "Threads of each node (default: all cores; half of them with a shadow or --cluster local)",
        heading="Cluster",
        most=MAX_THREADS,
    )
    parallel: Count = setting(
        8,
        f"1, 2, ... {MAX_PARALLEL}",
        "Requests that a cluster answers at once, and prompts of --prompts that are sent at once",
        heading="Cluster",
        ge=1,
        le=MAX_PARALLEL,
    )
    queue: Count = setting(
        64,
        f"0, 1, ... {MAX_QUEUE}",
        "Requests that may wait for one of the --parallel places; one more fails",
        heading="Cluster",
        ge=0,
        le=MAX_QUEUE,
    )
    prefill_chunk: Count = count(
        256,
        "Tokens of prompts read in one step while other requests are answered; 0: all",
        heading="Cluster",
        least=0,
    )
    audit: Audit = setting(
        "auto",
        AUDIT,
        "Share of the computations that are done twice and compared (default: auto, 0.01 if workers are idle)",
        heading="Cluster",
        metavar="SHARE",
    )
    retry: Count = count(
        0,
        "Times to send a request again when the main node of a lasting cluster is lost (default: 0)",
        heading="Cluster",
        least=0,
        most=1000,
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
    )
    host: str = setting(
        "127.0.0.1",
        "an address of this machine",
        "Address that nodes of a local cluster listen on",
        heading="Cluster",
    )
    node_port: Count = setting(
        0,
        "0 (any that is free), 1, ... 65535",
        "Port that workers and shadow of a Ray cluster listen on; 0: any",
        heading="Cluster",
        ge=0,
        le=65535,
    )
    tls: str | None = setting(
        None,
        "a directory",
        "Directory of ca.pem, node.pem, node.key and secret; needed beyond loopback (odmoe certs)",
        heading="Cluster",
    )
    secret: str | None = setting(
        None,
        "a text that only you know",
        "Shared secret of nodes beyond loopback",
        heading="Cluster",
        min_length=1,
        repr=False,
    )

    shadow: str = one_of("int8", SHADOWS, "Precision of the shadow model", heading="Prediction")
    align_token: Count = setting(
        1, "0 (never), 1, 2, ...", "Align the shadow's token every N tokens; 0: never", heading="Prediction", ge=0
    )
    align_kv: Count = setting(
        1, "0 (never), 1, 2, ...", "Align the shadow's KV cache every N tokens; 0: never", heading="Prediction", ge=0
    )
    draft: Drafts = setting(
        0,
        DRAFTS,
        "Tokens that are drafted and then verified together; the answer stays the same (default: 0)",
        heading="Prediction",
        metavar="auto|N",
    )
    draft_from: str = one_of(
        "shadow", ("shadow", "prompt", "none"), "Where drafts come from; none: nowhere", heading="Prediction"
    )
    token_predictor: str | None = setting(
        None,
        "a file",
        "Weights of the token-wise predictor (default: those beside the model)",
        heading="Prediction",
    )
    predictor_learning_rate: Number = setting(
        0.0,
        "a number from 0 (none) to 10",
        "How far the token-wise predictor learns from each decoded token (default: 0, it does not)",
        heading="Prediction",
        ge=0,
        le=10,
    )

    device_memory: Memory | None = setting(
        None, MEMORY, "Expert memory of all workers: 25%, 2GB", heading="Memory", common=True, metavar="SIZE"
    )
    memory: Memory | None = setting(
        None,
        TOTAL,
        "Memory of all nodes: 60%, 2GB; slots get what is left",
        heading="Memory",
        metavar="SIZE",
    )
    slots: Slots = setting(
        1,
        SLOTS,
        "Experts that a worker has room for; auto: 2 with --residency none and enough free memory, else 1",
        heading="Memory",
        metavar="N",
    )
    loader: str = one_of("disk", LOADERS, "Where experts are loaded from", heading="Memory")
    device: Device = setting(
        "auto",
        DEVICE,
        "Device of every node (default: auto, the processor, or with --loader cuda the GPU where it fits)",
        heading="Cluster",
        metavar="DEVICE",
    )
    main_device: Device | None = setting(
        None, DEVICE, "Device of the main node (default: --device)", heading="Cluster", metavar="DEVICE"
    )
    shadow_device: Device | None = setting(
        None, DEVICE, "Device of the shadow (default: --device)", heading="Cluster", metavar="DEVICE"
    )
    worker_device: Device | None = setting(
        None,
        DEVICE,
        "Device of the workers (default: --device; auto: a GPU with --loader cuda, else cpu)",
        heading="Cluster",
        metavar="DEVICE",
    )
    check_loads: str = one_of(
        "auto",
        LOAD_CHECKS,
        "Loads that are compared with the store's checksums (auto takes up to 2 % of their time)",
        heading="Memory",
    )

    max_new_tokens: Count = count(128, "Maximum number of tokens", "-n", heading="Sampling", common=True)
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
        None,
        "0, 1, ... 2^63 - 1",
        "Random seed of the sampling",
        heading="Sampling",
        ge=0,
        lt=1 << 63,
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = setting(
        (), "text of at least one character", "Stop before this text; repeatable", heading="Sampling"
    )
    ignore_eos: bool = setting(False, "true, false", "Continue past the end-of-sequence token", heading="Sampling")
    chat: bool = setting(False, "true, false", "Apply the model's chat template to the prompt", heading="Sampling")
    system_prompt: str | None = setting(None, "text", "System message of the chat; needs --chat", heading="Sampling")

    trace: str | None = setting(None, "a file", "Write a trace of every node, for ui.perfetto.dev", heading="Output")
    record: str | None = setting(
        None, "a file", "Write the scheduler's events and commands, for odmoe simulate", heading="Output"
    )

    smaller_forms: str = one_of(
        "auto",
        ("auto", "always"),
        "Load int4 and int2 where that saves time (auto), or as the precision's paper does",
        heading="Experiments",
    )
    mini_batch: Count | None = count(
        None,
        "Rows of one expert that prefill sends and computes at once (default: embedded all, else 16, or more to make "
        "at most 8 parts)",
        heading="Experiments",
    )
    kernel: str = one_of(
        "exact", KERNELS, "Products of bfloat16 on a CPU; fast may change the last bit", heading="Experiments"
    )
    batch_dense: bool = setting(
        False,
        "true, false",
        "Multiply rows of several requests together outside of experts too; may change the last bit",
        heading="Experiments",
    )
    profile: str | None = setting(
        None, "a name or a file", "Emulate the times of a hardware profile", heading="Experiments"
    )

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        named = named or flag
        chosen = chosen_by_preset(values)
        super().__init__(named, **(chosen | values))
        self.__pydantic_fields_set__.difference_update(chosen)
        self._check_together(named)

    def _check_together(self, named: Callable[[str], str]) -> None:
        if self.group_size is not None and self.workers_given and self.group_size > self.workers:
            raise ConfigError(
                f"{named('group_size')} is {self.group_size}; allowed: 1 to {named('workers')} ({self.workers})"
            )
        if self.cluster not in CLUSTERS and not self.cluster_file and not is_address(self.cluster):
            allowed = declared(Settings, "cluster").allowed
            raise ConfigError(f"{named('cluster')} is {self.cluster!r}; allowed: {allowed}")
        most = MAX_WORKERS_HERE.get(self.cluster, MAX_WORKERS)
        if self.workers > most:
            raise ConfigError(
                f"{named('workers')} is {self.workers} with {named('cluster')} {self.cluster}, where all share one "
                f"machine; allowed: 1 to {most}"
            )
        if self.slots_given:
            check_slots(self.workers, int(self.slots), named)
        asked = "placement" if self.given("placement") else "system"
        hosting = self.system_config.placement != "device" if asked == "placement" else needs_host(self.system_config)
        if self.cluster != "embedded" and hosting:
            raise ConfigError(
                f"{named(asked)} is {getattr(self, asked)!r} with {named('cluster')} {self.cluster}; only an "
                "embedded cluster can compute experts on the host"
            )
        if self.device_memory is not None and self.slots_given:
            raise ConfigError(f"{named('device_memory')} is given with {named('slots')}; give one of them")
        if self.device_memory is not None and not self.workers_given:
            raise ConfigError(
                f"{named('device_memory')} is given without {named('workers')}; all workers share it, and "
                f"the number of workers of {named('cluster')} {self.cluster} is not known here"
            )
        self._check_memory(named)
        self._check_loader(named)
        self._check_drafts(named)
        if self.system_prompt is not None and not self.chat:
            raise ConfigError(
                f"{named('system_prompt')} is given without {named('chat')}; a system message is part of a chat"
            )

    def _check_memory(self, named: Callable[[str], str]) -> None:
        if self.memory is None:
            return
        if self.device_memory is not None or self.slots_given:
            other = named("device_memory" if self.device_memory is not None else "slots")
            raise ConfigError(f"{named('memory')} is given with {other}, which decides on the slots; give one of them")
        if self.joined:
            raise ConfigError(
                f"{named('memory')} is for nodes that are all on this machine, and {named('cluster')} is "
                f"{self.cluster}; give {named('device_memory')} or {named('slots')}"
            )

    def _check_loader(self, named: Callable[[str], str]) -> None:
        """The loader moves experts to the device on which workers compute them."""
        device, source = self.device_of("worker"), named("worker_device" if self.worker_device else "device")
        if device == "cpu" and self.loader == CUDA:
            raise ConfigError(
                f"{source} is cpu with {named('loader')} cuda, which loads onto a GPU; give one of them alone"
            )
        if self.worker_device and device.partition(":")[0] not in ("auto", "cpu", CUDA):
            raise ConfigError(f"{source} is {device!r}; allowed: auto, cpu, cuda, cuda:1, where workers can compute")
        if self.loader_used == CUDA and self.loader != CUDA and self.given("loader"):
            raise ConfigError(
                f"{source} is {device} with {named('loader')} {self.loader}, which loads into ordinary memory; "
                f"give {named('loader')} cuda, or {named('worker_device')} cpu"
            )

    def _check_drafts(self, named: Callable[[str], str]) -> None:
        if not self.drafts:
            if self.given("draft_from") and self.draft == 0:
                raise ConfigError(
                    f"{named('draft_from')} is {self.draft_from!r} without {named('draft')}; give "
                    f"{named('draft')} auto or a number, too"
                )
            return
        if reads_scores(self.system_config):
            raise ConfigError(
                f"{named('draft')} is {self.draft} with policies that read the scores of gates, which a block of "
                f"drafts does not give them; give a system such as od-moe, or {named('draft')} 0"
            )
        if self.draft_from == "shadow" and not self.shadowed:
            raise ConfigError(
                f"{named('draft')} is {self.draft}, and there is no shadow to draft; give {named('draft_from')} "
                f"prompt, or {named('draft')} 0"
            )
        if self.draft_from == "prompt" and self.shadowed:
            raise ConfigError(
                f"{named('draft_from')} is 'prompt' with a shadow, which predicts for its own tokens only; give "
                f"{named('shadow')} none, or {named('draft_from')} shadow"
            )
        if self.draft_from == "shadow" and self.align_token != 1:
            raise ConfigError(
                f"{named('draft')} is {self.draft} with {named('align_token')} {self.align_token}; drafts of the "
                f"shadow need its token aligned after each block: give {named('align_token')} 1"
            )

    def device_of(self, role: str) -> str:
        """The device of `main`, `shadow` or `worker`, by name: its own setting, else that of all roles."""
        own: str | None = getattr(self, f"{role}_device")
        return own or self.device

    @property
    def loader_used(self) -> str:
        """The setting `loader`, but `cuda` where the workers' device is a GPU. On an accelerator of another kind there
        is none, and workers compute on the processor."""
        return CUDA if self.device_of("worker").partition(":")[0] == CUDA else self.loader

    @property
    def threads_a_node(self) -> int:
        """The setting, or every core of a node's machine. Half of its cores where two nodes compute at the same time: a
        shadow beside the main node, or the workers of a local cluster. Threads that wait for a busy core cost more than
        they gain."""
        cores = available_cores()
        shared = self.cluster == "local" or (self.cluster == "embedded" and self.shadowed)
        return self.threads or (max(1, cores // 2) if shared else cores)

    @property
    def joined(self) -> bool:
        """Whether the nodes belong to a Ray cluster that runs before and after this command."""
        return self.cluster not in ("embedded", "local")

    @property
    def cluster_file(self) -> bool:
        """Whether `cluster` is a cluster file. Commands then reach the main host over ssh."""
        return self.cluster.endswith((".yaml", ".yml"))

    @property
    def workers_given(self) -> bool:
        """Whether the number of workers is known here. On a Ray cluster it is known only if the setting is given."""
        return self.given("workers") or not self.joined

    @property
    def slots_given(self) -> bool:
        """Whether the number of slots was given."""
        return self.given("slots") and self.slots != "auto"

    @property
    def shadowed(self) -> bool:
        """Whether the system uses a shadow."""
        return self.system_config.predictor == "sep" and self.shadow != "none"

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.draft != 0 and self.draft_from != "none"

    @property
    def inexact(self) -> dict[str, str]:
        """The settings that change answers, by name."""
        return inexact(self.system_config) | ({} if self.kernel == "exact" else {"kernel": self.kernel})

    @property
    def launch_s(self) -> float:
        return self.launch_timeout

    @property
    def alignment(self) -> Alignment:
        return Alignment(self.align_token, self.align_kv)

    def but(self, **changes: Any) -> Settings:
        """A copy of these settings with `changes`, checked again. Settings that were not given stay not given."""
        return Settings(**(self.model_dump(exclude_unset=True) | changes))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
