"""The code's archive as tar and make see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odmoe.machines import ship
from odmoe.machines.ship import code_archive, code_digest
from scheduler.errors import ConfigError
from support.paths import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project in place of this one."""
    root = tmp_path / "project"
    for name in (*ship.PACKAGES, "deploy", "tests", "odmoe/profiles", "odmoe/__pycache__"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in (*ship.FILES, "deploy/env.sh", "tests/t.py", "odmoe/profiles/a.yaml", "odmoe/__pycache__/x.pyc"):
        (root / name).write_text(f"# {name}\n")
    for name in ship.PACKAGES:
        (root / name / "__init__.py").write_text("")
    (root / "odmoe" / ".hidden").write_text("x")
    monkeypatch.setattr(ship, "ROOT", root)
    return root


def unpacked(archive: Path, to: Path) -> Path:
    to.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", to], check=True, timeout=30)
    return to


def test_the_archive_holds_the_project_and_says_what_it_is(project: Path, tmp_path: Path) -> None:
    digest = code_archive(tmp_path / "new" / "code.tar.gz")
    there = unpacked(tmp_path / "new" / "code.tar.gz", tmp_path / "there")
    found = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    packages = {f"{name}/__init__.py" for name in ship.PACKAGES}
    assert found == packages | set(ship.FILES) | {"odmoe/profiles/a.yaml", "env.sh", "SHIPPED"}
    assert (there / "env.sh").read_text() == "# deploy/env.sh\n"
    assert (there / "SHIPPED").read_text().strip() == digest == code_digest()
    assert ship.digest_in(tmp_path / "new" / "code.tar.gz") == digest
    for name in found - {"SHIPPED", "env.sh"}:
        assert (there / name).read_bytes() == (project / name).read_bytes()


def test_the_same_sources_make_the_same_bytes_and_leave_the_file_alone(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "code.tar.gz"
    digest = code_archive(archive)
    before, data = archive.stat(), archive.read_bytes()
    assert code_archive(archive) == digest
    assert (archive.stat().st_ino, archive.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    again = tmp_path / "again" / "code.tar.gz"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 100)  # which gzip would write into the file
    assert code_archive(again) == digest
    assert again.read_bytes() == data
    assert [path.name for path in again.parent.iterdir()] == ["code.tar.gz"]


@pytest.mark.parametrize("change", ["content", "name", "mode"])
def test_other_sources_have_another_digest(project: Path, tmp_path: Path, change: str) -> None:
    archive = tmp_path / "code.tar.gz"
    digest = code_archive(archive)
    data, file = archive.read_bytes(), project / "wire" / "__init__.py"
    if change == "content":
        file.write_text("x = 1\n")
    elif change == "name":
        file.rename(file.with_name("other.py"))
    else:
        file.chmod(0o755)
    assert code_archive(archive) != digest
    assert archive.read_bytes() != data


def test_a_copy_written_at_another_time_is_the_same_code(project: Path) -> None:
    digest = code_digest()
    for path in project.rglob("*"):
        os.utime(path, (1, 1))
    assert code_digest() == digest


def test_make_has_nothing_to_do_in_an_environment_made_after_the_sources(project: Path, tmp_path: Path) -> None:
    """make itself says so, with the Makefile of this project, on what tar has unpacked later."""
    shutil.copy(ROOT / "Makefile", project / "Makefile")
    for name in ship.FILES:
        os.utime(project / name, (time.time() - 100,) * 2)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in (".locked", ".installed"):
        (venv / name).touch()
        os.utime(venv / name, (time.time() - 50,) * 2)
    code_archive(tmp_path / "code.tar.gz")
    there = unpacked(tmp_path / "code.tar.gz", tmp_path / "there")
    command = ["make", "-q", "-C", str(there), f"{venv}/.installed", f"VENV={venv}"]
    assert subprocess.run(command, timeout=30, capture_output=True).returncode == 0
    (there / "requirements.lock").touch()
    assert subprocess.run(command, timeout=30, capture_output=True).returncode == 1


def test_a_project_that_is_not_whole_is_named(project: Path, tmp_path: Path) -> None:
    (project / "requirements.lock").unlink()
    with pytest.raises(ConfigError, match=r"project/requirements.runtime.lock cannot .*run odmoe from a checkout"):
        code_archive(tmp_path / "code.tar.gz")
    assert not (tmp_path / "code.tar.gz").exists()


@pytest.mark.slow
def test_this_project_runs_from_its_archive(tmp_path: Path) -> None:
    """With the environment that env.sh sets, and nothing of this checkout; from there it could be sent on."""
    digest = code_archive(tmp_path / "code.tar.gz")
    (tmp_path / "odmoe").mkdir()
    unpacked(tmp_path / "code.tar.gz", tmp_path / "odmoe" / "code")
    os.symlink(sys.prefix, tmp_path / "odmoe" / "venv")
    script = (
        '. ~/odmoe/code/env.sh && python -c "import odmoe.machines.ship, os; print(odmoe.machines.ship.code_digest());'
        " print(os.environ['RAY_AUTH_MODE'], os.environ.get('OMP_NUM_THREADS'), os.environ['ODMOE_TLS'])\""
    )
    done = subprocess.run(
        ["sh", "-c", script],
        cwd="/",
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [digest, "token", "None", f"{tmp_path}/odmoe/keys"], done.stderr
