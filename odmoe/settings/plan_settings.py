"""The settings of `odmoe plan`."""

from __future__ import annotations

from odmoe.settings.machine_texts import MACHINE
from odmoe.settings.settings import Settings
from odmoe.settings.table import Count, Number, Table, again, count, flag, setting
from odmoe.settings.units import LINK, RATE, SIZE, SIZES, Bytes, BytesOrNone, Link, Rate, Sizes
from scheduler.errors import ConfigError
from scheduler.limits import MAX_CONTEXT, MAX_EXPERTS, MAX_PLANNED_WORKERS
from scheduler.planning.shadow_bytes import RECALLS
from scheduler.policies.registry import check
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.scenario import PROFILE

CONTEXT = 4096
HOME_PROFILE = "pc-nvme-2.5gbe"
"""Whose times hold for --machine if --profile is not given."""
_OF_WORKERS = (
    "workers",
    "worker_memory",
    "shadow_memory",
    "load_bandwidth",
    "link",
    "group_size",
    "slots",
    "shadow",
    "recall",
    "prefill",
)
"""Settings that are not read with --machine, which says what there is and leaves the choice to the plan."""


class PlanSettings(Table):
    """A model, machines that need not exist yet, and the policies to run on them. Raises ConfigError naming the
    setting, its value and what is allowed."""

    model: str = again(Settings, "model", about="Directory, config.json, GGUF or org/name")
    dtype: str | None = again(Settings, "dtype", about="Data type of the weights (default: that of config.json)")
    experts: str | None = again(
        Settings, "experts", about="How the store keeps the experts of a quantised model (default: native)"
    )
    dense: str | None = again(
        Settings, "dense", about="How the store keeps the linear layers of the dense part (default: plain)"
    )
    context: Count | None = count(
        None,
        f"Tokens that fit in the KV caches (default: {CONTEXT}, or the model's limit if that is lower)",
        heading="Model",
        most=MAX_CONTEXT,
    )

    machine: tuple[str, ...] = setting(
        (),
        MACHINE,
        "What you have: 'pc x3: ram=32GB gpu=8GB'",
        heading="Cluster",
        common=True,
        keyword=False,
    )
    cluster: str | None = setting(
        None,
        "a file",
        "Cluster file whose hosts --machine describes",
        heading="Cluster",
        keyword=False,
    )
    workers: Count | None = count(
        None, "Worker nodes (default: the profile's)", heading="Cluster", common=True, most=MAX_PLANNED_WORKERS
    )
    load_bandwidth: Rate | None = setting(
        None, RATE, "Load rate of a worker: 25GB/s", heading="Cluster", common=True, metavar="RATE"
    )
    link: Link | None = setting(
        None, LINK, "Network link of every node: 1Gbit", heading="Cluster", common=True, metavar="RATE"
    )
    profile: str = again(
        Settings,
        "profile",
        default=PROFILE,
        heading="Cluster",
        common=True,
        about=f"Hardware profile (default: {PROFILE})",
    )
    group_size: Count | None = again(
        Settings, "group_size", about="Workers that serve a layer together (default: the best number)"
    )

    shadow: str = again(Settings, "shadow")
    recall: Number | None = setting(
        None,
        "a number from 0 to 1",
        "Recall of the shadow's predictions (default: the paper's)",
        heading="Prediction",
        ge=0,
        le=1,
    )

    worker_memory: Bytes | None = setting(
        None, SIZE, "Device memory of each worker: 1GB", heading="Memory", common=True, metavar="SIZE"
    )
    shadow_memory: Sizes | None = setting(
        None,
        SIZES,
        "Device memory of the shadow, of several devices or hosts that share its layers: 24GB,24GB",
        heading="Memory",
        metavar="SIZE[,SIZE...]",
    )
    slots: Count | None = count(
        None, "Experts that fit on a worker (default: the best number)", heading="Memory", most=MAX_EXPERTS
    )

    kv_memory: BytesOrNone = again(
        Settings, "kv_memory", about="The main node's memory for KV caches of earlier prompts (default: 0)"
    )

    prefill: str = again(Settings, "prefill")

    def check_together(self) -> None:
        """Raises ConfigError."""
        check(SystemConfig(prefill=self.prefill))
        if not self.model:
            raise ConfigError(
                "--model is not given; give a model directory, its config.json, a GGUF file, a store or org/name"
            )
        if self.cluster is not None and not self.machine:
            raise ConfigError(
                f"--cluster is {self.cluster}, and --machine does not say what its hosts are; give it, as "
                "--machine 'host: ram=32GB'"
            )
        if self.machine and (unread := next((name for name in _OF_WORKERS if self.is_given(name)), None)):
            raise ConfigError(f"{flag(unread)} is given with --machine, which leaves that to the plan; leave it out")
        if self.recall is None and self.shadow not in ("none", *RECALLS):
            raise ConfigError(f"--shadow is {self.shadow}, whose recall nobody has published; give --recall, too")
        if self.recall is not None and self.shadow == "none":
            raise ConfigError("--recall is given with --shadow none; without a shadow there are no predictions")
