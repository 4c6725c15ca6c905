"""Inspects all machines of a cluster at once and checks that each is fit for its node."""

from __future__ import annotations

import json
import re
import shlex
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odmoe.bundled import bundled_root
from odmoe.machines.cluster_file import Host
from odmoe.machines.owners.ownership import faults as owner_faults
from odmoe.machines.owners.ownership import same_machine
from odmoe.machines.ship import ENVIRONMENT, RUNTIME_LOCK, environment_file, has_store
from odmoe.machines.ssh import Ssh
from scheduler.errors import ConfigError, HostError
from scheduler.yaml_file import read_yaml

PROBE = Path(__file__).with_name("probe.py")
PROBE_S = 30.0
STOP_S = 30.0
OLDEST = (3, 11)
SKEW_S = 60.0
SPARE = 256 << 20  # bytes of disk beside the store: logs, Ray's session
ENVIRONMENT_BYTES = 2 << 30  # of ~/odmoe/venv
HOME, RAY_LOGS = "~/odmoe", "/tmp/ray"
NAMED = 3  # packages that a message names

Facts = dict[str, Any]

_START = """import sys
if sys.version_info < (3, 7):
    print('{{"python": "%d.%d.%d"}}' % sys.version_info[:3])
    sys.exit()
exec(compile({source!r}, "probe", "exec"))
"""


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of a host.

    `versions` are package versions by name. `code` is a digest, or None before `ray up`, which copies the code and
    makes an environment that is missing or older than `lock_time`. `store` is (name, digest of the manifest, bytes) or
    None. `ports` are those that must be free or the cluster's own, by role. With a `cluster_id` the host must be that
    cluster's or free, unless `take_over`.
    """

    versions: dict[str, str]
    code: str | None = None
    store: tuple[str, str, int] | None = None
    lock_time: float = 0.0
    ports: Mapping[str, Iterable[int]] = field(default_factory=dict)
    cluster_id: str | None = None
    take_over: bool = False


def probe(ssh: Ssh, host: Host) -> Facts:
    """The facts of `odmoe.machines.probe` on a host, and `skew_s`, by how much its clock is ahead of ours. Raises
    HostError."""
    before = time.time()
    facts = ask(ssh, host, "facts", PROBE_S)
    after = time.time()
    if "time" in facts:
        facts["skew_s"] = min(facts["time"] - before, 0.0) or max(facts["time"] - after, 0.0)
    return facts


def stop_processes(ssh: Ssh, host: Host, cluster_id: str | None, release: bool) -> Facts:
    """End all of the cluster's processes on a host: {"stopped": names, "left": names}. With `release` the host is
    nobody's afterwards. If it is another cluster's, nothing is done, and the answer has its `owner`. Raises HostError.
    """
    return ask(ssh, host, "stop", STOP_S, {"id": cluster_id or "", "release": release})


def ask(
    ssh: Ssh, host: Host, what: str, deadline_s: float, argument: Facts | None = None, script: Path = PROBE
) -> Facts:
    """What an action of `odmoe.machines.probe`, or of another such script, answers on a host; only {"python": version}
    if that is too old. Raises HostError."""
    given = "" if argument is None else f" {shlex.quote(json.dumps(argument))}"
    output = ssh.run(host, f"python3 - {what}{given}", deadline_s, as_sent(script))
    try:
        return last_object(output)
    except ValueError:
        raise _fault(host, f"its python3 answered {output[-80:]!r}", "see what its shell prints by itself") from None


def as_sent(script: Path) -> bytes:
    """A script such that a Python too old for it prints its version instead."""
    return _START.format(source=script.read_text()).encode()


def last_object(output: str) -> Facts:
    """The last line that is a JSON object: a login shell may print other lines before. Raises ValueError."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1] if lines else ""))


def preflight(ssh: Ssh, hosts: Iterable[Host], required: Requirements) -> tuple[dict[str, Facts], dict[str, HostError]]:
    """The facts of the fit hosts and the errors of the others, by address. Bounded; all hosts at once."""
    hosts = list(hosts)
    facts: dict[str, Facts] = {}
    failed: dict[str, HostError] = {}
    asked = ssh.each(hosts, lambda host: probe(ssh, host))
    main = next((host for host in hosts if host.role == "main_node" and isinstance(asked[host.address], dict)), None)
    for host in hosts:
        found = asked[host.address]
        try:
            if isinstance(found, HostError):
                raise found
            check(host, found, required, None if main is None else asked[main.address])
            facts[host.address] = found
        except HostError as error:
            failed[host.address] = error
    names = {host.address: host.name for host in hosts}
    for first, address in same_machine(facts) if required.cluster_id else ():
        failed[address] = HostError(
            f"{names[address]} ({address}): it is the same machine as {names[first]} ({first}); every node needs a "
            "host of its own"
        )
    return {address: found for address, found in facts.items() if address not in failed}, failed


def check(host: Host, facts: Facts, required: Requirements, main: Any = None) -> None:
    """Raises HostError with all faults in one message. `main`: the facts of the main host, if they are known."""
    faults = list(_faults(facts, required))
    if len(facts) > 1:  # its Python is not too old
        faults += [*python_unlike(facts, main or facts), *processor_unlike(facts, main or facts)]
        faults += [*place_faults(facts, required), *address_faults(host, facts), *port_faults(host, facts, required)]
    if faults:
        causes, advice = zip(*faults, strict=True)
        raise _fault(host, "; ".join(causes), "; ".join(dict.fromkeys(advice)))


def _faults(facts: Facts, required: Requirements) -> Iterable[tuple[str, str]]:
    """(cause, advice) of each fault. If Python is too old for the probe, that is the only one."""
    venv = facts.get("venv")
    newest = (venv or facts)["python"]
    if _version(newest) < OLDEST:
        yield f"its Python is {newest}, 3.11 or newer is needed", "install Python 3.11 there, as python3"
        if "venv" not in facts:
            return
    if not facts["rsync"]:
        yield "there is no command rsync", "apt-get install rsync there"
    if venv is None:
        yield from environment_faults(facts, to_be_made=required.code is None)
    elif required.code is not None or venv["made"] >= required.lock_time:
        yield from version_faults(venv["packages"], required.versions)
    if required.code and facts["code"] != required.code:
        has = f"other code than this machine's ({facts['code'][:12]})" if facts["code"] else "no code"
        yield f"it has {has}, {required.code[:12]} is wanted", "odmoe up brings it"
    if required.cluster_id:
        yield from owner_faults(facts, required.cluster_id, required.take_over)
    if required.store:
        yield from room_faults(facts, *required.store)
    yield from clock_faults(facts)


def clock_faults(facts: Facts) -> Iterable[tuple[str, str]]:
    if abs(facts["skew_s"]) > SKEW_S:
        way = "ahead of" if facts["skew_s"] > 0 else "behind"
        yield (
            f"its clock is {abs(facts['skew_s']):.0f} s {way} this machine's, and certificates hold by the clock",
            "set it there: timedatectl set-ntp true",
        )


def python_unlike(facts: Facts, main: Facts) -> Iterable[tuple[str, str]]:
    """Whether its Python is another than the main host's."""
    has, wanted = ((one.get("venv") or one)["python"] for one in (facts, main))
    if has != wanted and len(main) > 1:
        where = "~/odmoe/venv" if facts.get("venv") else "python3"
        yield (
            f"its Python is {has} ({where}), the main host's is {wanted}, and Ray needs the same on all hosts",
            "install the same release and updates on all hosts, and remove ~/odmoe/venv where it is of another one",
        )


def processor_unlike(facts: Facts, main: Facts) -> Iterable[tuple[str, str]]:
    """Whether its kind of processor is another than the main host's."""
    machine, of_main = facts.get("machine"), main.get("machine")
    if machine != of_main:
        yield (
            f"its processor is {machine}, the main host's is {of_main}, so that its results would differ in last bits",
            "use hosts of one kind of processor",
        )


def place_faults(facts: Facts, required: Requirements) -> Iterable[tuple[str, str]]:
    """What is wrong with the folders in which it writes, apart from the room for the store."""
    places = facts.get("places", {})
    readonly = [name for name, place in places.items() if not place["writable"]]
    if readonly:
        yield f"{', '.join(readonly)} cannot be written", "make it belong to the user there, or mount it for writing"
    if not places.get(HOME, {"executes": True})["executes"]:
        yield f"no program can run from {HOME} (noexec)", "mount the home there without noexec"
    makes_environment = required.code is None and facts.get("venv") is None
    stores = places.get(f"{HOME}/stores", {}).get("device")
    for name, needed in ((HOME, ENVIRONMENT_BYTES if makes_environment else 0), (RAY_LOGS, SPARE)):
        place = places.get(name)
        alone = place and (required.store is None or place["device"] != stores)
        if place and alone and place["free"] < needed:
            yield f"{place['free'] / 1e9:.2f} GB are free in {name}, {needed / 1e9:.2f} are needed", "make room there"


def _device(places: Facts, name: str) -> Any:
    return places.get(name, {}).get("device")


def address_faults(host: Host, facts: Facts) -> Iterable[tuple[str, str]]:
    """Whether the address of the cluster file is none of the host's own."""
    own = facts.get("addresses")
    if own and host.address not in own and not host.address.startswith("127."):
        yield (
            f"{host.address} is no address of its own; it has {', '.join(a for a in own if not a.startswith('127.'))}",
            "give the address in the cluster file by which the hosts reach it",
        )


def port_faults(host: Host, facts: Facts, required: Requirements) -> Iterable[tuple[str, str]]:
    """Ports of the cluster at which another program listens."""
    listening = {int(port): who for port, who in facts.get("listening", {}).items()}
    taken = [f"{port} by {listening[port]}" for port in required.ports.get(host.role, ()) if port in listening]
    if taken:
        yield (
            f"ports of the cluster are taken: {', '.join(taken)}",
            "end that program there, or change the port in the cluster file's start commands (8701: in deploy/env.sh)",
        )


def ports_of(cluster_file: Path, root: Path | None = None) -> dict[str, list[int]]:
    """The ports at which the hosts of each role listen: those in the file's start commands, and of the nodes' streams.
    Raises ConfigError."""
    found = read_yaml(cluster_file, f"the cluster file {cluster_file}")
    environment = (root / ENVIRONMENT) if root else environment_file()
    try:
        node = [int(port) for port in re.findall(r"ODMOE_NODE_PORT=(\d+)", environment.read_text())]
    except OSError as error:
        raise ConfigError(f"{environment} cannot be read ({error.strerror})") from error
    ports = {}
    for role, key in (("main_node", "head_start_ray_commands"), ("worker_node", "worker_start_ray_commands")):
        text = " ".join(map(str, found.get(key) or ()))
        pairs = re.findall(r"--([a-z-]*port)[= ](\d+)", text)
        ports[role] = [int(port) for name, port in pairs if name not in ("min-worker-port", "max-worker-port")]
    ports["worker_node"] += node
    return {**ports, "shadow_node": ports["worker_node"]}


def worker_ports(cluster_file: Path) -> range:
    """The ports of Ray's processes on every host, from the file's start commands, or those of the project's
    cluster.yaml. Raises ConfigError."""
    found = read_yaml(cluster_file, f"the cluster file {cluster_file}")
    text = " ".join(map(str, found.get("worker_start_ray_commands") or ()))
    least, most = (re.search(rf"--{name}-worker-port[= ](\d+)", text) for name in ("min", "max"))
    return range(int(least[1]), int(most[1]) + 1) if least and most else range(6400, 6500)


def environment_faults(facts: Facts, to_be_made: bool) -> Iterable[tuple[str, str]]:
    if not to_be_made:
        yield "there is no environment ~/odmoe/venv", "make it there: make -C ~/odmoe/code env VENV=$HOME/odmoe/venv"
    elif not facts["make"]:
        yield "there is no command make, to make its environment with", "apt-get install make there"
    elif not facts["venv_module"]:
        yield "its python3 has no module venv, to make its environment with", "apt-get install python3-venv there"


def version_faults(has: dict[str, str], required: dict[str, str]) -> Iterable[tuple[str, str]]:
    names = sorted((name for name, version in required.items() if has.get(name) != version), key=lambda n: n not in has)
    other = [f"{name} {has.get(name) or 'missing'} (wanted {required[name]})" for name in names]
    if other:
        more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
        yield (
            f"other versions in ~/odmoe/venv: {', '.join(other[:NAMED])}{more}",
            "remove ~/odmoe/venv there, and odmoe up makes it again",
        )


def room_faults(facts: Facts, name: str, manifest: str, size: int) -> Iterable[tuple[str, str]]:
    if has_store(facts, name, manifest):
        return
    there = facts["stores"].get(name) or {}
    room, needed = facts["disk_free"] + there.get("bytes", 0), size + SPARE
    places = facts.get("places", {})
    if facts.get("venv") is None and _device(places, HOME) == _device(places, f"{HOME}/stores"):
        needed += ENVIRONMENT_BYTES
    if room < needed:
        yield (
            f"{room / 1e9:.2f} GB are free in ~/odmoe/stores, the store {name} needs {needed / 1e9:.2f}",
            "make room, or remove stores: odmoe host-stores lists them",
        )


def pinned_versions(root: Path | None = None) -> dict[str, str]:
    """Locked versions of the packages in pyproject.toml. `root`: None is this installation's. Raises ConfigError."""
    root = root or bundled_root()
    lock = root / RUNTIME_LOCK
    lock = lock if lock.is_file() else root / "requirements.lock"
    try:
        asked = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        locked = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock.read_text(), re.MULTILINE))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"pyproject.toml or requirements.lock in {root} cannot be read: {error!r}") from error
    names = {_name(re.split(r"[^\w.-]", line)[0]) for line in asked}
    return {_name(name): version for name, version in locked.items() if _name(name) in names}


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _fault(host: Host, cause: str, advice: str) -> HostError:
    return HostError(f"{host.name} ({host.address}): {cause}; {advice}")
