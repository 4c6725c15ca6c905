"""`odmoe up`: takes machines that answer ssh to ready nodes, or names each host that is not ready, with the reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from checkpoint.hub import find_model
from checkpoint.manifest import MANIFEST
from checkpoint.sharding.source import open_source
from odmoe.clusters.host_place import check_host_place
from odmoe.machines.cluster_file import ClusterFile, Host, read_cluster_file
from odmoe.machines.head import Head
from odmoe.machines.home import cluster_dir, cluster_id, only_one, write_token
from odmoe.machines.owners.claims import Claims
from odmoe.machines.owners.launch_record import as_launched, check_same_file, end_former, remember
from odmoe.machines.owners.ownership import describe_owner
from odmoe.machines.preflight import (
    SPARE,
    Facts,
    Requirements,
    check,
    pinned_versions,
    ports_of,
    preflight,
    stop_processes,
)
from odmoe.machines.ray_cli import ray_says, run_ray
from odmoe.machines.ship import (
    STORES,
    certificate_digest,
    code_digest,
    digest_in,
    lock_time,
    manifest_digest,
    push_keys,
    push_store,
)
from odmoe.machines.ship_parts import Parts, plan_parts, push_parts
from odmoe.machines.ssh import Ssh, size_of
from odmoe.machines.table import HostTable, cause, copy_bars
from odmoe.settings.settings import Settings
from odmoe.stores import store_of
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, HostError, LaunchError, LinkError, ODMoEError
from scheduler.timing.profile import find_profile

SILENT_S = 60.0
"""A node that has sent nothing for this long is shown as silent."""
STATUS_S = 30.0
AGAIN_S = 2.0
CONFIG = "config.json"


@dataclass
class _Turns:
    """The time of each step."""

    spent: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def end(self, what: str) -> None:
        now = time.monotonic()
        self.spent[what] = self.spent.get(what, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        return ", ".join(f"{what} {spent:.1f}" for what, spent in self.spent.items())


class Reached(Enum):
    """How far an `odmoe up` came, by what it has left on the hosts."""

    CHECKS = "no host was changed"
    COPIES = "no node was changed. The hosts are claimed, and have some of the copies"
    NODES = "Ray and the nodes go on starting, or running, on the hosts"


def up(file: Path, settings: Settings, terminal: Terminal, timeout_s: float = 300.0, take_over: bool = False) -> None:
    """Bring up the cluster of a file with the model in `settings`. What is right already is left alone.

    No host is changed before all that can fail without a change was checked: model, store, settings, every host, and
    that none is another cluster's. With `take_over` hosts of other clusters are taken, and what these run there ends.

    `timeout_s` limits the time from `ray up` until every node is ready. A copy of the store may take as long as it
    makes progress. Raises ConfigError, CheckpointError, StoreError, or LaunchError if a host is not fit or not ready;
    such hosts are printed before.
    """
    if not settings.model:
        raise ConfigError("--model is not given; give a model directory, e.g. -m models/demo-moe")
    cluster = read_cluster_file(file)
    for host in cluster.hosts:
        settings.replace(**host.settings)  # a host's own may not go with those of all
    _check_shadow_hosts(cluster, settings)
    _check_model(settings.model)
    check_host_place(settings, None if settings.profile is None else find_profile(settings.profile))
    folder = cluster_dir(cluster.name)
    with only_one(folder), Ssh.for_cluster(cluster, folder) as ssh:
        work = _BringUp(ssh, cluster, folder, settings, terminal)
        try:
            work.run(timeout_s, take_over)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                terminal.print_always(f"{work.reached.value}{_next(work.reached, file)}")
            work.give_up()
            raise


def _check_shadow_hosts(cluster: ClusterFile, settings: Settings) -> None:
    """Raises ConfigError. Each part of the shadow needs a host."""
    listed = len(cluster.hosts_of("shadow_node"))
    if settings.shadow_hosts > max(listed, 1):
        raise ConfigError(
            f"--shadow-hosts is {settings.shadow_hosts}, but {cluster.path} lists {listed} as shadow_node; "
            "list as many there, or give fewer --shadow-hosts"
        )


def _check_model(name: str) -> None:
    """Raises CheckpointError if there is no model of that name, before any of it is downloaded."""
    path = find_model(name, [CONFIG])
    if path == Path(name).expanduser() and not (path / MANIFEST).is_file():
        open_source(path)


def _next(reached: Reached, file: Path) -> str:
    if reached is Reached.CHECKS:
        return ""
    what = "frees the hosts" if reached is Reached.COPIES else "ends them, odmoe status shows them"
    return f"; odmoe down {file} {what}, odmoe up goes on"


class _BringUp:
    def __init__(self, ssh: Ssh, cluster: ClusterFile, folder: Path, settings: Settings, terminal: Terminal) -> None:
        self._ssh, self._cluster, self._folder = ssh, cluster, folder
        self._settings, self._terminal = settings, terminal
        self._table = HostTable(terminal.console, cluster)
        self._turns = _Turns()
        write_token(folder)
        self._id = cluster_id(folder) or ""
        self._claims = Claims(cluster, self._id)
        self._wanted = Requirements(pinned_versions(), lock_time=lock_time(), cluster_id=self._id)
        self._digest = ""
        self._parts: Parts | None = None
        self.reached = Reached.CHECKS

    def run(self, timeout_s: float, take_over: bool) -> None:
        facts = self._fit(take_over)
        store = self._store(facts)
        self._make_keys()
        self._claim(store, take_over)
        self._push_keys()
        self._push_store(facts, store)
        until = time.monotonic() + timeout_s
        self._ray(facts, until)
        self._nodes(f"{STORES}/{store.name}", until, timeout_s)
        self._claims.settle(self._ssh, store.name)
        total = sum(self._turns.spent.values())
        self._say(f"ready in {total:.1f} s: {self._turns}")

    def give_up(self) -> None:
        """Record on the hosts that this `odmoe up` has ended."""
        if self.reached is not Reached.CHECKS:
            with Ssh.for_cluster(self._cluster, self._folder) as ssh:  # Ctrl-C may have closed the former
                self._claims.settle(ssh, None)

    def _fit(self, take_over: bool) -> dict[str, Facts]:
        """Inspect all hosts at once. Returns their facts by address."""
        check_same_file(self._folder, self._cluster)
        self._wanted = replace(self._wanted, take_over=take_over, ports=ports_of(self._cluster.path))
        facts, failed = preflight(self._ssh, self._cluster.hosts, self._wanted)
        self._turns.end("preflight")
        self._give_up(failed, "not fit")
        return facts

    def _make_keys(self) -> None:
        """Make missing certificates and the secret here, and renew old ones."""
        from odmoe.machines.certs import ensure_certs, write_cluster_secret

        hosts = self._cluster.hosts
        for line in ensure_certs(self._folder, [(host.name, host.address) for host in hosts]):
            self._say(line)
        write_cluster_secret(self._folder)

    def _claim(self, store: Path, take_over: bool) -> None:
        """Make all hosts this cluster's, and end what another cluster runs on those that are taken over."""
        self.reached = Reached.COPIES
        taken, failed = self._claims.make(self._ssh, store.name, take_over)
        if failed:
            self.reached = Reached.CHECKS
        self._give_up(failed, "not to be had")
        for address, owner in taken.items():
            held = owner["held"] or "nothing of it runs"
            self._say(f"{self._cluster.find(address).name} ({address}): taken from {describe_owner(owner)}; {held}")
        hosts = [host for host in self._cluster.hosts if taken.get(host.address, {}).get("held")]
        ended = self._ssh.each(hosts, lambda host: stop_processes(self._ssh, host, self._id, release=False))
        failed = {
            host.address: HostError(f"{host.name} ({host.address}): cannot be ended: {', '.join(found['left'])}")
            for host in hosts
            if not isinstance(found := ended[host.address], HostError) and found["left"]
        }
        failed |= {address: error for address, error in ended.items() if isinstance(error, HostError)}
        self._give_up(failed, "still run another cluster's nodes")

    def _push_keys(self) -> None:
        found = self._ssh.each(self._cluster.hosts, lambda host: push_keys(self._ssh, host, self._folder))
        self._turns.end("keys")
        self._give_up({a: error for a, error in found.items() if isinstance(error, HostError)}, "without keys")

    def _store(self, facts: dict[str, Facts]) -> Path:
        """Make the store if there is none, and check that settings and every host go with it."""
        from odmoe.clusters.configuration import check_joined, with_slots
        from odmoe.text import check_tokenizer

        settings = self._settings
        with self._terminal.progress() as progress:
            opened = store_of(settings, progress, check_tokenizer)
        workers = len(self._cluster.hosts_of("worker_node"))
        self._settings = with_slots(settings, opened, workers)
        check_joined(self._settings, opened, workers)
        store = opened.path.resolve()
        self._turns.end("store here")
        replicas = self._cluster.replicas
        if replicas is not None:
            self._parts = plan_parts(opened, self._cluster.hosts_of("worker_node"), facts, replicas, SPARE)
        self._give_up(self._check_hosts(facts, store), "cannot be given the store")
        return store

    def _push_store(self, facts: dict[str, Facts], store: Path) -> None:
        """All of it to every host; if the file says `replicas`, to workers their parts."""
        parts, hosts = self._parts, list(self._cluster.hosts)
        workers = self._cluster.hosts_of("worker_node") if parts else []
        with copy_bars(self._terminal.console, "store") as step:
            failed = push_store(self._ssh, [host for host in hosts if host not in workers], store, facts, step)
            if parts:
                failed |= push_parts(self._ssh, workers, parts, facts, step)
        self._turns.end("store there")
        self._give_up(failed, "without the store")

    def _check_hosts(self, facts: dict[str, Facts], store: Path) -> dict[str, HostError]:
        bad, digest, whole, parts = {}, manifest_digest(store), size_of([store]), self._parts
        for host in self._cluster.hosts:
            found = facts[host.address]
            size = parts.bytes_after(host.address, found) if parts and host.role == "worker_node" else whole
            try:
                check(host, found, replace(self._wanted, store=(store.name, digest, size)))
                self._check_use(host, found, store.name, digest)
            except HostError as error:
                bad[host.address] = error
        return bad

    def _check_use(self, host: Host, found: Facts, name: str, digest: str) -> None:
        """A store that would be made anew is not taken from nodes that read it: they would not read the new one. Raises
        HostError."""
        there, owner = found["stores"].get(name) or {}, found.get("owner") or {}
        fault = f"is damaged ({there['fault']})" if there.get("fault") else ""
        if not fault and there.get("manifest", digest) != digest:
            fault = "is another one, or has other forms"
        if fault and owner.get("id") == self._id and owner["held"] and name in owner.get("stores", [name]):
            raise HostError(
                f"{host.name} ({host.address}): its store {name} {fault}, and {owner['held']}; odmoe down "
                f"{self._cluster.path} ends that, then odmoe up replaces the store"
            )

    def _ray(self, facts: dict[str, Facts], until: float) -> None:
        """`ray up`, unless Ray runs on every host with this very code."""
        if not self._runs(facts):
            self._say("ray up: code to the hosts, and Ray on them")
            self.reached = Reached.NODES
            remember(self._folder, self._cluster, end_former(self._ssh, self._cluster, self._folder, self._say))
            show = self._say if self._terminal.debug else lambda line: None
            run_ray(self._cluster, self._folder, "up", max(1.0, until - time.monotonic()), show)
            self._digest = digest_in(self._folder / "code.tar.gz")
        self.reached = Reached.NODES
        self._turns.end("ray up")

    def _runs(self, facts: dict[str, Facts]) -> bool:
        """Whether the head runs this code for this file, and no host runs other code or other keys. Missing hosts are
        then being started by the head."""
        digest = self._digest = code_digest()
        head = facts[self._cluster.main.address]
        if not head["processes"] or head["code"] != digest or not as_launched(self._ssh, self._cluster):
            return False
        has = {address: found["certificate"] for address, found in facts.items() if found["certificate"]}
        if any(digest != certificate_digest(self._folder / address) for address, digest in has.items()):
            return False  # nodes read theirs when they start
        try:
            seen = Head(self._ssh, self._cluster).status(STATUS_S)
        except ODMoEError:
            return False
        states = {row["address"]: row["ray"] for row in seen["hosts"]}
        return states.keys() >= facts.keys() and all(
            facts[address]["code"] == digest
            for address, state in states.items()
            if state == "alive" and address in facts
        )

    def _nodes(self, store: str, until: float, timeout_s: float) -> None:
        """Wait until all nodes are ready, and show their states meanwhile."""
        try:
            with self._table.show():
                ready = self._start_nodes(store, until)
        except LinkError as error:
            within = f"not ready within {timeout_s:.0f} s" if time.monotonic() >= until else str(error)
            raise self._explain(within) from error
        except (HostError, LaunchError) as error:
            raise self._explain(str(error)) from error
        if not ready:
            raise self._explain("the head stopped before all was ready")
        self._turns.end("nodes")

    def _start_nodes(self, store: str, until: float) -> bool:
        """Whether all nodes became ready. They cannot be placed before Ray runs on every host, some time after `ray up`
        has ended; until then their start is repeated."""
        head = Head(self._ssh, self._cluster)
        while True:
            joined, ready = self._all_joined(), False
            try:
                for seen in head.start(self._settings, store, until):
                    self._table.update(seen)
                    ready = seen["ready"]
                return ready
            except HostError:
                raise
            except LaunchError:
                if joined or time.monotonic() + AGAIN_S > until:
                    raise
            time.sleep(AGAIN_S)
            with contextlib.suppress(ODMoEError):
                self._table.update(head.status(min(STATUS_S, max(1.0, until - time.monotonic()))))

    def _all_joined(self) -> bool:
        return all(self._table.rows[host.address]["ray"] == "alive" for host in self._cluster.hosts)

    def _explain(self, message: str) -> LaunchError:
        """An error with every host that is not ready, and the reasons that can be found."""
        behind = [
            host for host in self._cluster.hosts if self._table.rows[host.address]["state"] not in ("ready", "unused")
        ]
        rows = self._table.rows
        asked = [host for host in behind if rows[host.address]["ray"] != "alive"]
        joined = Requirements(self._wanted.versions, code=self._digest)
        _, faults = preflight(self._ssh, asked, joined)
        ray_lines = ray_says(self._ssh, self._cluster.main, asked)
        for host in behind:
            row = rows[host.address]
            if fault := faults.get(host.address):
                why = cause(fault)
            elif row["ray"] != "alive":
                why = f"Ray is {row['ray'] or 'not seen'} there" + _quote(ray_lines.get(host.address))
            elif (row["heartbeat_s"] or 0.0) >= SILENT_S:
                why = f"no heartbeat for {row['heartbeat_s']:.0f} s"
            else:
                why = row["detail"] or f"still {row['state']}"
            self._print_always(f"{host.name} ({host.address}): {why}")
        names = ", ".join(host.name for host in behind) or "none"
        return LaunchError(
            f"{message}; not ready: {names}; odmoe status {self._cluster.path} shows the hosts, odmoe down ends them"
        )

    def _give_up(self, failed: dict[str, HostError], how: str) -> None:
        """Print every host that failed. Raises LaunchError if any did."""
        for error in failed.values():
            self._print_always(str(error))
        if failed:
            count, names = len(failed), ", ".join(self._names(failed))
            raise LaunchError(f"{count} of {len(self._cluster.hosts)} hosts {how}: {names}; each is explained above")

    def _names(self, addresses: Iterable[str]) -> list[str]:
        return [host.name for host in self._cluster.hosts if host.address in set(addresses)]

    def _say(self, text: str) -> None:
        self._terminal.console.print(text, markup=False, soft_wrap=True)

    def _print_always(self, text: str) -> None:
        self._terminal.print_always(text)


def _quote(line: str | None) -> str:
    return f"; it says: {line}" if line else ""
