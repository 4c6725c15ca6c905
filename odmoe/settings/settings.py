"""Every setting: its type, default, bounds and what it is for, said once. Flags, environment, configuration file and
Python callers all read this table. No torch here: a wrong setting is answered at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.policies.choices import PREFILLS
from scheduler.policies.registry import PLACEMENTS, PRECISIONS, PREDICTORS, RESIDENCIES, ROUTERS
from scheduler.policies.systems import SYSTEMS, Preset

MAX_PARALLEL = 16
"""Most answers that a cluster of processes gives at once."""

CLUSTERS = ("embedded", "local", "auto")
Shadow = Literal["fp16", "int8", "nf4", "none"]
Loader = Literal["disk", "memory", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
SHADOWS: tuple[str, ...] = get_args(Shadow)
LOADERS: tuple[str, ...] = get_args(Loader)
DTYPES: tuple[str, ...] = get_args(Dtype)


def _memory(value: Any) -> str:
    """`40%`, or bytes. Raises ValueError."""
    parse_memory(value)
    return str(value)


def parse_memory(value: Any) -> tuple[float | None, int]:
    """A share of all experts or None, and bytes where it is None. Raises ValueError."""
    match = _MEMORY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("a share or bytes are wanted")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError("a share is above 0% and at most 100%")
        return number / 100, 0
    size = int(number * _UNITS[unit.lower()])
    if size < 1:
        raise ValueError("at least one byte is wanted")
    return None, size


_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(%|[KMGT]i?B|B|)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{more}": base**power
    for power, letter in enumerate("kmgt", 1) for more, base in (("b", 1000), ("ib", 1024))
}  # fmt: skip


def _no_truth(value: Any) -> Any:
    """YAML's `yes` is no number."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


Count = Annotated[int, BeforeValidator(_no_truth)]
Number = Annotated[float, BeforeValidator(_no_truth)]
DeviceMemory = Annotated[str, BeforeValidator(_memory)]


def _setting(default: Any, allowed: str, about: str, *flags: str, listed: bool = False, **bounds: Any) -> Any:
    """`allowed`: what may be said, for help and errors; `flags`: how else the flag may be written; `listed`: help names
    all that is allowed."""
    extra: dict[str, Any] = {"allowed": allowed, "flags": list(flags), "listed": listed}
    return Field(default, description=about, json_schema_extra=extra, **bounds)


def _count(default: int | None, about: str, *flags: str, least: int = 1) -> Any:
    return _setting(default, f"{least}, {least + 1}, ...", about, *flags, ge=least)


def _one_of(default: str | None, choices: Iterable[str], about: str) -> Any:
    """Of an `OneOf`, `choices` are what is allowed; of a Literal, they say it for people."""
    return _setting(default, ", ".join(choices), about, listed=True)


def _listed(value: str, info: ValidationInfo) -> str:
    if value not in about(str(info.field_name))["allowed"].split(", "):
        raise ValueError("it is not one of those")
    return value


OneOf = Annotated[str, AfterValidator(_listed)]


class Settings(BaseModel):
    """One cluster and how it answers. Raises ConfigError naming the setting, its value and what is allowed.

    `named`: how a setting is called in messages; its flag unless said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = _setting("", "text", "Model directory, or org/name on the Hub.", "-m")
    store: str | None = _setting(None, "a path", "Expert store; found or made by itself when not given.")
    cluster: str = _setting(
        "embedded", f"{', '.join(CLUSTERS)}, a Ray head's host:port or a cluster file (.yaml)",
        "All nodes in this process, in processes of this machine, on a Ray cluster, or on the machines of a file.",
    )  # fmt: skip
    workers: Count = _count(
        8, "How many worker nodes, or as the system says; on a Ray cluster all that it has, when not given."
    )
    group_size: Count | None = _count(None, "Workers that serve a layer together; the model's top-k when not given.")
    slots: Count = _count(1, "Experts that a worker has room for.")
    device_memory: DeviceMemory | None = _setting(
        None, "a share of all experts (above 0%, at most 100%), or bytes (512MiB, 2GB)",
        "Memory for experts, all workers' together, in place of --slots.",
    )  # fmt: skip
    shadow: Shadow = _one_of("int8", SHADOWS, "The shadow's precision.")
    system: OneOf = _one_of("od-moe", tuple(SYSTEMS), "A system by name: what it chooses holds unless said otherwise.")
    predictor: OneOf = _one_of("sep", PREDICTORS, "Who says which experts come.")
    residency: OneOf = _one_of("none", RESIDENCIES, "Which experts stay in a slot after they were computed.")
    router: OneOf = _one_of("top-k", ROUTERS, "Which experts compute a token; others than top-k change the answer.")
    placement: OneOf = _one_of("device", PLACEMENTS, "Where an expert is computed, where the host is a second place.")
    precision: OneOf = _one_of(
        "full", PRECISIONS, "In which form experts are loaded; others than full change the answer."
    )
    alpha: Number | None = _setting(
        None, "a number from 0 to 1", "expert-cache, next-layer: how far apart scores count as near; skip: what weight"
        " may be left out.", ge=0, le=1,
    )  # fmt: skip
    prefetch: Count | None = _count(
        None, "Most experts of a layer that a predictor brings; its own rule when not given."
    )
    token_predictor: str | None = _setting(
        None, "a file", "The token-wise predictor's weights; the model's own token_predictor.safetensors if not given."
    )
    prefill: OneOf = _one_of(
        "ahead", PREFILLS,
        "Prefill's loads before gates, from each gate on, or loads, transfers and computations one after the other.",
    )  # fmt: skip
    align_token: Count = _setting(1, "0 (never), 1, 2, ...", "Align the shadow's token every N tokens.", ge=0)
    align_kv: Count = _setting(1, "0 (never), 1, 2, ...", "Align the shadow's KV cache every N tokens.", ge=0)
    dtype: Dtype | None = _one_of(None, DTYPES, "The experts' and the main model's; as stored unless said.")
    loader: Loader = _one_of("disk", LOADERS, "Where experts are loaded from, and how.")
    profile: str | None = _setting(
        None, "a name or a file", "Keep the times of a hardware profile; reports then say emulated."
    )
    mini_batch: Count | None = _count(
        None, "Most rows that an expert computes at once in prefill; 16, in at most 8 parts, when not given."
    )
    threads: Count | None = _count(
        None, "Threads a node computes with; all cores, or half of them where nodes share a machine."
    )
    launch_timeout: Number = _setting(
        600.0, "a number from 1 to 1000000", "Most seconds until a node is ready.", ge=1, le=1e6
    )
    host: str = _setting("127.0.0.1", "an address of this machine", "Where nodes of a local cluster listen.")
    node_port: Count = _setting(
        0, "0 (any that is free), 1, ... 65535", "Where workers and the shadow of a Ray cluster listen.", ge=0, le=65535
    )
    tls: str | None = _setting(
        None, "a directory", "ca.pem, node.pem, node.key and secret of this host; needed off loopback (odmoe certs)."
    )
    secret: str | None = _setting(
        None, "a text that others do not know", "What nodes off loopback must know of each other.", min_length=1,
        repr=False,
    )  # fmt: skip

    max_new_tokens: Count = _count(128, "Most tokens of the answer.", "-n")
    ctx_size: Count | None = _count(
        None, "Most tokens of prompt and answer together; the model's own limit when not given.", "-c", least=2
    )
    sample: bool = _setting(False, "true, false", "Draw tokens by the model's own generation settings.")
    temperature: Number | None = _setting(
        None, "a number of at least 0", "Draw tokens at this temperature; 0: take the likeliest.", "--temp", ge=0
    )
    top_k: Count | None = _count(None, "Draw among the k likeliest tokens; 0: among all.", least=0)
    top_p: Number | None = _setting(
        None, "a number above 0, at most 1", "Draw among the likeliest tokens that make up this share.", gt=0, le=1
    )
    repetition_penalty: Number | None = _setting(
        None, "a number above 0", "Divide the scores of tokens that were there before; 1: do not.", gt=0
    )
    seed: Count | None = _setting(
        None, "0, 1, ... 2^63 - 1", "Of the draws; chosen and reported when not given.", ge=0, lt=1 << 63
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = _setting(
        (), "text of at least one character", "End the answer before this text; may be given several times."
    )
    ignore_eos: bool = _setting(False, "true, false", "Go on past the end of sequence: for measuring.")
    chat: bool = _setting(False, "true, false", "The prompt is a message: put it into the model's chat template.")
    system_prompt: str | None = _setting(None, "text", "With --chat: what the system says first.")
    trace: str | None = _setting(None, "a file", "Write what every node did, for odmoe trace or ui.perfetto.dev.")
    record: str | None = _setting(None, "a file", "Write what the scheduler was told and decided, for odmoe simulate.")

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        named = named or flag
        unsaid = _chosen(values)
        try:
            super().__init__(**(unsaid | values))
        except ValidationError as error:
            raise ConfigError(_explain(error, named)) from None
        self.__pydantic_fields_set__.difference_update(unsaid)
        self._check_together(named)

    def _check_together(self, named: Callable[[str], str]) -> None:
        if self.group_size is not None and self.workers_given and self.group_size > self.workers:
            raise ConfigError(
                f"{named('group_size')} is {self.group_size}; allowed: 1 to {named('workers')} ({self.workers})"
            )
        if self.cluster not in CLUSTERS and not self.cluster_file and not _is_address(self.cluster):
            raise ConfigError(f"{named('cluster')} is {self.cluster!r}; allowed: {about('cluster')['allowed']}")
        if self.cluster != "embedded" and self.placement != "device" and "placement" in self.model_fields_set:
            raise ConfigError(
                f"{named('placement')} is {self.placement!r} with {named('cluster')} {self.cluster}; a host place "
                "is of this very machine, so it needs an embedded cluster"
            )
        if self.device_memory is not None and "slots" in self.model_fields_set:
            raise ConfigError(f"{named('device_memory')} is given with {named('slots')}; give one of them")
        if self.device_memory is not None and not self.workers_given:
            raise ConfigError(
                f"{named('device_memory')} is given without {named('workers')}; it is shared by all workers, and how "
                f"many {named('cluster')} {self.cluster} has is not known here"
            )
        if self.system_prompt is not None and not self.chat:
            raise ConfigError(
                f"{named('system_prompt')} is given without {named('chat')}; a system message is part of a chat"
            )

    @property
    def threads_a_node(self) -> int:
        """As said, or: every core of a node's machine; half of them where all nodes share this one, since the shadow
        computes beside the others and threads that wait for a busy core cost more than they bring."""
        cores = len(os.sched_getaffinity(0))
        return self.threads or (cores if self.joined else max(1, cores // 2))

    @property
    def joined(self) -> bool:
        """The nodes are those of a Ray cluster that was there before, and goes on."""
        return self.cluster not in ("embedded", "local")

    @property
    def cluster_file(self) -> bool:
        """`cluster` names the file of a cluster, whose main host is asked over ssh."""
        return self.cluster.endswith((".yaml", ".yml"))

    @property
    def workers_given(self) -> bool:
        """Whether somebody has said how many workers, or nobody else could."""
        return "workers" in self.model_fields_set or not self.joined

    @property
    def preset(self) -> Preset:
        """What `system` chooses where nothing else was said."""
        return SYSTEMS[self.system]

    @property
    def shadowed(self) -> bool:
        """Whether a shadow is to run."""
        return self.predictor == "sep" and self.shadow != "none"

    @property
    def launch_s(self) -> float:
        return self.launch_timeout

    @property
    def alignment(self) -> Alignment:
        return Alignment(self.align_token, self.align_kv)

    def but(self, **changes: Any) -> Settings:
        """These settings with some changed, checked again. What nobody said stays unsaid."""
        return Settings(**(self.model_dump(exclude_unset=True) | changes))


def _chosen(values: dict[str, Any]) -> dict[str, Any]:
    """What the system that is named chooses, and nobody has said otherwise."""
    name = values.get("system", "od-moe")
    preset = SYSTEMS.get(name) if isinstance(name, str) else None
    return {name: value for name, value in preset.values().items() if name not in values} if preset else {}


def flag(name: str) -> str:
    """`group_size` -> `--group-size`."""
    return f"--{name.replace('_', '-')}"


def about(name: str) -> dict[str, Any]:
    """`allowed`, `flags` and `listed` of a setting."""
    found: Any = Settings.model_fields[name].json_schema_extra
    return dict(found)


def _explain(error: ValidationError, named: Callable[[str], str]) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = ", ".join(key.replace("_", "-") for key in Settings.model_fields)
        return f"{named(name)} is no setting; there are: {known}"
    value = "not fit to be shown" if name == "secret" else repr(first["input"])
    return f"{named(name)} is {value}; allowed: {about(name)['allowed']}"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
