"""`odmoe doctor`: asks all machines, runs every check, and prints what is wrong and how to cure it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from odmoe.doctor import examination
from odmoe.doctor.machine import Facts, Machine, Place, Result, State, Wanted
from odmoe.doctor.needs import Needs, needs_of
from odmoe.doctor.table import run_checks
from odmoe.machines import probe
from odmoe.machines.cluster_file import ClusterFile, Host, read_cluster_file
from odmoe.machines.home import cluster_dir, cluster_id
from odmoe.machines.preflight import Requirements, pinned_versions, ports_of, worker_ports
from odmoe.machines.ship import code_digest
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import cause as cause_of
from odmoe.stores import cache_dir, uses_dir
from scheduler.errors import ConfigError, HostError
from scheduler.planning.shadow_bytes import SHADOW_BYTES

HERE = "this machine"
NODES = 8
"""Workers for which a model is planned without a cluster file: as `odmoe plan` does."""

Step = examination.Step
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What `odmoe doctor` is asked for. `measure`: disks and links. `deep`: read the stores."""

    cluster: Path | None = None
    model: str = ""
    shadow: str = "int8"
    measure: bool = True
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """All results, those of one machine together. `cluster`: its name in the file."""

    cluster: str | None
    needs: Needs | None
    results: list[Result]

    @property
    def failed(self) -> bool:
        return any(result.state is State.FAILURE for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints."""
        counts = Counter(result.state for result in self.results)
        return {
            "ok": not self.failed,
            "cluster": self.cluster,
            "needs": asdict(self.needs) if self.needs else None,
            "counts": {state.value: counts[state] for state in State},
            "checks": [asdict(result) for result in self.results],
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict())


def examine(asked: Asked, step: Step) -> Report:
    """Raises ConfigError for a wrong cluster file, CheckpointError for a wrong model. What is wrong with a machine is a
    result."""
    cluster = None if asked.cluster is None else read_cluster_file(asked.cluster)
    workers = NODES if cluster is None else len(cluster.hosts_of("worker_node"))
    if asked.shadow not in (schemes := [*SHADOW_BYTES, "none"]):
        raise ConfigError(f"--shadow is {asked.shadow!r}; allowed: {', '.join(schemes)}")
    parts = max(1, 0 if cluster is None else len(cluster.hosts_of("shadow_node")))
    needs = needs_of(asked.model, asked.shadow, workers, parts) if asked.model else None
    wanted = _wanted_of(cluster, needs)
    results = _examine_alone(asked, wanted, step) if cluster is None else _examine_cluster(asked, cluster, wanted, step)
    return Report(cluster.name if cluster else None, needs, results)


def _examine_alone(asked: Asked, wanted: Wanted, step: Step) -> list[Result]:
    folder = cache_dir() / "stores"
    facts = examination.examine_here(folder, [], asked.measure, step)
    stores = stores_here(folder, asked.model)
    facts["stores"] = {store.name: found for store, found in stores.items()}
    if asked.deep:
        facts |= examination.verify_all(stores, step)
    return run_checks(Machine(HERE, Place.ALONE, wanted, facts))


def stores_here(folder: Path, model: str) -> dict[Path, Facts]:
    """The stores of this machine's cache, or those of one model, or the store that `model` is."""
    given = Path(model).expanduser()
    if model and (given / "manifest.json").is_file():
        paths = [given]
    else:
        paths = [path for path in sorted(folder.glob("*")) if not model or _is_of(path, model)]
    found = {path: probe.store(str(path)) for path in paths if not path.name.startswith(".")}
    return {path: store for path, store in found.items() if store}


def _is_of(store: Path, model: str) -> bool:
    """Whether the store was used for this model last."""
    try:
        used = str(json.loads((uses_dir() / store.name).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return used == model or Path(used).expanduser().resolve() == Path(model).expanduser().resolve()


def _examine_cluster(asked: Asked, cluster: ClusterFile, wanted: Wanted, step: Step) -> list[Result]:
    folder = cluster_dir(cluster.name)
    keys = [str(folder), *(str(folder / host.address) for host in cluster.hosts)]
    own = examination.examine_here(cache_dir() / "stores", keys, False, step)
    try:
        connections = Ssh.for_cluster(cluster, folder)
    except ConfigError as error:  # there is no key
        cause, _, cure = str(error).partition("; ")
        own_results = run_checks(Machine(HERE, Place.LAUNCHER, wanted, own))
        return [*own_results, Result("ssh", HERE, State.FAILURE, f"{cause}; no host was checked", cure)]
    with connections as ssh:
        answers = examination.examine_hosts(ssh, list(cluster.hosts), wanted.worker_ports, step)
        facts = {address: found for address, found in answers.items() if not isinstance(found, HostError)}
        able = [host for host in cluster.hosts if len(facts.get(host.address, ())) > examination.LEAST_FACTS]
        if asked.deep:
            examination.verify_stores(ssh, able, facts, step)
        if asked.measure:
            examination.measure_disks(ssh, able, facts, step)
            examination.measure_links(ssh, cluster.main, able, facts, step)
    results = run_checks(Machine(HERE, Place.LAUNCHER, wanted, own, others=facts))
    for host in cluster.hosts:
        results += _of_host(host, answers[host.address], wanted, facts, asked.measure)
    return results


def _of_host(
    host: Host, answer: Facts | HostError, wanted: Wanted, facts: dict[str, Facts], measured: bool
) -> list[Result]:
    if isinstance(answer, HostError):
        cause, _, cure = cause_of(answer).rpartition("; ")
        return [Result("ssh", host.name, State.FAILURE, f"{cause}; nothing else of it was checked", cure)]
    if not measured:
        answer |= {name: {"fault": "--quick measures nothing"} for name in ("disk", "link")}
    if wanted.cluster is not None and host.address == wanted.cluster.main.address:
        answer["link"] = answer.get("link", {"fault": "the others' links begin here"})
    return [
        Result("ssh", host.name, State.OK, f"answers at {host.address}"),
        *run_checks(Machine(host.name, Place.HOST, wanted, answer, host, facts)),
    ]


def _wanted_of(cluster: ClusterFile | None, needs: Needs | None) -> Wanted:
    versions: dict[str, str] = _or_nothing(lambda: pinned_versions(), {})
    code = _or_nothing(code_digest, "")
    required = Requirements(versions)
    if cluster is not None:
        ports: dict[str, list[int]] = _or_nothing(lambda: ports_of(cluster.path), {})
        required = Requirements(versions, ports=ports, cluster_id=cluster_id(cluster_dir(cluster.name)))
    worker = worker_ports(cluster.path) if cluster else range(0)
    return Wanted(required, needs, cluster, code, _packages(versions), worker)


def _or_nothing(ask: Callable[[], T], nothing: T) -> T:
    """In an installation without these files there is nothing to compare with; the checks say so."""
    try:
        return ask()
    except ConfigError:
        return nothing


def _packages(names: dict[str, str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found
