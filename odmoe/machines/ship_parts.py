"""Copies to each worker's host the experts that it is to hold, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.held import HELD, held_text
from checkpoint.part_files import expert_sizes, extents_of, file_sizes, manifests
from checkpoint.store import ExpertStore
from odmoe.machines.cluster_file import Host
from odmoe.machines.ship import COPIES_AT_ONCE, has_store, manifest_digest
from odmoe.machines.ssh import IDLE_S, SLOWEST, Ssh
from scheduler.errors import HostError
from scheduler.held import experts_of
from scheduler.store_parts import missing_parts
from scheduler.types import ExpertId, HeldRange

TAKE = Path(__file__).with_name("take_part.py")
BATCH = 64 << 20
"""Bytes that are sent at once; what has come of them counts when all have. An expert is never split."""
_RUN = 'python3 -c "import sys; exec(sys.stdin.buffer.read({length}))"'

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """Which experts hosts have of a store, and which they are to get, by address."""

    store: ExpertStore
    digest: str
    sizes: dict[ExpertId, int]
    held: dict[str, frozenset[ExpertId]]
    missing: dict[str, frozenset[ExpertId]]

    def bytes_after(self, address: str, facts: Facts) -> int:
        """What the store takes on a host when it has all that it is to get: beside what is there, if that stays."""
        kept = there_bytes(facts, self.store.path.name) if self.held[address] else 0
        return kept + sum(self.sizes[expert] for expert in self.missing[address])


def there_bytes(facts: Facts, name: str) -> int:
    """What a store takes on a host's disk now."""
    return int((facts["stores"].get(name) or {}).get("bytes", 0))


def plan_parts(
    store: ExpertStore, hosts: Iterable[Host], facts: Mapping[str, Facts], replicas: int, spare: int = 0
) -> Parts:
    """Who is to get what. `facts` are of these hosts, by address. `spare`: bytes that stay free on each disk.

    Raises ConfigError, or DoesNotFitError if the hosts have too little room.
    """
    digest, sizes = manifest_digest(store.path), expert_sizes(store)
    held = {host.address: held_there(facts[host.address], store, digest) for host in hosts}
    rooms = {}
    for address in held:
        taken = sum(sizes[expert] for expert in held[address]) or there_bytes(facts[address], store.path.name)
        rooms[address] = facts[address]["disk_free"] + taken - spare
    return Parts(store, digest, sizes, held, missing_parts(sizes, rooms, replicas, held))


def held_there(facts: Facts, store: ExpertStore, digest: str) -> frozenset[ExpertId]:
    """The experts of this store that a host has. Those of a copy that was interrupted count."""
    name = store.path.name
    if has_store(dict(facts), name, digest):
        return frozenset(expert_sizes(store))
    if not _has_part(facts, name, digest):
        return frozenset()
    listed = facts["parts"][name]["experts"]
    return experts_of(HeldRange(int(layer), *ends) for layer, some in listed.items() for ends in some)


def _has_part(facts: Facts, name: str, digest: str) -> bool:
    """Whether a host has a part of this very store, with any experts or none. A copied folder's list may not say of
    which store it is: its manifest does."""
    part, there = facts.get("parts", {}).get(name), facts["stores"].get(name) or {}
    return part is not None and part.get("manifest", there.get("manifest")) == digest and not there.get("fault")


def push_parts(
    ssh: Ssh,
    hosts: Iterable[Host],
    parts: Parts,
    facts: Mapping[str, Facts],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, HostError]:
    """Give hosts what they miss. Returns the failures by address. What has come of an interrupted copy stays, and a
    host that runs meanwhile reads what it has. `progress(host, done, total)` is in bytes, of each host."""

    def copy(host: Host) -> None:
        found, name = facts[host.address], parts.store.path.name
        fresh = found["stores"].get(name) is not None and not _has_part(found, name, parts.digest)
        total, done = sum(parts.sizes[expert] for expert in parts.missing[host.address]), 0
        if progress:
            progress(host.name, 0, total)
        for batch, last in _batches(parts, host.address):
            length = sum(parts.sizes[expert] for expert in batch)
            deadline = 2 * IDLE_S + length / SLOWEST
            script = TAKE.read_bytes()
            ssh.run(host, _RUN.format(length=len(script)), deadline, script + _request(parts, batch, last, fresh))
            fresh, done = False, done + length
            if progress:
                progress(host.name, done, total)

    behind = [host for host in hosts if _is_behind(parts, facts[host.address], host.address)]
    found = ssh.each(behind, copy, COPIES_AT_ONCE)
    return {address: error for address, error in found.items() if isinstance(error, HostError)}


def _is_behind(parts: Parts, facts: Facts, address: str) -> bool:
    there = facts["stores"].get(parts.store.path.name) or {}
    return bool(parts.missing[address]) or there.get("manifest") != parts.digest or bool(there.get("fault"))


def _batches(parts: Parts, address: str) -> Iterator[tuple[list[ExpertId], bool]]:
    """A host's missing experts, as many at a time as are sent at once, and whether they are the last. At least once."""
    batch: list[ExpertId] = []
    nbytes = 0
    for expert in sorted(parts.missing[address]):
        nbytes += parts.sizes[expert]
        if batch and nbytes > BATCH:
            yield batch, False
            batch, nbytes = [], parts.sizes[expert]
        batch.append(expert)
    yield batch, True


def _request(parts: Parts, batch: list[ExpertId], last: bool, fresh: bool) -> bytes:
    """What `take_part` reads. The manifests come with the last batch: before, the folder is no store."""
    store, extents = parts.store, extents_of(parts.store, batch)
    texts = [(HELD, json.dumps({"manifest": parts.digest, **json.loads(held_text(batch))}))]
    if last:
        texts += [(file.name, file.read_text()) for file in manifests(store)]
    asked = {"store": store.path.name, "fresh": fresh, "last": last, "sizes": file_sizes(store)}
    asked |= {"extents": extents, "texts": texts}
    return json.dumps(asked).encode() + b"\n" + b"".join(_read(store.path / file, *at) for file, *at in extents)


def _read(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)
