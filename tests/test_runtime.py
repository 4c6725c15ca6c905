"""The nodes take time and threads from `wire.runtime`, so that a simulated world can give them its own."""

from __future__ import annotations

import ast
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.paths import ROOT
from wire import runtime

PACKAGES = ("main_node", "shadow_node", "worker_node", "wire")
ELSEWHERE = {
    "wire/runtime.py",  # where they come from
    "wire/rpc/client.py",  # gRPC's side of a stream: its threads and waits are the library's own
    "wire/rpc/server.py",
    "wire/rpc/doorman.py",
    "wire/rpc/tls.py",  # dates of certificates
    "wire/rpc/tls_probe.py",  # sockets
    "worker_node/measure.py",  # how fast this machine is
    "worker_node/costs.py",
}
"""Files that have to do with the real machine, and why."""
KEPT_OUT = ("threading", "time", "queue", "concurrent", "asyncio", "sched", "_thread")


def found_in(text: str) -> list[str]:
    """The modules of `KEPT_OUT` that a source imports, in any form."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return [name for name in names if name.partition(".")[0] in KEPT_OUT]


@pytest.mark.parametrize("package", PACKAGES)
def test_time_and_threads_come_from_one_place(package: str) -> None:
    sources = {str(path.relative_to(ROOT)): path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name}
    found = {name: found_in(path.read_text(encoding="utf-8")) for name, path in sources.items()}
    assert {name: names for name, names in found.items() if names and name not in ELSEWHERE} == {}
    assert {name for name in ELSEWHERE if name.startswith(f"{package}/") and not found[name]} == set(), "no exception"


@pytest.mark.parametrize("package", PACKAGES)
def test_they_are_looked_up_when_they_are_used(package: str) -> None:
    """A name that is imported by itself, or a default that is bound once, would stay real in a simulated world."""
    offences = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "wire.runtime":
                offences.append(f"{path}:{node.lineno}")
            if isinstance(node, ast.arguments):
                defaults = [one for one in [*node.defaults, *node.kw_defaults] if one is not None]
                offences += [f"{path}:{one.lineno}" for one in defaults if ast.unparse(one).startswith("runtime.")]
    assert offences == []


def test_every_form_of_import_is_found() -> None:
    text = (
        "import time as t\nfrom concurrent.futures import wait\ndef f():\n    from threading import Lock\nimport timeit"
    )
    assert found_in(text) == ["time", "concurrent.futures", "threading"]


def test_what_is_installed_is_what_the_nodes_get_and_only_meanwhile() -> None:
    assert runtime.monotonic is time.monotonic
    assert runtime.Lock is threading.Lock
    fakes: dict[str, Any] = {name: object() for name in runtime.NAMES}
    with runtime.install(SimpleNamespace(**fakes)):
        assert {name: getattr(runtime, name) for name in runtime.NAMES} == fakes
    assert runtime.monotonic is time.monotonic
    assert runtime.Lock is threading.Lock
