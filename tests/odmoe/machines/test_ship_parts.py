"""Parts of a store as they lie on hosts; the hosts' scripts run here, without sshd."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoint.forms import FORMS
from checkpoint.held import HELD, held_text
from checkpoint.part_files import name_held, write_part
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from odmoe.machines import probe as probe_script
from odmoe.machines import restore_parts as restore_module
from odmoe.machines import ship_parts, take_part
from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.host_stores import _state
from odmoe.machines.preflight import ask, probe
from odmoe.machines.ship import has_store, manifest_digest
from odmoe.machines.ship_parts import plan_parts, push_parts
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, HostError, LaunchError
from scheduler.types import ExpertId
from support.machines.local_hosts import LocalSsh
from support.machines.ssh_hosts import write_cluster_file

pytestmark = pytest.mark.slow
REPLICAS = 2


@pytest.fixture
def store(demo_store: Callable[[str], Any], tmp_path: Path) -> ExpertStore:
    """The demo model's 64 experts, to change. Other tests may have added forms."""
    forms = shutil.ignore_patterns(*(pattern for form in FORMS for pattern in (f"{form}.json", f"*.{form}")))
    folder = shutil.copytree(demo_store("float32").path, tmp_path / "here" / "demo", ignore=forms)
    return ExpertStore.open(Path(folder))


class Lab:
    """Workers that are homes here."""

    def __init__(self, folder: Path, store: ExpertStore, count: int) -> None:
        self.ssh, self.store, self.count = LocalSsh(folder), store, count
        self.sent: Counter[str] = Counter()

    @property
    def hosts(self) -> list[Host]:
        hosts = [Host("worker_node", n, f"127.0.7.{n + 1}") for n in range(self.count)]
        for host in hosts:
            self.ssh.home(host.address).mkdir(parents=True, exist_ok=True)
        return hosts

    def folder(self, number: int) -> Path:
        return self.ssh.home(f"127.0.7.{number + 1}") / "odmoe" / "stores" / self.store.path.name

    def part(self, number: int) -> ExpertStore:
        return ExpertStore.open(self.folder(number))

    def facts(self, host: Host) -> dict[str, Any]:
        """What the probe says of stores, in this process, which is quicker."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe_script, "STORES", str(self.ssh.home(host.address) / "odmoe" / "stores"))
            free = probe_script.disk_free(probe_script.STORES)
            return {"stores": probe_script.stores(), "parts": probe_script.parts(), "disk_free": free}

    def up(self, *, without: int | None = None) -> dict[str, HostError]:
        """Push to all, or all but one. `sent` has the bytes then."""
        hosts = [host for host in self.hosts if host.number != without]
        facts = {host.address: self.facts(host) for host in hosts}
        parts = plan_parts(self.store, hosts, facts, REPLICAS)
        self.sent.clear()

        def note(host: str, done: int, _: int) -> None:
            self.sent[host] = done

        return push_parts(self.ssh, hosts, parts, facts, note)

    def copies(self, numbers: range) -> Counter[int]:
        """How many of these hosts have an expert -> how many experts."""
        held = Counter(expert for number in numbers for expert in self.part(number).held or ())
        return Counter(held.values())


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def check_bytes(part: ExpertStore, whole: ExpertStore) -> None:
    for expert in part.held or ():
        for form in ("", *whole.manifest.forms):
            (there, blob), (here, _) = part.locate(*expert, form), whole.locate(*expert, form)
            with there.open("rb") as one, here.open("rb") as other:
                one.seek(blob.offset), other.seek(blob.offset)
                assert one.read(blob.length) == other.read(blob.length)


def test_eight_hosts_get_a_quarter_each_and_only_a_new_host_s_part_moves(tmp_path: Path, store: ExpertStore) -> None:
    lab = Lab(tmp_path, store, 8)
    assert lab.up() == {}
    assert lab.copies(range(8)) == {2: 64}
    for number in range(8):
        part = lab.part(number)
        part.verify()
        check_bytes(part, store)
        assert part.manifest.model_digest == store.manifest.model_digest
        assert disk_bytes(lab.folder(number)) <= 0.26 * disk_bytes(store.path)
    assert lab.up() == {}
    assert not lab.sent  # nobody is asked for anything
    lab.count = 9
    assert lab.up() == {}
    share = 2 * store.manifest.expert_bytes / 9
    assert lab.sent.keys() == {"worker-8"}
    assert share - store.manifest.blob_bytes <= lab.sent["worker-8"] <= share
    lab.part(8).verify()


def test_the_count_is_restored_among_those_that_are_left(tmp_path: Path, store: ExpertStore) -> None:
    lab = Lab(tmp_path, store, 4)
    assert lab.up() == {}
    lost = lab.part(3).held or frozenset()
    inodes = {file: file.stat().st_ino for n in range(3) for file in lab.folder(n).glob("*.experts")}
    assert lab.up(without=3) == {}
    assert sum(lab.sent.values()) == len(lost) * store.manifest.blob_bytes
    assert lab.copies(range(3)) == {2: 64}
    for number in range(3):
        lab.part(number).verify()
    assert {file: file.stat().st_ino for file in inodes} == inodes  # a worker that has them open reads on


def test_an_interrupted_copy_is_no_store_and_is_taken_up_again(
    tmp_path: Path, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship_parts, "BATCH", 3 * store.manifest.blob_bytes)
    lab, run, left = Lab(tmp_path, store, 3), LocalSsh.run, [4]

    def cut(self: LocalSsh, host: Host, command: str, deadline_s: float, data: bytes | None = None) -> str:
        if "python3 -c" in command and host.number == 1:
            left[0] -= 1
            if left[0] < 0:
                raise HostError(f"{host.name} ({host.address}): the connection is gone")
            if left[0] == 0:
                data = (data or b"")[:-100]  # it ends in the middle
        return run(self, host, command, deadline_s, data)

    monkeypatch.setattr(LocalSsh, "run", cut)
    assert "the copy ended early" in str(lab.up()["127.0.7.2"])
    assert not (lab.folder(1) / "manifest.json").exists()
    begun = json.loads((lab.folder(1) / HELD).read_text())["experts"]
    assert sum(last - first + 1 for some in begun.values() for first, last in some) == 9
    monkeypatch.setattr(LocalSsh, "run", run)
    assert lab.up() == {}
    assert lab.sent.keys() == {"worker-1"}
    assert lab.sent["worker-1"] == (len(lab.part(1).held or ()) - 9) * store.manifest.blob_bytes
    lab.part(1).verify()
    assert lab.copies(range(3)) == {2: 64}


def test_a_host_with_everything_keeps_it_and_one_of_another_model_starts_anew(
    tmp_path: Path, store: ExpertStore
) -> None:
    lab = Lab(tmp_path, store, 3)
    assert lab.hosts
    shutil.copytree(store.path, lab.folder(0))
    shutil.copytree(store.path, lab.folder(1))
    manifest = lab.folder(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format"', ' "format"'))
    assert lab.up() == {}
    assert lab.part(0).held is None
    assert lab.part(1).held is not None
    assert not (lab.folder(1) / "dense").exists()
    assert len((lab.part(1).held or frozenset()) | (lab.part(2).held or frozenset())) == 64
    lab.part(1).verify()


def test_parts_copied_by_hand_count_and_stay(tmp_path: Path, store: ExpertStore) -> None:
    """An empty one, too: a worker may have it open."""
    lab = Lab(tmp_path, store, 3)
    experts = frozenset(expert for expert, _ in store.experts())
    by_hand = (experts, frozenset(one for one in experts if one.layer == 0), frozenset[ExpertId]())
    for number, some in enumerate(by_hand):
        write_part(store, lab.folder(number), some, lambda nbytes: None)
    inodes = {file: file.stat().st_ino for n in range(3) for file in lab.folder(n).glob("*.experts")}
    assert lab.up() == {}
    assert {file: file.stat().st_ino for file in inodes} == inodes
    for number, some in enumerate(by_hand):
        assert some <= (lab.part(number).held or frozenset())
        lab.part(number).verify()
    assert lab.sent["worker-1"] < len(experts) * store.manifest.blob_bytes / 2
    assert sum(lab.copies(range(3)).values()) == 64


def test_what_a_worker_has_got_since_the_host_was_asked_stays_in_its_list(tmp_path: Path, store: ExpertStore) -> None:
    lab = Lab(tmp_path, store, 2)
    assert lab.up() == {}
    some = sorted(lab.part(0).held or ())
    name_anew(lab.folder(0), some[:40])
    facts = {host.address: lab.facts(host) for host in lab.hosts}
    parts = plan_parts(store, lab.hosts, facts, REPLICAS)
    name_held(lab.folder(0), frozenset(some[40:41]))
    parts.missing["127.0.7.1"] = frozenset(some[50:])
    assert push_parts(lab.ssh, lab.hosts, parts, facts) == {}
    assert lab.part(0).held == {*some[:41], *some[50:]}
    assert lab.facts(lab.hosts[0])["stores"]["demo"]["held"] == [55, 64]


def name_anew(folder: Path, experts: list[ExpertId]) -> None:
    listed = json.loads((folder / HELD).read_text())
    (folder / HELD).write_text(json.dumps(listed | json.loads(held_text(experts))))


def test_a_worker_and_a_copy_over_ssh_that_write_the_list_at_once_lose_nothing(
    tmp_path: Path, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_part, "STORES", str(tmp_path))
    experts = [expert for expert, _ in store.experts()]
    write_part(store, tmp_path / "part", frozenset(), lambda nbytes: None)

    def add_over_ssh() -> None:
        for expert in experts[::2]:
            text = json.dumps({"manifest": "digest", **json.loads(held_text([expert]))})
            asked = {
                "store": "part",
                "fresh": False,
                "last": False,
                "sizes": {},
                "extents": [],
                "texts": [[HELD, text]],
            }
            take_part.take(io.BytesIO(json.dumps(asked).encode() + b"\n"))

    with ThreadPoolExecutor() as threads:
        copying = threads.submit(add_over_ssh)
        for expert in experts[1::2]:
            name_held(tmp_path / "part", frozenset({expert}))
        copying.result()
    assert ExpertStore.open(tmp_path / "part").held == set(experts)


def test_a_form_that_the_store_got_since_comes_too(tmp_path: Path, store: ExpertStore) -> None:
    lab = Lab(tmp_path, store, 2)
    assert lab.up() == {}
    add_forms(store, ["int4"])
    lab.store = ExpertStore.open(store.path)
    assert lab.up() == {}
    check_bytes(lab.part(0), lab.store)
    assert list(lab.part(0).manifest.forms) == ["int4"]


def test_what_a_host_has_is_shown(tmp_path: Path, store: ExpertStore) -> None:
    lab = Lab(tmp_path, store, 8)
    assert lab.up() == {}
    host = lab.hosts[0]
    found = ask(lab.ssh, host, "host_stores", 30)["stores"]["demo"]
    assert _state(found) == "part: 16 of 64 experts; not in use"
    assert found["bytes"] == sum(
        min(file.stat().st_size, file.stat().st_blocks * 512) for file in lab.folder(0).iterdir()
    )
    facts = probe(lab.ssh, host)
    assert facts["stores"]["demo"]["held"] == [16, 64]
    assert facts["stores"]["demo"]["fault"] is None
    assert not has_store(facts, "demo", manifest_digest(store.path))
    os.truncate(next(lab.folder(0).glob("*.experts")), 4096)
    assert "is 4096 bytes" in probe(lab.ssh, host)["stores"]["demo"]["fault"]


def launched(lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFile:
    """Its cluster file, when all hosts have their parts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setattr(restore_module.Ssh, "for_cluster", lambda *_: LocalSsh(folder))
    assert lab.up() == {}
    (folder / "key").touch()
    addresses = ("127.0.8.1", "127.0.8.2", *(host.address for host in lab.hosts))
    return write_cluster_file(folder, addresses, folder / "key")


def set_replicas(file: Path, replicas: int) -> None:
    file.write_text(file.read_text().replace("  hosts:", f"  replicas: {replicas}\n  hosts:"))


def test_restore_leaves_out_who_does_not_answer_and_who_has_another_store(
    tmp_path: Path, store: ExpertStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five workers one is gone, and one has another model's store under this name."""
    lab = Lab(tmp_path, store, 5)
    cluster = launched(lab, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="has no replicas in its provider block"):
        restore_module.restore_parts(cluster.path, store.path, Terminal(quiet=True))
    set_replicas(cluster.path, REPLICAS)
    shutil.rmtree(lab.ssh.home("127.0.7.4"))
    other = lab.folder(4) / "manifest.json"
    other.write_text(other.read_text().replace('"format"', ' "format"'))
    before = {file: file.stat().st_mtime_ns for file in lab.folder(4).iterdir()}
    with pytest.raises(LaunchError, match="2 of 5 hosts were given nothing"):
        restore_module.restore_parts(cluster.path, store.path, Terminal(quiet=True), as_json=True)
    said = capsys.readouterr()
    assert "worker-3 (127.0.7.4): it does not answer ssh" in said.err
    assert "worker-4 (127.0.7.5): it has another store of the name demo; odmoe up replaces it" in said.err
    rows = json.loads(said.out)
    assert sum(row["experts"] for row in rows.values()) == 2 * 64
    assert lab.copies(range(3)) == {2: 64}
    assert {file: file.stat().st_mtime_ns for file in before} == before
    for number in range(3):
        assert rows[f"worker-{number}"]["experts"] == len(lab.part(number).held or ())
        lab.part(number).verify()


def test_restore_never_removes_a_store_and_gives_all_that_answer_the_rest(
    tmp_path: Path, store: ExpertStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four workers are to have each expert: one is gone, and one has a damaged store that its worker may read."""
    lab = Lab(tmp_path, store, 4)
    cluster = launched(lab, tmp_path, monkeypatch)
    set_replicas(cluster.path, 4)
    shutil.rmtree(lab.ssh.home("127.0.7.4"))
    os.truncate(next(lab.folder(2).glob("*.experts")), 4096)
    before = {file: file.stat().st_ino for file in lab.folder(2).iterdir()}
    with pytest.raises(LaunchError, match="2 of 4 hosts were given nothing"):
        restore_module.restore_parts(cluster.path, store.path, Terminal(quiet=True))
    said = capsys.readouterr()
    assert "worker-3 (127.0.7.4): it does not answer ssh" in said.err
    assert "worker-2 (127.0.7.3): its store demo is damaged" in said.err
    assert "is 4096 bytes" in said.err
    assert {file: file.stat().st_ino for file in lab.folder(2).iterdir()} == before
    assert lab.copies(range(2)) == {2: 64}
    shutil.rmtree(lab.ssh.home("127.0.7.1"))
    shutil.rmtree(lab.ssh.home("127.0.7.2"))
    with pytest.raises(LaunchError, match="4 of 4 hosts were given nothing"):
        restore_module.restore_parts(cluster.path, store.path, Terminal(quiet=True))
