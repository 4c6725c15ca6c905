"""The settings of a cluster and its answers: checked together, and the facts that follow from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from odmoe.settings.bounds import check_slots
from odmoe.settings.declarations import CLUSTERS, CUDA, KV_MEMORY, Declarations
from odmoe.settings.system_settings import AUTO
from odmoe.settings.table import declaration_of, flag
from odmoe.settings.units import is_address
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.limits import MAX_WORKERS, MAX_WORKERS_HERE
from scheduler.policies.registry import bounds, caches, inexact, needs_host, reads_scores


class Settings(Declarations):
    """One cluster and how it answers. Raises ConfigError naming the setting, its value and what is allowed."""

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        super().__init__(named, **values)
        self._check_together(named or flag)

    def _check_together(self, named: Callable[[str], str]) -> None:
        for field, name in bounds(self.system_config).items():
            raise ConfigError(
                f"{named(field)} is {name!r}, a bound that knows the routes to come, as only odmoe simulate does; "
                "give another name (odmoe systems)"
            )
        if self.group_size is not None and self.workers_given and self.group_size > self.workers:
            raise ConfigError(
                f"{named('group_size')} is {self.group_size}; allowed: 1 to {named('workers')} ({self.workers})"
            )
        if self.cluster not in CLUSTERS and not self.has_cluster_file and not is_address(self.cluster):
            allowed = declaration_of(Settings, "cluster").allowed
            raise ConfigError(f"{named('cluster')} is {self.cluster!r}; allowed: {allowed}")
        most = MAX_WORKERS_HERE.get(self.cluster, MAX_WORKERS)
        if self.workers > most:
            raise ConfigError(
                f"{named('workers')} is {self.workers} with {named('cluster')} {self.cluster}, where all share one "
                f"machine; allowed: 1 to {most}"
            )
        if self.slots_given:
            check_slots(self.workers, int(self.slots), named)
        asked = "placement" if self.is_given("placement") else "system"
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
        self._check_shadow_hosts(named)
        if self.system_prompt is not None and not self.chat:
            raise ConfigError(
                f"{named('system_prompt')} is given without {named('chat')}; a system message is part of a chat"
            )

    def _check_memory(self, named: Callable[[str], str]) -> None:
        if self.kv_disk is not None and self.is_given("kv_memory") and not self.kv_memory:
            raise ConfigError(
                f"{named('kv_disk')} is {self.kv_disk} with {named('kv_memory')} 0; KV caches on a disk are used "
                f"through memory: give more, or leave {named('kv_disk')} out"
            )
        if self.record is not None and self.kept_bytes:
            raise ConfigError(
                f"{named('record')} is given with {named('kv_memory')}; a recording has prompts that were read as a "
                f"whole: give {named('kv_memory')} 0"
            )
        self._check_host_memory(named)
        if self.memory is None:
            return
        if self.device_memory is not None or self.slots_given:
            other = named("device_memory" if self.device_memory is not None else "slots")
            raise ConfigError(f"{named('memory')} is given with {other}, which decides on the slots; give one of them")
        if self.uses_existing_ray:
            raise ConfigError(
                f"{named('memory')} is for nodes that are all on this machine, and {named('cluster')} is "
                f"{self.cluster}; give {named('device_memory')} or {named('slots')}"
            )

    def _check_host_memory(self, named: Callable[[str], str]) -> None:
        if not self.host_memory_given:
            return
        label = f"{named('host_memory')} is {self.host_memory}"
        if self.loader_used == "memory":
            raise ConfigError(
                f"{label} with {named('loader')} memory, which leaves it to the kernel what of the store is in memory; "
                f"give {named('loader')} disk"
            )
        if self.memory is not None:
            raise ConfigError(f"{label} with {named('memory')}, which is for all that nodes hold; give one of them")
        if self.host_is_device and (self.device_memory is not None or self.slots_given):
            other = named("device_memory" if self.device_memory is not None else "slots")
            raise ConfigError(
                f"{label} with {other}; workers on a processor keep experts in host memory, so both say the same: give "
                "one of them"
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
        if self.loader_used == CUDA and self.loader != CUDA and self.is_given("loader"):
            raise ConfigError(
                f"{source} is {device} with {named('loader')} {self.loader}, which loads into ordinary memory; "
                f"give {named('loader')} cuda, or {named('worker_device')} cpu"
            )

    def _check_shadow_hosts(self, named: Callable[[str], str]) -> None:
        if self.shadow_hosts == 1:
            return
        label = f"{named('shadow_hosts')} is {self.shadow_hosts}"
        if not self.has_shadow:
            raise ConfigError(f"{label} without a shadow; give a system with one, such as od-moe, or leave it out")
        if self.cluster == "embedded":
            raise ConfigError(
                f"{label} with {named('cluster')} embedded, where all nodes are one process; give {named('cluster')} "
                f"local, or several devices with {named('shadow_device')}"
            )
        if self.profile is not None:
            raise ConfigError(
                f"{label} with {named('profile')} {self.profile}, which has no time for the way between parts of a "
                f"shadow; give {named('shadow_hosts')} 1"
            )

    def _check_drafts(self, named: Callable[[str], str]) -> None:
        if not self.has_drafts:
            if self.is_given("draft_from") and self.draft == 0:
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
        if self.draft_from == "shadow" and not self.has_shadow:
            raise ConfigError(
                f"{named('draft')} is {self.draft}, and there is no shadow to draft; give {named('draft_from')} "
                f"prompt, mtp if the model has such a head, or {named('draft')} 0"
            )
        if self.draft_from in ("prompt", "mtp") and self.has_shadow:
            raise ConfigError(
                f"{named('draft_from')} is {self.draft_from!r} with a shadow, which predicts for its own tokens only; "
                f"give {named('shadow')} none, or {named('draft_from')} shadow"
            )
        if self.draft_from == "shadow" and self.align_token != 1:
            raise ConfigError(
                f"{named('draft')} is {self.draft} with {named('align_token')} {self.align_token}; drafts of the "
                f"shadow need its token aligned after each block: give {named('align_token')} 1"
            )

    @property
    def kept_bytes(self) -> int:
        """Memory for the KV caches of earlier prompts; 0: none is kept."""
        return self.kv_memory or (KV_MEMORY if self.kv_disk is not None else 0)

    @property
    def shadow_kept_bytes(self) -> int:
        """Likewise of the shadow's: one process on one device keeps them, unless a profile gives a pass its time."""
        is_one = self.shadow_processes == 1 and "," not in self.device_of("shadow")
        return self.kept_bytes if is_one and self.profile is None else 0

    def keeping_prompts(self) -> Settings:
        """As for conversations: earlier prompts are kept unless something else was given. On nodes that run already,
        their own setting holds. A budget of memory is for experts first, and a recording has whole prompts."""
        if self.is_given("kv_memory") or self.cluster != "embedded":
            return self
        if self.kv_disk is None and (self.memory is not None or self.record is not None):
            return self
        return self.replace(kv_memory=KV_MEMORY)

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
        shared = self.cluster == "local" or (self.cluster == "embedded" and self.has_shadow)
        return self.threads or (max(1, cores // 2) if shared else cores)

    @property
    def uses_existing_ray(self) -> bool:
        """Whether the nodes belong to a Ray cluster that runs before and after this command."""
        return self.cluster not in ("embedded", "local")

    @property
    def has_cluster_file(self) -> bool:
        """Whether `cluster` is a cluster file. Commands then reach the main host over ssh."""
        return self.cluster.endswith((".yaml", ".yml"))

    @property
    def workers_given(self) -> bool:
        """Whether the number of workers is known here. On a Ray cluster it is known only if the setting is given."""
        return self.is_given("workers") or not self.uses_existing_ray

    @property
    def host_memory_given(self) -> bool:
        """Whether a size was given, for experts in host memory."""
        return self.host_memory not in ("auto", "0")

    @property
    def host_is_device(self) -> bool:
        """Whether the slots of workers with a cache are host memory: there is no other tier then between disk and
        slots, and no copy. In emulated time a worker's memory stands for a device's."""
        on_host = self.loader_used != CUDA and self.profile is None
        return on_host and self.system != AUTO and caches(self.system_config)

    @property
    def slots_given(self) -> bool:
        """Whether the number of slots was given."""
        return self.is_given("slots") and self.slots != "auto"

    @property
    def has_shadow(self) -> bool:
        """Whether the system uses a shadow; what auto becomes does not."""
        return self.system != AUTO and self.system_config.predictor == "sep" and self.shadow != "none"

    @property
    def shadow_processes(self) -> int:
        """Over which the shadow's layers are divided; 0 without a shadow."""
        return self.shadow_hosts if self.has_shadow else 0

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.draft != 0 and self.draft_from != "none"

    @property
    def drafts_by_head(self) -> bool:
        """Whether the model's own multi-token-prediction head drafts them."""
        return self.has_drafts and self.draft_from == "mtp"

    @property
    def inexact(self) -> dict[str, str]:
        """The settings that change answers, by name."""
        return inexact(self.system_config) | ({} if self.kernel == "exact" else {"kernel": self.kernel})

    @property
    def launch_s(self) -> float:
        return self.launch_timeout

    @property
    def alignment(self) -> Alignment:
        return Alignment(self.align_token, self.align_kv, self.align_kv_rows, self.align_states)

    def replace(self, **changes: Any) -> Settings:
        """A copy with `changes`, checked again. Settings that were not given stay not given. Raises ConfigError."""
        return Settings(**(self.model_dump(exclude_unset=True) | changes))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
