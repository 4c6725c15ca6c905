"""Asks machines for what the checks need: each question has a deadline, and one that fails is a fact, too."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import PROBE, PROBE_S, as_sent, ask, last_object, probe
from odmoe.machines.ssh import Ssh
from scheduler.errors import HostError

ON_HOST = Path(__file__).with_name("on_host.py")
FILE_BYTES, READ_S = 128 << 20, 2.0
"""How much is written to measure a disk without a store, and how long is read."""
EXAMINE_S, DISK_S, LINK_S = 90.0, 30.0, 40.0
VERIFY_LEAST_S, VERIFY_RATE = 120.0, 20e6
"""Seconds for `--deep`, and further ones for the bytes of the store at that rate."""
HOST_COMMANDS = ("rsync", "make", "timeout")
HERE_COMMANDS = ("ssh", "ssh-keygen", "rsync")
LEAST_FACTS = 2
"""A host whose Python is too old for the script answers no more than that."""
VERIFY = """
import json, sys
from pathlib import Path
from checkpoint.store import ExpertStore
from scheduler.errors import ODMoEError
found = {}
for store in map(Path, sys.argv[1:]):
    try:
        ExpertStore.open(store).verify()
        found[store.name] = ""
    except ODMoEError as error:
        found[store.name] = str(error)
print(json.dumps({"stores": found}))
"""

Facts = dict[str, Any]
Step = Callable[[str, int, int], None]
"""What is asked, how many machines have answered, of how many."""


def ask_here(script: Path, what: str, deadline_s: float, argument: Facts | None = None) -> Facts:
    """What an action of a script for hosts answers on this machine, in a process of its own. Raises HostError."""
    words = [sys.executable, "-", what, *([json.dumps(argument)] if argument is not None else [])]
    return _run_here(words, what, deadline_s, as_sent(script))


def _run_here(words: list[str], what: str, deadline_s: float, given: bytes = b"") -> Facts:
    try:
        done = subprocess.run(words, input=given, capture_output=True, timeout=deadline_s, check=False)
        return last_object(done.stdout.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        raise HostError(f"{what} took longer than {deadline_s:.0f} s") from None
    except OSError as error:
        raise HostError(f"{sys.executable} cannot be started: {error.strerror}") from error
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise HostError(f"{what} failed: {lines[-1] if lines else 'it printed nothing'}") from None


def known_or_fault(question: Callable[[], Facts]) -> Facts:
    """The answer, or {"fault": why there is none}."""
    try:
        return question()
    except HostError as error:
        return {"fault": str(error).partition("): ")[2] or str(error)}


def examine_here(stores: Path, keys: list[str], measure: bool, step: Step) -> Facts:
    """All facts of this machine. `stores`: the folder of its stores. `keys`: folders of keys, which may be none."""
    steps = 3 if measure else 2
    step("this machine", 0, steps)
    facts = known_or_fault(lambda: ask_here(PROBE, "facts", PROBE_S))
    facts = {"python": ".".join(map(str, sys.version_info[:3])), "skew_s": 0.0, **_or_unknown(facts)}
    step("this machine", 1, steps)
    asked = {"keys": keys, "python": sys.executable, "commands": HERE_COMMANDS, "folder": str(stores), "always": True}
    asked |= {"address": "127.0.0.1", "ports": []}
    facts |= _or_unknown(known_or_fault(lambda: ask_here(ON_HOST, "examine", EXAMINE_S, asked)))
    step("this machine", 2, steps)
    if measure:
        facts["disk"] = known_or_fault(lambda: ask_here(ON_HOST, "disk", DISK_S, _disk(str(stores))))
        step("this machine", 3, steps)
    else:
        facts["disk"] = {"fault": "--quick measures nothing"}
    return facts


def _or_unknown(found: Facts) -> Facts:
    return {"unknown": found["fault"]} if "fault" in found else found


def examine_hosts(ssh: Ssh, asked: list[Host], ports: range, step: Step) -> dict[str, Facts | HostError]:
    """The facts of every host that answers, and the errors of the others, by address. All at once.
    `ports`: of Ray's processes."""
    question = {
        "ports": list(ports),
        "keys": ["~/odmoe/keys"],
        "python": "~/odmoe/venv/bin/python",
        "always": False,
        "commands": HOST_COMMANDS,
        "folder": "~/odmoe/stores",
    }

    def one(host: Host) -> Facts:
        facts = probe(ssh, host)
        if len(facts) > LEAST_FACTS:  # its Python is not too old
            facts |= _or_unknown(
                known_or_fault(
                    lambda: ask(ssh, host, "examine", EXAMINE_S, {**question, "address": host.address}, ON_HOST)
                )
            )
        return facts

    return _ask_each(ssh, asked, one, "hosts", step)


def _ask_each(ssh: Ssh, asked: list[Host], job: Callable[[Host], Facts], what: str, step: Step) -> dict[str, Any]:
    done: list[str] = []
    step(what, 0, len(asked))

    def counted(host: Host) -> Facts:
        try:
            return job(host)
        finally:
            done.append(host.address)
            step(what, len(done), len(asked))

    return ssh.each(asked, counted)


def _disk(folder: str) -> Facts:
    return {"folder": folder, "bytes": FILE_BYTES, "seconds": READ_S}


def measure_disks(ssh: Ssh, asked: list[Host], facts: dict[str, Facts], step: Step) -> None:
    """Measure the hosts' disks: add `disk` to their facts. All at once, but those of one machine, such as containers
    or the testbed's, one after the other."""
    machines = {host.address: _machine(facts[host.address]) for host in asked}
    turns = {name: Lock() for name in machines.values()}

    def one(host: Host) -> Facts:
        with turns[machines[host.address]]:
            return measure(host)

    def measure(host: Host) -> Facts:
        return known_or_fault(lambda: ask(ssh, host, "disk", DISK_S, _disk("~/odmoe/stores"), ON_HOST))

    for address, found in _ask_each(ssh, asked, one, "disks", step).items():
        facts[address]["disk"] = found


def _machine(facts: Facts) -> str:
    """The same for all hosts of one kernel."""
    return str(facts.get("home_id", "")).partition(":")[0] or str(facts.get("addresses"))


def measure_links(ssh: Ssh, main: Host, asked: list[Host], facts: dict[str, Facts], step: Step) -> None:
    """Measure the link between the main host and each other one, one after the other: add `link` to the facts of the
    latter. A free one of Ray's ports is used, which a firewall lets through."""
    others = [host for host in asked if host.address != main.address]
    for number, host in enumerate(others):
        step("links", number, len(others))
        port = facts[host.address].get("free_port")
        if main.address not in facts:
            facts[host.address]["link"] = {"fault": "the main host does not answer"}
        elif port is None:
            facts[host.address]["link"] = {"fault": "none of Ray's ports is free there"}
        else:
            facts[host.address]["link"] = known_or_fault(partial(_link, ssh, main, host, port))
    step("links", len(others), len(others))


def _link(ssh: Ssh, main: Host, host: Host, port: int) -> Facts:
    """Raises HostError."""
    asked = {"address": host.address, "port": port, "token": secrets.token_hex(16)}
    with ThreadPoolExecutor(1) as pool:
        other_end = pool.submit(ask, ssh, host, "sink", LINK_S, asked, ON_HOST)
        found = ask(ssh, main, "link", LINK_S, asked, ON_HOST)
        told = other_end.result()
    return {"fault": told["fault"]} if "fault" in told and "blocked" not in found else found


def verify_all(stores: dict[Path, Facts], step: Step) -> Facts:
    """Read every byte of stores of this machine: {"verified": why each is not whole, or nothing}, or {"verify_fault":
    why they could not be read}."""
    whole = {store: found["bytes"] for store, found in stores.items() if not found["fault"]}
    step("stores", 0, 1)
    words = [sys.executable, "-c", VERIFY, *map(str, whole)]
    found = known_or_fault(lambda: _run_here(words, "reading the stores", _verify_s(sum(whole.values()))))
    step("stores", 1, 1)
    return _verified(found)


def _verified(found: Facts) -> Facts:
    return {"verify_fault": found["fault"]} if "fault" in found else {"verified": found["stores"]}


def verify_stores(ssh: Ssh, asked: list[Host], facts: dict[str, Facts], step: Step) -> None:
    """Read every byte of the hosts' stores, with the code there: add what `verify_all` returns to their facts."""

    def one(host: Host) -> Facts:
        stores = facts[host.address].get("stores") or {}
        whole = {name: store["bytes"] for name, store in stores.items() if not store["fault"]}
        if not whole:
            return {"stores": {}}
        if not facts[host.address].get("code"):
            return {"fault": "our code, which would read it, is not there yet; odmoe up brings it"}
        paths = " ".join(f"~/odmoe/stores/{shlex.quote(name)}" for name in whole)
        command = f". ~/odmoe/code/env.sh && python - {paths}"
        return last_object(ssh.run(host, command, _verify_s(sum(whole.values())), VERIFY.encode()))

    for address, found in _ask_each(ssh, asked, lambda host: known_or_fault(lambda: one(host)), "stores", step).items():
        facts[address] |= _verified(found)


def _verify_s(size: int) -> float:
    return VERIFY_LEAST_S + size / VERIFY_RATE
