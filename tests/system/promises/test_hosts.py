"""What becomes wrong on a host while it serves: its store, its certificate."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from odmoe.settings.settings import Settings
from scheduler.errors import CertificateError
from scripts.faults.cluster import GrpcCluster
from support.machines.certificates import Authority

pytestmark = pytest.mark.system

DAY_S = 86400.0


@pytest.mark.parametrize("damage", ["bits", "cut", "removed"])
def test_a_store_is_damaged_on_one_host(damage: str, nodes: Any, answer: Any, tmp_path: Path) -> None:
    """In the middle of an answer. What that host loads from then on is not used."""
    shutil.copytree(nodes.store.path, tmp_path / "store")
    own = nodes.node("worker", 1, tmp_path / "store", loader="disk")
    nodes.later(own.close)
    sound = nodes.workers[1]
    nodes.later(lambda: nodes.workers.__setitem__(1, sound))
    nodes.workers[1] = own
    cluster = nodes.cluster(audit=0)

    def act() -> None:
        for file in (tmp_path / "store").rglob("layer*"):
            content = file.read_bytes()
            if damage == "removed":
                file.unlink()
            else:
                with file.open("r+b") as held:
                    held.truncate(len(content) // 3)
                    if damage == "bits":
                        held.seek(0)
                        held.write(bytes(byte ^ 16 for byte in content))

    nodes.check_same(answer(cluster, {5: act}))


def test_certificates_expire_while_the_cluster_runs(nodes: Any, answer: Any, tmp_path: Path) -> None:
    """Open streams go on. A node that is connected after that is refused with an error that names the certificate."""
    tls = Authority(tmp_path).folder(days=(-1, 25.0 / DAY_S))  # type: ignore[arg-type]
    expires = time.monotonic() + 25.0
    workers = [nodes.node("worker", number, tls=str(tls)) for number in range(2)]
    for worker in workers:
        nodes.later(worker.close)
    settings: Settings = nodes.settings.but(tls=str(tls))
    cluster = GrpcCluster(settings, nodes.store, [worker.address for worker in workers])
    nodes.later(cluster.close)
    nodes.check_same(answer(cluster, {5: lambda: time.sleep(max(0.0, expires - time.monotonic() + 1.0))}))
    with pytest.raises(CertificateError, match="expired"):
        GrpcCluster(settings, nodes.store, [worker.address for worker in workers])
