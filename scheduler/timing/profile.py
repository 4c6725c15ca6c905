"""Hardware timings, read from `profiles/*.yaml`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError
from scheduler.unknown_names import nearest
from scheduler.yaml_file import read_yaml

PROFILES = Path(__file__).resolve().parent / "profiles"
"""The packaged profiles. A file's name is its profile's."""

FORM_BITS = {"int4": 4.5, "int2": 2.5}
"""Bits per weight, with scale and zero of a group of 64, as in `checkpoint.forms`."""
_FULL_BITS = 16.0
"""Assumed for a profile without `model_sizes`."""

_TIMES_SLOWER = re.compile("[1-9][0-9]{0,5}")

_TIMES = ("main_layer_ms", "expert_ms", "expert_ms_per_extra_token", "load_ms", "shadow_layer_ms")
_OPTIONAL_TIMES = (
    "main_layer_ms_per_extra_token",
    "shadow_layer_ms_per_extra_token",
    "load_piece_ms",
    "restore_ms",
    "disk_load_ms",
)
_CANCELLABLE = "cancellable"
_LINK = ("hop_ms", "link_bits_per_s")
_HOST = ("host_ms", "host_ms_per_extra_token")
_SIZES = ("layers", "experts", "top_k", "hidden_bytes", "kv_bytes_per_token_layer")
_OPTIONAL_SIZES = ("expert_bytes", "expert_parameters", "main_layer_bytes", "shadow_layer_bytes")
_CLUSTER = ("workers", "group_size")
_DEVICES = ("main_bytes_per_s", "worker_bytes_per_s", "shadow_bytes_per_s")
_FIT = ("load_ms", "shadow_layer_ms")
_NOTES = ("fully_cached_tokens_per_s", "paper")  # for comparison only; not read here


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of a testbed in seconds, sizes in bytes, link rates in bits per second."""

    name: str
    layers: int
    experts: int
    top_k: int
    hidden_bytes: int
    """One row: a token's embedding, or its output."""
    kv_bytes: int
    """Keys and values of one token in one layer."""
    workers: int
    group_size: int
    main_layer_s: float
    """Attention, gate and norms of one layer, one token."""
    expert_s: float
    """One expert on a worker's device, one token; `expert_extra_s`: each further token."""
    expert_extra_s: float
    load_s: float
    hop_s: float
    """One embedding, one way; 0, with an infinite `link_bits_per_s`, on one machine."""
    link_bits_per_s: float
    shadow_layer_s: float
    state_bytes: int = 0
    """States of one request in all layers, which every alignment of KV rows carries once."""
    main_extra_s: float = 0.0
    """Each further token of a pass, in one layer of the main node."""
    model_sizes: tuple[int, int, int, int] | None = None
    """The model with which the times were measured, to scale them to another (see `planning`): bytes of an expert, its
    parameters, bytes of dense weights that a token reads per layer, bytes that the shadow reads per layer."""
    device_rates: tuple[float, float, float] | None = None
    """The devices with which the times were measured: bytes per second that main node, worker and shadow read from
    device memory."""
    host_s: float | None = None
    """One expert computed by the host's processor beside the device, from host memory, one token. None: no host place.
    `host_extra_s`: each further token."""
    host_extra_s: float = 0.0
    load_piece_s: float = 0.0
    """A load moves its bytes in pieces, and an evicted one ends with the piece under way. 0: it ends at once."""
    cancellable: bool = True
    """False: a load that has begun cannot be given up. An evicted one keeps link and slot until its end."""
    restore_s: float = 0.0
    """To restore one expert, loaded in a smaller form, for its computations, by the processor that computes it."""
    form_shares: tuple[tuple[str, float], ...] = ()
    """Smaller forms, and the bytes of each over those of the full form, as a store has them. Others are taken to have
    the bits of `FORM_BITS`."""
    shadow_extra_s: float = 0.0
    """Each further row of a pass, in one layer of the shadow."""
    disk_load_s: float | None = None
    """One expert from disk to host memory, from which `load_s` brings it to the device. None: not known."""
    fits: tuple[tuple[float, float], ...] = ()
    """Where times were fitted to a measured speed: other pairs of (load_s, shadow_layer_s) that fit it as well."""

    @property
    def is_networked(self) -> bool:
        """What nodes send each other takes time: they are on several machines."""
        return self.hop_s > 0 or math.isfinite(self.link_bits_per_s)

    def main_s(self, tokens: int) -> float:
        """One layer of the main node on `tokens` tokens."""
        return self.main_layer_s + (tokens - 1) * self.main_extra_s

    def shadow_s(self, rows: int) -> float:
        """One layer of the shadow on `rows` rows."""
        return self.shadow_layer_s + (rows - 1) * self.shadow_extra_s

    def compute_s(self, tokens: int) -> float:
        """One expert on `tokens` tokens."""
        return self.expert_s + (tokens - 1) * self.expert_extra_s

    def lasting_load_s(self, in_memory: bool = True, share: float = 1.0) -> float:
        """A load to the device of an expert that is in host memory (`in_memory`), or on disk. `share`: of its form, as
        in `form_share`. Raises ConfigError where the profile has no time for the disk."""
        return share * (self.load_s + (0.0 if in_memory else self._disk()))

    def ended_load_s(self, after_s: float, share: float = 1.0, in_memory: bool = True) -> float:
        """How long a load lasts that is evicted `after_s` after its begin: until the end of the piece under way, which
        is the whole load where it is not `cancellable`. Piece and load may end together with the eviction.
        `in_memory`, `share`: as in `lasting_load_s`."""
        piece_s = self.load_piece_s if self.cancellable else self.lasting_load_s(in_memory)
        if piece_s:
            pieces = math.ceil(after_s / piece_s - 1e-6)  # an end of a piece is exact but for rounding
            after_s = max(after_s, pieces * piece_s)
        return min(after_s, self.lasting_load_s(in_memory, share))

    def host_compute_s(self, tokens: int) -> float:
        """One expert on `tokens` tokens on the host's processor. Raises ConfigError where the profile has no host."""
        return self._host() + (tokens - 1) * self.host_extra_s

    def other_fits(self) -> Iterator[Profile]:
        """This profile with each of the other `fits`. A piece of a load is as large in all of them."""
        for load_s, shadow_layer_s in self.fits:
            piece_s = self.load_piece_s * load_s / self.load_s if self.load_s else 0.0
            yield replace(self, load_s=load_s, load_piece_s=piece_s, shadow_layer_s=shadow_layer_s, fits=())

    def slow_down(self, times: float) -> Profile:
        """The same testbed with everything `times` times slower. Ratios stay the same."""
        return replace(
            self,
            name=f"{self.name}@{times:g}",
            main_layer_s=self.main_layer_s * times,
            main_extra_s=self.main_extra_s * times,
            expert_s=self.expert_s * times,
            expert_extra_s=self.expert_extra_s * times,
            load_s=self.load_s * times,
            hop_s=self.hop_s * times,
            link_bits_per_s=self.link_bits_per_s / times,
            shadow_layer_s=self.shadow_layer_s * times,
            host_s=None if self.host_s is None else self.host_s * times,
            host_extra_s=self.host_extra_s * times,
            load_piece_s=self.load_piece_s * times,
            restore_s=self.restore_s * times,
            disk_load_s=None if self.disk_load_s is None else self.disk_load_s * times,
            shadow_extra_s=self.shadow_extra_s * times,
            fits=tuple((load_s * times, shadow_layer_s * times) for load_s, shadow_layer_s in self.fits),
        )

    def form_share(self, form: str) -> float:
        """A load's time in this form divided by that in the full form, as its bytes are.

        Raises ConfigError for an unknown form.
        """
        if not form:
            return 1.0
        if form not in FORM_BITS:
            raise ConfigError(
                f"a form of experts is {form!r}; allowed: {', '.join(FORM_BITS)}, or an empty string for the full form"
            )
        for held, share in self.form_shares:
            if held == form:
                return share
        full = 8 * self.model_sizes[0] / self.model_sizes[1] if self.model_sizes else _FULL_BITS
        return min(1.0, FORM_BITS[form] / full)

    def form_load_s(self, form: str) -> float:
        """One load in this form. Raises ConfigError for an unknown form."""
        return self.load_s * self.form_share(form)

    @property
    def device_costs(self) -> tuple[float, float]:
        """A computation on a worker's device, as in `WorkerJoined`: seconds a call, seconds a row."""
        return max(0.0, self.expert_s - self.expert_extra_s), self.expert_extra_s

    @property
    def host_costs(self) -> tuple[float, float]:
        """A computation on the host's processor, likewise. Raises ConfigError if the profile has no host."""
        return max(0.0, self._host() - self.host_extra_s), self.host_extra_s

    def _disk(self) -> float:
        if self.disk_load_s is None:
            raise ConfigError(
                f"profile {self.name} has no time for a load from disk, so that host memory cannot be a tier above it; "
                "use one with disk_load_ms, or leave --host-memory out"
            )
        return self.disk_load_s

    def _host(self) -> float:
        if self.host_s is None:
            raise ConfigError(
                f"profile {self.name} has no times for experts computed in host memory; use one with host_ms, "
                "or compute all of them on the device"
            )
        return self.host_s


def find_profile(name: str | Path) -> Profile:
    """A profile, by the name of a packaged one or by the path of a file. Raises ConfigError.

    With `@N` after the name everything is N times slower, for a machine that cannot keep up with the profile.
    """
    whole, at, times = str(name).rpartition("@")
    if at and _TIMES_SLOWER.fullmatch(times):
        return find_profile(whole).slow_down(int(times))
    packaged = PROFILES / f"{name}.yaml"
    if Path(name).name == str(name) and packaged.is_file():
        return load_profile(packaged)
    if Path(name).is_file():
        return load_profile(Path(name))
    known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))
    raise ConfigError(
        f"there is no profile {str(name)!r}; allowed: {known}, or the path of a file like {PROFILES}/*, each also with "
        "@2, @3, ... for everything so many times slower"
    )


def load_profile(path: Path) -> Profile:
    """Raises ConfigError naming the file, the key and what is wrong with it."""
    fields = read_yaml(path, f"profile {path}")
    if fields is None:
        raise ConfigError(f"profile {path} is empty; copy one of those in {PROFILES}")
    try:
        return _profile(fields, path)
    except KeyError as error:
        raise ConfigError(f"profile {path} lacks {error}; see those in {PROFILES}") from error


def _profile(fields: Any, path: Path) -> Profile:
    """Raises ConfigError or KeyError."""
    _mapping(fields, "it", path)
    for section in ("model", "cluster", "devices"):
        _mapping(fields.get(section, {}), section, path)
    model, cluster, devices = fields["model"], fields["cluster"], fields.get("devices", {})
    _check(fields, model, cluster, devices, path)
    hop_s, link_bits_per_s = _link(fields, path)
    host_s, host_extra_s = _host(fields, path)
    return Profile(
        name=str(fields["name"]),
        layers=model["layers"],
        experts=model["experts"],
        top_k=model["top_k"],
        hidden_bytes=model["hidden_bytes"],
        kv_bytes=model["kv_bytes_per_token_layer"],
        workers=cluster["workers"],
        group_size=cluster["group_size"],
        main_layer_s=fields["main_layer_ms"] / 1e3,
        expert_s=fields["expert_ms"] / 1e3,
        expert_extra_s=fields["expert_ms_per_extra_token"] / 1e3,
        load_s=fields["load_ms"] / 1e3,
        hop_s=hop_s,
        link_bits_per_s=link_bits_per_s,
        shadow_layer_s=fields["shadow_layer_ms"] / 1e3,
        main_extra_s=fields.get("main_layer_ms_per_extra_token", 0) / 1e3,
        model_sizes=_model_sizes(model),
        device_rates=_rates(devices, path),
        host_s=host_s,
        host_extra_s=host_extra_s,
        load_piece_s=fields.get("load_piece_ms", 0) / 1e3,
        cancellable=fields.get(_CANCELLABLE, True),
        restore_s=fields.get("restore_ms", 0) / 1e3,
        disk_load_s=fields["disk_load_ms"] / 1e3 if "disk_load_ms" in fields else None,
        shadow_extra_s=fields.get("shadow_layer_ms_per_extra_token", 0) / 1e3,
        fits=_fits(fields.get("fits", []), path),
    )


def _check(fields: Any, model: Any, cluster: Any, devices: Any, path: Path) -> None:
    """Raises ConfigError or KeyError."""
    top = (
        "name",
        "model",
        "cluster",
        "devices",
        "fits",
        _CANCELLABLE,
        *_TIMES,
        *_OPTIONAL_TIMES,
        *_LINK,
        *_HOST,
        *_NOTES,
    )
    _check_keys(fields, "", top, path)
    _check_keys(model, "model.", (*_SIZES, *_OPTIONAL_SIZES), path)
    _check_keys(cluster, "cluster.", _CLUSTER, path)
    _check_keys(devices, "devices.", _DEVICES, path)
    for key in (*_TIMES, *(key for key in _OPTIONAL_TIMES if key in fields)):
        _number(fields[key], key, path)
    if fields.get("load_piece_ms", 0) > fields["load_ms"]:
        raise ConfigError(
            f"profile {path}: load_piece_ms is {fields['load_piece_ms']}, more than load_ms, {fields['load_ms']}; "
            "a load has at least one piece"
        )
    _check_cancellable(fields, path)
    for key in (*_SIZES, *(key for key in _OPTIONAL_SIZES if key in model)):
        _count(model[key], key, path)
    for key in _CLUSTER:
        _count(cluster[key], key, path)
    _possible(model["top_k"], "top_k", model["experts"], "experts", path)
    _possible(cluster["group_size"], "group_size", cluster["workers"], "workers", path)


def _check_cancellable(fields: Any, path: Path) -> None:
    """Raises ConfigError."""
    cancellable = fields.get(_CANCELLABLE, True)
    if type(cancellable) is not bool:
        raise ConfigError(f"profile {path}: {_CANCELLABLE} is {cancellable!r}; it must be true or false")
    if not cancellable and "load_piece_ms" in fields:
        raise ConfigError(
            f"profile {path}: {_CANCELLABLE} is false, and load_piece_ms is {fields['load_piece_ms']}; a load that "
            "cannot be given up has no pieces: leave one of the two out"
        )


def _fits(fits: Any, path: Path) -> tuple[tuple[float, float], ...]:
    """Raises ConfigError or KeyError."""
    if not isinstance(fits, list):
        raise ConfigError(f"profile {path}: fits is {fits!r:.80}; it must be a list of other {' and '.join(_FIT)}")
    for fit in fits:
        _mapping(fit, "a fit", path)
        _check_keys(fit, "fits: ", _FIT, path)
        for key in _FIT:
            _number(fit[key], key, path)
    return tuple((fit["load_ms"] / 1e3, fit["shadow_layer_ms"] / 1e3) for fit in fits)


def _model_sizes(model: Any) -> tuple[int, int, int, int] | None:
    if not all(key in model for key in _OPTIONAL_SIZES):
        return None
    return model["expert_bytes"], model["expert_parameters"], model["main_layer_bytes"], model["shadow_layer_bytes"]


def _mapping(value: Any, name: str, path: Path) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"profile {path}: {name} is {value!r:.80}; it must be lines of `key: value`")


def _check_keys(part: Any, where: str, keys: tuple[str, ...], path: Path) -> None:
    """Raises ConfigError. A misspelt key would otherwise count as absent."""
    if unknown := [str(key) for key in part if key not in keys]:
        near = nearest(unknown[0], keys) or f"; allowed: {', '.join(keys)}"
        raise ConfigError(f"profile {path}: {where}{unknown[0]} is not a key of a profile{near}")


def _count(value: Any, key: str, path: Path) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"profile {path}: {key} is {value!r}; it must be 1, 2, ...")


def _number(value: Any, key: str, path: Path) -> None:
    """Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"profile {path}: {key} is {value!r}; it must be a number of at least 0")


def _possible(part: int, key: str, whole: int, of: str, path: Path) -> None:
    if part > whole:
        raise ConfigError(f"profile {path}: {key} is {part} with {whole} {of}; allowed: 1 to {whole}")


def _both(keys: tuple[str, str], fields: Any, path: Path) -> bool:
    """Whether both keys are present. Raises ConfigError for a bad value, KeyError for one key without the other."""
    if not any(key in fields for key in keys):
        return False
    for key in keys:
        _number(fields[key], key, path)
    return True


def _link(fields: Any, path: Path) -> tuple[float, float]:
    """(hop_s, link_bits_per_s). The profile of one machine has neither key. Raises ConfigError."""
    if not _both(_LINK, fields, path):
        return 0.0, math.inf
    if not fields["link_bits_per_s"]:
        raise ConfigError(f"profile {path}: link_bits_per_s is 0; it must be more")
    return fields["hop_ms"] / 1e3, fields["link_bits_per_s"]


def _host(fields: Any, path: Path) -> tuple[float | None, float]:
    """(host_s, host_extra_s). Raises ConfigError."""
    if not _both(_HOST, fields, path):
        return None, 0.0
    if fields["host_ms"] < fields["host_ms_per_extra_token"]:
        raise ConfigError(
            f"profile {path}: host_ms is {fields['host_ms']}, less than host_ms_per_extra_token, "
            f"{fields['host_ms_per_extra_token']}; the first token takes at least as long as each further one"
        )
    return fields["host_ms"] / 1e3, fields["host_ms_per_extra_token"] / 1e3


def _rates(devices: dict[str, Any], path: Path) -> tuple[float, float, float] | None:
    """Bytes a second, in the order of `_DEVICES`. Raises ConfigError, or KeyError where some are missing."""
    if not devices:
        return None
    for key in _DEVICES:
        _number(devices[key], key, path)
        if not devices[key]:
            raise ConfigError(f"profile {path}: {key} is 0; it must be more")
    main, worker, shadow = (float(devices[key]) for key in _DEVICES)
    return main, worker, shadow
