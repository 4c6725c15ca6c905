"""`odmoe host-stores --restore`: gives the hosts of a running cluster the experts that have lost holders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from odmoe.machines.cluster_file import Host, read_cluster_file
from odmoe.machines.home import cluster_dir, cluster_id, only_one
from odmoe.machines.owners.ownership import describe_owner, other_owner
from odmoe.machines.preflight import SPARE, Facts, probe
from odmoe.machines.ship import manifest_digest
from odmoe.machines.ship_parts import Parts, plan_parts, push_parts
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import copy_bars
from odmoe.stores import check_whole, open_verified
from odmoe.terminal import Terminal, megabytes
from scheduler.errors import ConfigError, HostError, LaunchError


def restore_parts(file: Path, store: Path, terminal: Terminal, as_json: bool = False) -> None:
    """Copy experts to the workers' hosts that answer, until as many of them have each as the file says, or all of them
    if they are fewer. Nothing that runs is touched, and no host's store is replaced.

    `store`: the whole store on this machine. Raises ConfigError, StoreError, DoesNotFitError, or LaunchError if a host
    could not be given its experts; such hosts are printed before.
    """
    cluster = read_cluster_file(file)
    if cluster.replicas is None:
        raise ConfigError(f"{file} has no replicas in its provider block: every worker has all experts; see odmoe up")
    opened = check_whole(open_verified(str(store.expanduser().resolve())))
    folder, wanted = cluster_dir(cluster.name), manifest_digest(opened.path)
    with only_one(folder), Ssh.for_cluster(cluster, folder) as ssh:
        workers = cluster.hosts_of("worker_node")
        answers = ssh.each(workers, lambda host: _fit_facts(ssh, host, cluster_id(folder), opened.path.name, wanted))
        facts = {address: found for address, found in answers.items() if not isinstance(found, HostError)}
        failed = {address: found for address, found in answers.items() if isinstance(found, HostError)}
        able = [host for host in workers if host.address in facts]
        _print_errors(failed)
        if able:
            parts = plan_parts(opened, able, facts, min(cluster.replicas, len(able)), SPARE)
            with copy_bars(terminal.console, "parts") as step:
                short = push_parts(ssh, able, parts, facts, step)
            _show([host for host in able if host.address not in short], parts, as_json)
            _print_errors(short)
            failed |= short
    if failed:
        raise LaunchError(f"{len(failed)} of {len(workers)} hosts were given nothing, or not all; see above")


def _fit_facts(ssh: Ssh, host: Host, own: str | None, name: str, wanted: str) -> Facts:
    """The facts of a host that may be written to. Raises HostError."""
    facts = probe(ssh, host)
    fault = ""
    if "stores" not in facts:
        fault = f"its Python is {facts['python']}, 3.11 or newer is needed"
    elif owner := other_owner(facts, own):
        fault = f"it belongs to {describe_owner(owner)}"
    elif (facts["stores"].get(name) or {}).get("manifest", wanted) != wanted:
        fault = f"it has another store of the name {name}; odmoe up replaces it"
    elif of_store := (facts["stores"].get(name) or {}).get("fault"):
        fault = f"its store {name} is damaged ({of_store}); end what runs there, then odmoe up replaces it"
    if fault:
        raise HostError(f"{host.name} ({host.address}): {fault}")
    return facts


def _print_errors(failed: dict[str, HostError]) -> None:
    for error in failed.values():
        print(error, file=sys.stderr, flush=True)


def _show(hosts: list[Host], parts: Parts, as_json: bool) -> None:
    """What each host was given, and has."""
    rows = {
        host.name: {
            "given": len(parts.missing[host.address]),
            "given_bytes": sum(parts.sizes[expert] for expert in parts.missing[host.address]),
            "experts": len(parts.held[host.address] | parts.missing[host.address]),
            "of": len(parts.sizes),
        }
        for host in hosts
    }
    if as_json:
        print(json.dumps(rows), flush=True)
        return
    for host in hosts:
        row = rows[host.name]
        given = f"{row['given']} experts given, {megabytes(row['given_bytes'])}" if row["given"] else "nothing missing"
        print(f"{host.name} ({host.address}): {given}; it has {row['experts']} of {row['of']}", flush=True)
