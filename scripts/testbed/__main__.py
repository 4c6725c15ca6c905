"""Ten hosts on one machine: what `cluster.yaml` names is made of namespaces, each host with an sshd and a 1 Gbit link.

.venv/bin/python -m scripts.testbed up                     # make the hosts, or what is missing of them
.venv/bin/python -m scripts.testbed run ip address         # on the main host; --on worker-3 for another
.venv/bin/python -m scripts.testbed status                 # who is up, link rates, processes, memory, bytes
.venv/bin/python -m scripts.testbed unplug worker-3        # and plug; rate worker-3 100mbit
.venv/bin/python -m scripts.testbed measure main worker-3  # what the link carries, and its round trip
.venv/bin/python -m scripts.testbed down                   # nothing stays: processes, mounts, links, files, keys

A host has its own address, hostname, processes, home, /tmp, /var/tmp, /run and /dev/shm; of the file system, the rest
is this machine's. The project's environment is seen, read-only, at ~/odmoe/venv of every host: that stands for a
machine on which `make env` was already run. The interpreter, the checkout and the environment are seen where they are,
read-only if that is in a place that each host has for itself. Nothing else of these places is shared, and nothing of
this machine's home is visible. The hosts reach each other and, at the first address of their network, this machine, but
not the Internet. They are no prison: root there is root here. Needs root, and Linux with namespaces, veth, bridge, htb.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from odmoe.machines.cluster_file import Host, read_cluster_file
from scheduler.errors import ODMoEError
from scripts.lib.paths import ROOT
from scripts.testbed import keys, links, namespaces
from scripts.testbed.layout import BASE, Layout, TestbedError, check_machine, layout_of, locked, wait_until
from scripts.testbed.measure import measure_link
from scripts.testbed.status import host_status, table

HELP = (__doc__ or "").replace("\n\n", "\n\n\b\n", 1)  # \b: the commands keep their lines
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP, rich_markup_mode=None
)
ClusterPath = Annotated[Path, typer.Option("--cluster", help="The cluster file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
DEFAULT = ROOT / "cluster.yaml"
LINKS_GONE_S = 10.0


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def opened(path: Path) -> Layout:
    return layout_of(read_cluster_file(path))


@app.command()
def up(
    cluster: ClusterPath = DEFAULT,
    rate: Annotated[str, typer.Option(help="Of every link, each way.")] = "1gbit",
    shm: Annotated[str, typer.Option(help="At most this much in a host's /dev/shm.")] = "1g",
) -> None:
    """Make the hosts; if some are there, what is missing of them."""
    start = time.perf_counter()
    layout = opened(cluster)
    links.bits(rate)
    namespaces.homes(layout.cluster.user)
    check_machine()
    with locked(layout.cluster.name):
        links.check_range_free(layout)
        public, fresh = keys.make_keys(layout)
        if fresh:
            tell(f"made the ssh key {keys.key_of(layout)}; `down` removes it")
        keys.write_known_hosts(layout)
        if links.make_bridge(layout):
            tell(f"bridge {layout.bridge}: this machine is {layout.gateway} in {layout.network}")
        running = namespaces.find(layout)
        failed: list[str] = []
        with ThreadPoolExecutor(len(layout.cluster.hosts)) as pool:
            jobs = [
                pool.submit(raise_host, layout, host, running.get(host.name), rate, shm, public)
                for host in layout.cluster.hosts
            ]
            for job in as_completed(jobs):
                try:
                    tell(job.result())
                except ODMoEError as error:
                    failed.append(str(error))
        if failed:
            raise TestbedError("\n         ".join([*failed, "run `up` again, or `down`"]))
    tell(f"{len(jobs)} hosts answer ssh after {time.perf_counter() - start:.1f} s, links {rate}")


def raise_host(layout: Layout, host: Host, running: namespaces.Running | None, rate: str, shm: str, public: str) -> str:
    """Makes or repairs one host. Returns a line that says what was done. Raises TestbedError."""
    start = time.perf_counter()
    known = layout.script(host.name).exists()
    first = running.first if running else None
    found: list[str] = []
    if first is None:
        if running:
            namespaces.end(running)
        remove_old_link(layout, host)
        namespaces.write_private(layout, host, shm, public)
        starting = namespaces.start(layout, host)
        links.connect(layout, host, starting.process.pid, rate)
        starting.go_on()
        found = ["its first process was gone"] if known else []
    else:
        found = links.connect(layout, host, first, rate)
        found += ["another key"] if namespaces.authorize(layout, host, public) else []
    keys.log_in(layout, host)
    what = "up" if not known else f"repaired ({', '.join(found)})" if found else "already up"
    return f"{host.name:<10} {host.address:<15} {what}, {time.perf_counter() - start:.1f} s"


def remove_old_link(layout: Layout, host: Host) -> None:
    """The kernel takes a link away some time after the last process of its host."""
    device = layout.link(host)
    if links.exists(device):
        links.remove(device)
    if not wait_until(lambda: not links.exists(device), LINKS_GONE_S):
        raise TestbedError(f"{host.name}: the old link {device} does not go; try `ip link delete {device}`")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What to run, with its arguments.")],
    cluster: ClusterPath = DEFAULT,
    on: Annotated[str, typer.Option(help="A host's name or address.")] = "main",
) -> None:
    """Run a command on a host, as a login there would; its exit code is ours."""
    layout = opened(cluster)
    host = layout.cluster.find(on)
    inside = namespaces.enter(alive(layout, host), layout.cluster.user, command)
    os.execv(inside[0], inside)


def alive(layout: Layout, host: Host) -> int:
    """The host's first process. Raises TestbedError."""
    running = namespaces.find(layout).get(host.name)
    if running is None or running.first is None:
        raise TestbedError(f"{host.name} ({host.address}) is not up; run `python -m scripts.testbed up`")
    return running.first


@app.command()
def status(cluster: ClusterPath = DEFAULT, as_json: AsJson = False) -> None:
    """Each host: up, reachable, link rate, processes, memory, bytes so far. Exit code 1 if a host is not well."""
    layout = opened(cluster)
    running = namespaces.find(layout)
    with ThreadPoolExecutor(len(layout.cluster.hosts)) as pool:
        jobs = [pool.submit(host_status, layout, host, running.get(host.name)) for host in layout.cluster.hosts]
        rows = [job.result() for job in jobs]
    if as_json:
        print(json.dumps({"cluster": layout.cluster.name, "bridge": layout.bridge, "hosts": rows}, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    if not all(row["up"] and row["ssh"] for row in rows):
        raise typer.Exit(1)


@app.command()
def unplug(host: str, cluster: ClusterPath = DEFAULT) -> None:
    """Pull a host's cable out; what runs there goes on."""
    layout = opened(cluster)
    links.set_plugged(layout, layout.cluster.find(host), False)


@app.command()
def plug(host: str, cluster: ClusterPath = DEFAULT) -> None:
    """Put a host's cable in again."""
    layout = opened(cluster)
    links.set_plugged(layout, layout.cluster.find(host), True)


@app.command()
def rate(host: str, rate: str, cluster: ClusterPath = DEFAULT) -> None:
    """Make a host's link slower or faster, each way: `rate worker-3 100mbit`."""
    layout = opened(cluster)
    one = layout.cluster.find(host)
    links.shape(layout, one, alive(layout, one), rate)


@app.command()
def measure(
    source: Annotated[str, typer.Argument(metavar="FROM")] = "main",
    target: Annotated[str, typer.Argument(metavar="TO")] = "worker-0",
    cluster: ClusterPath = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """What plain TCP carries between two hosts, each way, and how long a small message takes there and back."""
    layout = opened(cluster)
    ends = [layout.cluster.find(name) for name in (source, target)]
    found = measure_link(layout, ends[0], ends[1], [alive(layout, end) for end in ends])
    if as_json:
        print(json.dumps(found))
        return
    ways = f"{found['to'] / 1e9:.3f} Gbit/s from {source} to {target}, {found['from'] / 1e9:.3f} Gbit/s back"
    print(f"{ways}, {1e6 * found['trip_s']:.0f} us there and back")


@app.command()
def check() -> None:
    """Whether this machine can make such hosts; if not, why not."""
    check_machine()
    tell("this machine can make the testbed's hosts")


@app.command()
def down(cluster: ClusterPath = DEFAULT) -> None:
    """Remove everything, also after a crash; fails naming what is left, should anything be."""
    layout = opened(cluster)
    if os.geteuid():
        check_machine()
    with locked(layout.cluster.name):
        hosts = namespaces.kill_all(layout)
        for device in links.of_cluster(layout):
            links.remove(device)
        namespaces.unmount(layout)
        removed = keys.remove_keys(layout)
        if layout.root.exists():
            shutil.rmtree(layout.root)
        wait_until(lambda: not left_over(layout), LINKS_GONE_S)
        left = left_over(layout)
    if BASE.exists() and not any(BASE.iterdir()):
        BASE.rmdir()
    if left:
        raise TestbedError(f"still there: {'; '.join(left)}; run `down` again")
    for name in removed:
        tell(f"removed {name}")
    tell(f"{hosts} hosts ended; no process, mount, link, namespace or file of them is left")


def left_over(layout: Layout) -> list[str]:
    """Whatever is still there of the testbed."""
    running = namespaces.find(layout)
    left = [f"processes of {name}: {found.processes}" for name, found in running.items()]
    left += [f"link {name}" for name in links.of_cluster(layout)]
    left += [f"mount {place}" for place in namespaces.stray_mounts(layout)]
    return left + ([f"directory {layout.root}"] if layout.root.exists() else [])


def main() -> None:
    try:
        app()
    except ODMoEError as error:
        tell(f"testbed: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
