"""Hardware timings, read from `profiles/*.yaml`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from scheduler.errors import ConfigError

PROFILES = Path(__file__).resolve().parent / "profiles"
"""The profiles that come with the package; a file's name is its profile's."""

FORM_BITS = {"int4": 4.5, "int2": 2.5}
"""Bits a weight, scale and zero of a group of 64 included, as `checkpoint.forms` has them."""
_FULL_BITS = 16.0
"""Assumed of a profile that does not say what its timings were taken on."""

_TIMES_SLOWER = re.compile("[1-9][0-9]{0,5}")

_TIMES = ("main_layer_ms", "expert_ms", "expert_ms_per_extra_token", "load_ms", "shadow_layer_ms")
_OPTIONAL_TIMES = ("main_layer_ms_per_extra_token",)
_LINK = ("hop_ms", "link_bits_per_s")
_HOST = ("host_ms", "host_ms_per_extra_token")
_SIZES = ("layers", "experts", "top_k", "hidden_bytes", "kv_bytes_per_token_layer")
_OPTIONAL_SIZES = ("expert_bytes", "expert_parameters", "main_layer_bytes", "shadow_layer_bytes")
_CLUSTER = ("workers", "group_size")
_DEVICES = ("main_bytes_per_s", "worker_bytes_per_s", "shadow_bytes_per_s")
_NOTES = ("fully_cached_tokens_per_s", "paper")  # what a figure is compared with; nothing reads them here


@dataclass(frozen=True, slots=True)
class Profile:
    """A testbed's timings in seconds, sizes in bytes, link rates in bits per second.

    `main_layer_s`: attention, gate and norms of one layer, one token; `main_extra_s`: of each token more in one pass.
    `hop_s`: one embedding, one way; 0, with an infinite `link_bits_per_s`, on one machine. `host_s`, `host_extra_s`:
    one expert computed by the host's processor beside the device, from host memory, for one token and for each token
    more; None where nothing is computed there. `model_sizes`, `device_rates`: what the timings were taken on, so that
    they can be scaled to another model (see `planning`); a profile that is only replayed needs neither. `model_sizes`:
    bytes of an expert, its parameters, bytes of dense weights that a token reads a layer, and bytes that the shadow
    reads a layer; `device_rates`: bytes a second that main node, worker and shadow read from device memory.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden_bytes: int
    kv_bytes: int
    workers: int
    group_size: int
    main_layer_s: float
    expert_s: float
    expert_extra_s: float
    load_s: float
    hop_s: float
    link_bits_per_s: float
    shadow_layer_s: float
    main_extra_s: float = 0.0
    model_sizes: tuple[int, int, int, int] | None = None
    device_rates: tuple[float, float, float] | None = None
    host_s: float | None = None
    host_extra_s: float = 0.0

    def main_s(self, tokens: int) -> float:
        """The main node's part of one layer on `tokens` tokens."""
        return self.main_layer_s + (tokens - 1) * self.main_extra_s

    def compute_s(self, tokens: int) -> float:
        """One expert on `tokens` tokens."""
        return self.expert_s + (tokens - 1) * self.expert_extra_s

    def host_compute_s(self, tokens: int) -> float:
        """One expert on `tokens` tokens, by the host's processor. Raises ConfigError where the profile has no host."""
        return self._host() + (tokens - 1) * self.host_extra_s

    def slowed(self, times: int) -> Profile:
        """The same machine where everything takes so many times as long: ratios stay, rates are so many times lower."""
        names = ("main_layer_s", "main_extra_s", "expert_s", "expert_extra_s", "load_s", "hop_s", "shadow_layer_s")
        longer = {name: getattr(self, name) * times for name in (*names, "host_extra_s")}
        return replace(
            self, name=f"{self.name}@{times}", link_bits_per_s=self.link_bits_per_s / times,
            host_s=None if self.host_s is None else self.host_s * times, **longer,
        )  # fmt: skip

    def form_share(self, form: str) -> float:
        """What part of a load's time one of a smaller form takes: as much less as its bytes are fewer. Raises
        ConfigError for a form that is none."""
        if not form:
            return 1.0
        if form not in FORM_BITS:
            raise ConfigError(
                f"a form of experts is {form!r}; allowed: {', '.join(FORM_BITS)}, or nothing: the full one"
            )
        full = 8 * self.model_sizes[0] / self.model_sizes[1] if self.model_sizes else _FULL_BITS
        return min(1.0, FORM_BITS[form] / full)

    @property
    def device_costs(self) -> tuple[float, float]:
        """Of a computation on a worker's device: seconds a call, and a row of it, as `WorkerJoined` has them."""
        return max(0.0, self.expert_s - self.expert_extra_s), self.expert_extra_s

    @property
    def host_costs(self) -> tuple[float, float]:
        """Likewise by the host's processor. Raises ConfigError where the profile has no host."""
        return max(0.0, self._host() - self.host_extra_s), self.host_extra_s

    def _host(self) -> float:
        if self.host_s is None:
            raise ConfigError(
                f"profile {self.name} has no times for experts computed in host memory; take one that has host_ms, "
                "or compute all of them on the device"
            )
        return self.host_s


def find_profile(name: str | Path) -> Profile:
    """A profile by its name, for one that comes with the package, or by its file's path; with `@N` behind it all of it
    N times as slow, for a machine that cannot keep up with it. Raises ConfigError."""
    whole, at, times = str(name).rpartition("@")
    if at and _TIMES_SLOWER.fullmatch(times):
        return find_profile(whole).slowed(int(times))
    packaged = PROFILES / f"{name}.yaml"
    if Path(name).name == str(name) and packaged.is_file():
        return load_profile(packaged)
    if Path(name).is_file():
        return load_profile(Path(name))
    known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))
    raise ConfigError(f"there is no profile {str(name)!r}; allowed: {known}, or the path of a file like {PROFILES}/*")


def load_profile(path: Path) -> Profile:
    """Raises ConfigError naming the file, the key and what is wrong with it."""
    try:
        fields: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    try:
        return _profile(fields, path)
    except KeyError as error:
        raise ConfigError(f"profile {path} lacks {error}; see those in {PROFILES}") from error


def _profile(fields: Any, path: Path) -> Profile:
    """Raises ConfigError or KeyError."""
    _mapping(fields, "it", path)
    for part in ("model", "cluster", "devices"):
        _mapping(fields.get(part, {}), part, path)
    model, cluster, devices = fields["model"], fields["cluster"], fields.get("devices", {})
    _known(
        fields, "", ("name", "model", "cluster", "devices", *_TIMES, *_OPTIONAL_TIMES, *_LINK, *_HOST, *_NOTES), path
    )
    _known(model, "model.", (*_SIZES, *_OPTIONAL_SIZES), path)
    _known(cluster, "cluster.", _CLUSTER, path)
    _known(devices, "devices.", _DEVICES, path)
    for key in (*_TIMES, *(key for key in _OPTIONAL_TIMES if key in fields)):
        _number(fields[key], key, path)
    hop_s, link = _link(fields, path)
    host_s, host_extra_s = _host(fields, path)
    for key in (*_SIZES, *(key for key in _OPTIONAL_SIZES if key in model)):
        _count(model[key], key, path)
    for key in _CLUSTER:
        _count(cluster[key], key, path)
    _possible(model["top_k"], "top_k", model["experts"], "experts", path)
    _possible(cluster["group_size"], "group_size", cluster["workers"], "workers", path)
    return Profile(
        str(fields["name"]), model["layers"], model["experts"], model["top_k"], model["hidden_bytes"],
        model["kv_bytes_per_token_layer"], cluster["workers"], cluster["group_size"],
        fields["main_layer_ms"] / 1e3, fields["expert_ms"] / 1e3, fields["expert_ms_per_extra_token"] / 1e3,
        fields["load_ms"] / 1e3, hop_s, link, fields["shadow_layer_ms"] / 1e3,
        fields.get("main_layer_ms_per_extra_token", 0) / 1e3,
        (model["expert_bytes"], model["expert_parameters"], model["main_layer_bytes"], model["shadow_layer_bytes"])
        if all(key in model for key in _OPTIONAL_SIZES)
        else None,
        _rates(devices, path), host_s, host_extra_s,
    )  # fmt: skip


def _mapping(value: Any, name: str, path: Path) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"profile {path}: {name} is {value!r:.80}; it must be lines of `key: value`")


def _known(part: Any, where: str, keys: tuple[str, ...], path: Path) -> None:
    """A key with a slip in it would pass for one that was left out."""
    if unknown := [str(key) for key in part if key not in keys]:
        raise ConfigError(f"profile {path}: {where}{unknown[0]} is no key of a profile; allowed: {', '.join(keys)}")


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
    """Are they said? One without the other is a slip. Raises ConfigError, or KeyError for the one that lacks."""
    if not any(key in fields for key in keys):
        return False
    for key in keys:
        _number(fields[key], key, path)
    return True


def _link(fields: Any, path: Path) -> tuple[float, float]:
    """(hop_s, link_bits_per_s); one machine has no network, and its profile neither key. Raises ConfigError."""
    if not _both(_LINK, fields, path):
        return 0.0, math.inf
    if not fields["link_bits_per_s"]:
        raise ConfigError(f"profile {path}: link_bits_per_s is 0; it must be more")
    return fields["hop_ms"] / 1e3, fields["link_bits_per_s"]


def _host(fields: Any, path: Path) -> tuple[float | None, float]:
    """Raises ConfigError."""
    if not _both(_HOST, fields, path):
        return None, 0.0
    if fields["host_ms"] < fields["host_ms_per_extra_token"]:
        raise ConfigError(
            f"profile {path}: host_ms is {fields['host_ms']}, less than host_ms_per_extra_token, "
            f"{fields['host_ms_per_extra_token']}; the first token takes at least as long as each further one"
        )
    return fields["host_ms"] / 1e3, fields["host_ms_per_extra_token"] / 1e3


def _rates(devices: dict[str, Any], path: Path) -> tuple[float, float, float] | None:
    """Raises ConfigError, or KeyError where some are said and others are not."""
    if not devices:
        return None
    for key in _DEVICES:
        _number(devices[key], key, path)
        if not devices[key]:
            raise ConfigError(f"profile {path}: {key} is 0; it must be more")
    main, worker, shadow = (float(devices[key]) for key in _DEVICES)
    return main, worker, shadow
