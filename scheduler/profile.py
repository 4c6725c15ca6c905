"""Hardware timings, read from `profiles/*.yaml`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scheduler.errors import ConfigError

PROFILES = Path(__file__).resolve().parent / "profiles"
"""The profiles that come with the package; a file's name is its profile's."""

_NUMBERS = (
    "main_layer_ms", "expert_ms", "expert_ms_per_extra_token", "load_ms", "hop_ms", "link_bits_per_s",
    "shadow_layer_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """A testbed's timings in seconds, sizes in bytes, link rates in bits per second.

    `main_layer_s`: attention, gate and norms of one layer, one token. `hop_s`: one embedding, one way.
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

    def transfer_s(self, tokens: int) -> float:
        """One way, for the embeddings of `tokens` tokens: a hop, or what the link needs where that is more."""
        return max(self.hop_s, tokens * self.hidden_bytes * 8 / self.link_bits_per_s)

    def align_s(self, rows: float) -> float:
        """One way, for so many rows of keys and values, of one token in one layer each."""
        return max(self.hop_s, rows * self.kv_bytes * 8 / self.link_bits_per_s)

    def compute_s(self, tokens: int) -> float:
        """One expert on `tokens` tokens."""
        return self.expert_s + (tokens - 1) * self.expert_extra_s


def find_profile(name: str | Path) -> Profile:
    """A profile by its name, for one that comes with the package, or by its file's path. Raises ConfigError."""
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
        for key in _NUMBERS:
            if not 0 <= fields[key] < math.inf:
                raise ConfigError(f"profile {path}: {key} is {fields[key]}; it must be a number of at least 0")
        if not fields["link_bits_per_s"]:
            raise ConfigError(f"profile {path}: link_bits_per_s is 0; it must be more")
        model, cluster = fields["model"], fields["cluster"]
        return Profile(
            str(fields["name"]), model["layers"], model["experts"], model["top_k"], model["hidden_bytes"],
            model["kv_bytes_per_token_layer"], cluster["workers"], cluster["group_size"],
            fields["main_layer_ms"] / 1e3, fields["expert_ms"] / 1e3, fields["expert_ms_per_extra_token"] / 1e3,
            fields["load_ms"] / 1e3, fields["hop_ms"] / 1e3, fields["link_bits_per_s"],
            fields["shadow_layer_ms"] / 1e3,
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ConfigError(f"profile {path} lacks {error} or has it in another form; see {PROFILES}") from error
