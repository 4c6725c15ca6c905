"""Profiles: found by name or path, and refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scheduler.errors import ConfigError
from scheduler.profile import PROFILES, find_profile, load_profile

NAME = "rtx3090-1gbe"


def test_by_name_it_is_the_papers_testbed() -> None:
    profile = find_profile(NAME)
    fields = yaml.safe_load((PROFILES / f"{NAME}.yaml").read_text())
    assert profile.name == NAME
    assert (profile.load_s, profile.main_layer_s, profile.shadow_layer_s) == (0.025, 0.0036, 0.002)
    assert profile.hidden_bytes == fields["model"]["hidden_bytes"] == 16384
    assert profile.link_bits_per_s == 1e9


def test_every_profile_that_comes_along_is_named_as_its_file() -> None:
    files = sorted(PROFILES.glob("*.yaml"))
    assert files
    assert [find_profile(file.stem).name for file in files] == [file.stem for file in files]


def test_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    text = (PROFILES / f"{NAME}.yaml").read_text()
    file.write_text(text.replace(f"name: {NAME}", "name: mine").replace("load_ms: 25.0", "load_ms: 7"))
    assert find_profile(file) == find_profile(str(file)) == load_profile(file)
    assert find_profile(file).load_s == 0.007
    monkeypatch.chdir(tmp_path)
    assert find_profile("mine.yaml").name == "mine"


def test_from_any_folder(tmp_path: Path) -> None:
    """Also where the packages are installed and the working directory is another."""
    code = f"from scheduler.profile import find_profile; print(find_profile({NAME!r}).workers)"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "8\n", done.stderr


@pytest.mark.parametrize("name", ["rtx9090", "", "..", "../profiles", f"{NAME}.yaml", "no/such/file.yaml"])
def test_one_that_is_not_there_lists_those_that_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_profile(name)
    assert repr(name) in str(caught.value)
    assert NAME in str(caught.value)


@pytest.mark.parametrize("value", ["0", ".inf", ".nan", "-1", "fast", "[1]"])
def test_a_link_that_cannot_be(tmp_path: Path, value: str) -> None:
    file = tmp_path / "bad.yaml"
    text = (PROFILES / f"{NAME}.yaml").read_text()
    file.write_text(text.replace("link_bits_per_s: 1000000000", f"link_bits_per_s: {value}"))
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_profile(file)


def test_what_travels_takes_its_hop_or_what_the_link_needs() -> None:
    """1 Gbit/s: 16,384 bytes a token and 8,192 bytes of KV a token a layer."""
    profile = find_profile(NAME)
    assert [profile.transfer_s(n) for n in (1, 3)] == [0.00045, 0.00045]
    assert profile.transfer_s(128) == pytest.approx(128 * 131_072e-9)
    assert profile.align_s(0) == profile.align_s(1) == 0.00045
    assert profile.align_s(32) == pytest.approx(32 * 65_536e-9)
    assert profile.align_s(16 * 32) == pytest.approx(16 * 32 * 65_536e-9)
    assert [profile.compute_s(n) for n in (1, 128)] == pytest.approx([0.0014, 0.0014 + 127 * 0.00002])
