"""Sizes, shares, rates and addresses as people write them: 512MiB, 40%, 25GB/s, 2.5Gbit, 10.0.0.5:7200. All raise
ValueError."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from scheduler.drafts.length import AUTO, MOST_DRAFTS
from scheduler.limits import MAX_EXPERTS

_NUMBER = r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKMmGgTt]i?)?"
_BYTES = re.compile(_NUMBER + r"(?:[Bb]|bytes)?", re.ASCII)
_RATE = re.compile(_NUMBER + r"(?:B|bytes)?(?:/s|ps)?", re.ASCII)  # b would be bits
_LINK = re.compile(_NUMBER + r"(?:b|bit|bits)?(?:/s|ps)?", re.ASCII)  # B would be bytes
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|(?!auto|cpu)[a-z]+(:(0|[1-9]\d{0,2}))?", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

SIZE = "a size such as 1GB, 512MiB or 704643072 (bytes)"
SIZES = f"{SIZE}; or several, such as 24GB,24GB"
RATE = "bytes a second such as 25GB/s or 500MB/s (B for bytes)"
LINK = "bits a second such as 1Gbit, 2.5Gbit/s or 100Mbps (b for bits)"
ADDRESS = "an address and a port, such as 10.0.0.5:7200"
SLOTS = f"1, 2, ... {MAX_EXPERTS}, or auto"
DRAFTS = f"{AUTO}, 0 (none), 1, ... {MOST_DRAFTS}"
DEVICE = "auto, cpu, cuda, cuda:1, or another accelerator as torch names it"
DEVICES = f"{DEVICE}; or several of one kind, such as cuda:0,cuda:1, each once"
SPEEDS = "a number above 0 for each worker, with commas between them (1 is the profile's speed)"
AUDIT = "auto, or a number from 0 to 1"
TOTAL = "a share of the whole model (above 0%, at most 100%), or bytes (512MiB, 2GB)"
MEMORY = "a share of all experts (above 0%, at most 100%), or bytes (512MiB, 2GB)"

HOST_MEMORY = "auto, 0 (none), a share of all experts (above 0%, at most 100%), or bytes (512MiB, 2GB)"


def parse_bytes(text: Any) -> int:
    """`1GB` (10^9), `512MiB` (2^20 each), `704643072`: at least one byte."""
    size = int(_parse(_BYTES, text, SIZE))
    if size < 1:
        raise ValueError(SIZE)
    return size


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """`24GB,24GB`: bytes of each. None: of none."""
    try:
        return () if text is None else tuple(map(parse_bytes, str(text).split(",")))
    except ValueError:
        raise ValueError(SIZES) from None


def parse_rate(text: Any) -> float:
    """Bytes a second: `25GB/s`, `3.5 GB/s`, `900MB`."""
    return _parse(_RATE, text, RATE)


def parse_link(text: Any) -> float:
    """Bits a second: `1Gbit`, `2.5 Gbit/s`, `100Mbps`."""
    return _parse(_LINK, text, LINK)


def parse_memory(text: Any, whole: int) -> int:
    """Bytes, as `parse_bytes`, or `40%`: a share of `whole` bytes, above 0% and at most 100%."""
    match = _SHARE.fullmatch(str(text).strip())
    if match is None:
        return parse_bytes(text)
    if not 0 < float(match[1]) <= 100:
        raise ValueError(MEMORY)
    return int(float(match[1]) / 100 * whole)


def parse_address(text: str, least: int = 1) -> tuple[str, int]:
    """`host:port`, with a port from `least` on."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not least <= int(port) < 65536:
        raise ValueError(ADDRESS)
    return host, int(port)


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


def parse_speeds(text: str) -> tuple[float, ...]:
    """`1,1,0.5`: a number above 0 for each worker. Empty: none."""
    if not text:
        return ()
    try:
        speeds = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise ValueError(SPEEDS) from None
    if not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(SPEEDS)
    return speeds


def _speeds(text: Any) -> str:
    parse_speeds(text)
    return str(text)


def _sizes(text: Any) -> str:
    parse_sizes(str(text))
    return str(text)


def _memory(text: Any) -> str:
    parse_memory(text, 1)
    return str(text)


def _host_memory(text: Any) -> str:
    if str(text).strip() in ("auto", "0"):
        return str(text).strip()
    try:
        return _memory(text)
    except ValueError:
        raise ValueError(HOST_MEMORY) from None


def _slots(text: Any) -> int | str:
    if text == "auto":
        return "auto"
    if isinstance(text, bool) or not str(text).isascii() or not str(text).isdigit() or len(str(text)) > 9:
        raise ValueError(SLOTS)
    if not 1 <= int(text) <= MAX_EXPERTS:
        raise ValueError(SLOTS)
    return int(text)


def _drafts(text: Any) -> int | str:
    if text == AUTO:
        return AUTO
    if isinstance(text, bool) or not str(text).isascii() or not str(text).isdigit() or len(str(text)) > 9:
        raise ValueError(DRAFTS)
    if int(text) > MOST_DRAFTS:
        raise ValueError(DRAFTS)
    return int(text)


def _device(text: Any) -> str:
    if not isinstance(text, str) or not _DEVICE.fullmatch(text):
        raise ValueError(DEVICE)
    return text


def _devices(text: Any) -> str:
    """One device, or several of one kind: with commas between them, or as a list."""
    names = text if isinstance(text, list) else str(text).split(",")
    try:
        found = [_device(name) for name in names]
    except ValueError:
        raise ValueError(DEVICES) from None
    kinds = {name.partition(":")[0] for name in found}
    if (
        len(kinds) != 1
        or len({name if ":" in name else f"{name}:0" for name in found}) < len(found)
        or (len(found) > 1 and kinds == {"auto"})
    ):
        raise ValueError(DEVICES)
    return ",".join(found)


def _audit(text: Any) -> float | str:
    if text == "auto":
        return "auto"
    if isinstance(text, bool):
        raise ValueError(AUDIT)
    try:
        share = float(text)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(AUDIT) from None
    if not 0 <= share <= 1:
        raise ValueError(AUDIT)
    return share


Audit = Annotated[float | Literal["auto"], BeforeValidator(_audit)]
"""The share of computations that are audited. `auto`: a small one where there are idle workers."""


AUTO_SLOTS = 2
"""Slots of a worker with `auto`, where it has the memory: one expert is loaded while another is computed. A third one
gains nothing."""
Slots = Annotated[int | Literal["auto"], BeforeValidator(_slots)]
"""Slots of a worker. `auto`: as its memory allows."""
Drafts = Annotated[int | Literal["auto"], BeforeValidator(_drafts)]
"""Drafts of a block. `auto`: chosen live."""
Speeds = Annotated[str, BeforeValidator(_speeds)]
"""How fast each worker is. It stays text, as it is given."""
Device = Annotated[str, BeforeValidator(_device)]
"""Where a role computes. Whether a machine has the device is found out there."""
Devices = Annotated[str, BeforeValidator(_devices)]
"""As `Device`; several, with commas between them, share the role's layers."""
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Sizes = Annotated[str, BeforeValidator(_sizes)]
"""Several sizes. They stay text, as they are given."""
BytesOrNone = Annotated[int, BeforeValidator(lambda text: 0 if str(text).strip() == "0" else parse_bytes(text))]
"""As `Bytes`, or 0."""
Rate = Annotated[float, BeforeValidator(parse_rate)]
Link = Annotated[float, BeforeValidator(parse_link)]
Memory = Annotated[str, BeforeValidator(_memory)]
"""A budget of device memory. It stays text, because a share needs the size of a store that is not open yet."""

HostMemory = Annotated[str, BeforeValidator(_host_memory)]
"""Host memory for experts, likewise as text. `auto`: what is free, less a reserve. 0: none."""


def _parse(form: re.Pattern[str], text: Any, allowed: str) -> float:
    match = form.fullmatch(str(text).strip())
    if match:
        prefix = (match[2] or "").lower()
        base = 1024 if prefix.endswith("i") else 1000
        value = float(match[1]) * base ** (_POWERS[prefix[0]] if prefix else 0)
        if 0 < value < math.inf:
            return value
    raise ValueError(allowed)
