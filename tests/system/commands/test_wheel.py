"""The wheel: what is in it, and `odmoe` from it in an environment outside of the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

RUN_S = 300


def run(*command: str | Path, **environment: str) -> str:
    """Outside of the checkout."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False, cwd="/", env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tracked files, as `make dist` makes it."""
    work, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", work], cwd=ROOT, input=tracked, check=True, timeout=60)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps")
    run(*pip, "--no-build-isolation", "-w", to, work, ODMOE_COMMIT="0123abc")
    (found,) = to.glob("odmoe-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment's folder of commands. What odmoe depends on is that of this process, by a .pth file."""
    here = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", here)
    (packages,) = here.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", here / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", wheel)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    return here / "bin"


def shipped_demo(installed: Path) -> str:
    where = "import odmoe.model_files as m; print(m.shipped_models()[m.DEMO])"
    return run(installed / "python", "-c", where, PYTHONPATH="").strip()


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        lock = archive.read("odmoe/bundled/requirements.runtime.lock").decode()
        assert archive.read("odmoe/bundled/COMMIT") == b"0123abc\n"
    for name in (
        *("scheduler/timing/profiles/rtx3090-1gbe.yaml", "wire/odmoe_pb2.py", "odmoe/quality/held_out.txt"),
        *("odmoe/bundled/env.sh", "odmoe/bundled/cluster.yaml", "odmoe/bundled/models/chat-moe/model.safetensors"),
    ):
        assert name in names
    served = {str(path.relative_to(ROOT)) for path in (ROOT / "odmoe/serve/page").rglob("*") if path.is_file()}
    assert {name for name in served if "__pycache__" not in name} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "docs/"))]
    assert not re.search(r"^(mypy|ruff|pytest|pre_commit|matplotlib|hypothesis)", lock, re.MULTILINE)
    assert re.search(r"^torch==", lock, re.MULTILINE)


def test_it_answers_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ""}
    assert re.fullmatch(r"odmoe [\d.]+ \(0123abc\)\n", run(installed / "odmoe", "--version", **cache))
    demo = shipped_demo(installed)
    assert Path(demo).is_relative_to(installed.parent)
    found = run(installed / "odmoe", "generate", "-m", demo, "--shadow", "none", "-n", "4", "-q", "HAMLET", **cache)
    assert found.strip()


def test_it_ships_the_code_that_a_checkout_ships(installed: Path, tmp_path: Path) -> None:
    """With what hosts need, and no more: `odmoe up` takes either for the same."""
    ships = "import sys; from pathlib import Path; from odmoe.machines import preflight, ship; " + (
        "print(ship.code_archive(Path(sys.argv[1])), preflight.pinned_versions()['torch'])"
    )
    here, there = tmp_path / "wheel.tar.gz", tmp_path / "checkout.tar.gz"
    assert run(installed / "python", "-c", ships, here, PYTHONPATH="") == run(
        sys.executable, "-c", ships, there, PYTHONPATH=str(ROOT)
    )
    with tarfile.open(here) as archive:
        names = archive.getnames()
        lock = archive.extractfile("requirements.lock")
        assert lock is not None
        assert b"pytest" not in lock.read()
    assert {"env.sh", "Makefile", "odmoe/at_head.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "scripts", "odmoe/bundled/", "proto"))]
    assert here.stat().st_size < 4 << 20


def test_the_shell_completes_flags(installed: Path) -> None:
    words = {"_ODMOE_COMPLETE": "complete_bash", "COMP_WORDS": "odmoe serve --api-k", "COMP_CWORD": "2"}
    assert run(installed / "odmoe", PYTHONPATH="", **words).split() == ["--api-key", "--api-key-file"]


TESTBED = (sys.executable, "-m", "scripts.testbed")


@pytest.fixture
def cluster_file(tmp_path: Path) -> Iterator[Path]:
    """Of a main node and two workers, in namespaces of their own: no host sees the installed wheel."""
    here = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    check = subprocess.run([*TESTBED, "check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if check.returncode:
        pytest.skip(check.stderr.strip())
    text = (ROOT / "cluster.yaml").read_text().replace("10.77.0.", "10.79.53.")
    text = text.replace("cluster_name: odmoe", "cluster_name: odmoe-wheel").replace(
        "~/.ssh/odmoe", str(tmp_path / "key")
    )
    text = re.sub(r" +shadow_node: .*\n", "", text)
    file = tmp_path / "cluster.yaml"
    file.write_text(re.sub(r"( +- \[10.*\n)( +- \[10.*\n)+", r"\1", text))
    try:
        run(*TESTBED, "up", "--cluster", file, **here)
        yield file
    finally:
        run(*TESTBED, "down", "--cluster", file, **here)


@pytest.mark.timeout(400)
def test_it_brings_up_a_cluster(installed: Path, cluster_file: Path, tmp_path: Path) -> None:
    """From nothing: keys, code, store, Ray and nodes; an answer; then nothing is left."""
    here = {"PYTHONPATH": "", "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    odmoe, demo = installed / "odmoe", shipped_demo(installed)
    prompt, tokens = "HAMLET", ("-n", "8", "-q", "--ignore-eos")
    alone = run(odmoe, "generate", "-m", demo, "--shadow", "none", *tokens, prompt, **here)
    run(odmoe, "up", cluster_file, "-m", demo, "--shadow", "none", **here)
    assert run(odmoe, "generate", "--cluster", cluster_file, *tokens, prompt, **here) == alone
    run(odmoe, "down", cluster_file, **here)
