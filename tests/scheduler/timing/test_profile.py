"""Profiles: found by name or path, and refused by name."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scheduler.errors import ConfigError
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import PROFILES, find_profile, load_profile
from support.paths import ROOT

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
    code = f"from scheduler.timing.profile import find_profile; print(find_profile({NAME!r}).workers)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
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


def written(tmp_path: Path, old: str, new: str) -> Path:
    text = (PROFILES / f"{NAME}.yaml").read_text()
    assert old in text
    (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
    return tmp_path / "bad.yaml"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("load_ms: 25.0", "load_ms: 25.0\nlaod_ms: 3", "laod_ms is not a key of a profile; did you mean load_ms"),
        ("  top_k: 2", "  top_k: 2\n  topk: 3", r"model\.topk is not a key"),
        ("cluster: {", "cluster: {slots: 2, ", r"cluster\.slots is not a key"),
        ("devices: {", "devices: {gpu: 2, ", r"devices\.gpu is not a key"),
        ("main_layer_ms_per_extra_token: 0.005", "main_layer_ms_per_extra_token: -1", "per_extra_token is -1"),
        ("load_ms: 25.0", "load_ms: yes", "load_ms is True"),
        ("load_ms: 24.5, ", "", "lacks 'load_ms'"),
        ("{load_ms: 24.5", "{workers: 2, load_ms: 24.5", "fits: workers is not a key"),
        ("load_ms: 24.5", "load_ms: long", "load_ms is 'long'"),
        ("  - {load_ms: 24.5, shadow_layer_ms: 5.95}\n", "  - 24.5\n", "a fit is 24.5; it must be lines"),
        ("load_piece_ms: 0.298", "load_piece_ms: -1", "load_piece_ms is -1; it must be a number of at least 0"),
        ("load_piece_ms: 0.298", "load_piece_ms: 25.1", "load_piece_ms is 25.1, more than load_ms, 25.0"),
        ("load_piece_ms: 0.298", "cancellable: 0", "cancellable is 0; it must be true or false"),
        ("load_piece_ms: 0.298", "load_piece_ms: 0.298\ncancellable: false", "cannot be given up has no pieces"),
        ("restore_ms: 0.858", "restore_ms: -1", "restore_ms is -1; it must be a number of at least 0"),
        ("workers: 8", "workers: 0", "workers is 0; it must be 1, 2"),
        ("workers: 8", "workers: 1", "group_size is 2 with 1 workers; allowed: 1 to 1"),
        ("  top_k: 2", "  top_k: 9", "top_k is 9 with 8 experts; allowed: 1 to 8"),
        ("  layers: 32", "  layers: 32.5", "layers is 32.5; it must be 1, 2"),
        ("  expert_bytes: 704643072", "  expert_bytes: 0", "expert_bytes is 0"),
        ("worker_bytes_per_s: 936200000000, ", "", "lacks 'worker_bytes_per_s'"),
        ("worker_bytes_per_s: 936200000000", "worker_bytes_per_s: 0", "worker_bytes_per_s is 0"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_profile(written(tmp_path, old, new))


def test_what_only_plans_need_may_be_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, "main_layer_ms_per_extra_token: 0.005", "")
    fields = yaml.safe_load(file.read_text())
    del fields["devices"], fields["model"]["expert_bytes"]
    del fields["load_piece_ms"], fields["shadow_layer_ms_per_extra_token"], fields["restore_ms"]
    file.write_text(yaml.safe_dump(fields))
    profile = load_profile(file)
    assert (profile.model_sizes, profile.device_rates, profile.main_extra_s) == (None, None, 0)
    assert profile.main_s(100) == profile.main_layer_s
    assert profile.shadow_s(100) == profile.shadow_layer_s
    assert (profile.load_piece_s, profile.restore_s, profile.cancellable) == (0, 0, True)


def test_a_pass_over_many_tokens_takes_the_main_node_longer() -> None:
    profile = find_profile(NAME)
    assert profile.main_s(1) == profile.main_layer_s
    assert profile.main_s(128) == pytest.approx(0.0036 + 127 * 0.000005)


def test_a_shadow_takes_longer_for_more_rows() -> None:
    """By the bytes of the experts that eight rows choose beyond those of one, at one byte a parameter."""
    profile = find_profile(NAME)
    assert profile.shadow_s(1) == profile.shadow_layer_s
    more = (5.7 - 2) * 3 * 4096 * 14336 / (384 / 8 * 19.5e9)
    assert profile.shadow_s(8) - profile.shadow_s(1) == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize("name", [NAME, "rtx3080-1gbe", "rtx3090-pcie3"])
def test_a_piece_of_a_load_is_8_mib(name: str) -> None:
    profile = find_profile(name)
    expert_bytes, *_ = profile.model_sizes or (0,)
    assert profile.load_piece_s / profile.load_s == pytest.approx((8 << 20) / expert_bytes, rel=2e-3)


def test_the_rtx3080_by_public_figures() -> None:
    """Memory buses of 384 bits at 19.5 Gbit/s and 320 at 19; 10496 and 8704 multiply-adds a cycle at 1.695 and 1.71
    GHz; both on PCIe 4.0 x16. Only the workers' own work may differ."""
    old, new = find_profile(NAME), find_profile("rtx3080-1gbe")
    assert (old.device_rates or ())[1] == pytest.approx(384 / 8 * 19.5e9, rel=1e-3)
    assert (new.device_rates or ())[1] == pytest.approx(320 / 8 * 19e9, rel=1e-3)
    longer = 704_643_072 * (8 / (320 * 19e9) - 8 / (384 * 19.5e9))
    assert new.expert_s == pytest.approx(old.expert_s + longer, rel=1e-3)
    rates = (10496 * 1.695, 8704 * 1.71)
    assert new.expert_extra_s == pytest.approx(old.expert_extra_s * rates[0] / rates[1], rel=5e-3)
    assert 704_643_072 / new.load_s < 16 * 16e9 / 8 * 128 / 130  # what sixteen lanes of 16 GT/s carry
    for name in ("main_layer_s", "main_extra_s", "shadow_layer_s", "hop_s", "link_bits_per_s", "load_s", "model_sizes"):
        assert getattr(new, name) == getattr(old, name), name


def test_what_a_profile_was_taken_on_is_mixtral_in_float32() -> None:
    """From its public configuration: 4096 wide, 14336 in an expert, 8 heads for keys and values, 32000 tokens."""
    expert, expert_parameters, main, shadow = find_profile(NAME).model_sizes or (0, 0, 0, 0)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 8 * 128
    rest = 4096 * 8 + 2 * 4096 + (4096 * 32000 + 4096) // 32
    assert (expert_parameters, expert) == (3 * 4096 * 14336, 4 * 3 * 4096 * 14336)
    assert main == 4 * (attention + rest)
    assert shadow == attention + 2 * expert_parameters + 2 * rest


def test_an_expert_takes_longer_for_more_tokens() -> None:
    profile = find_profile(NAME)
    assert [profile.compute_s(n) for n in (1, 128)] == pytest.approx([0.0014, 0.0014 + 127 * 0.00002])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("load_ms: 25.0", "load_ms: quick", "load_ms is 'quick'; it must be a number"),
        ("cluster: {workers: 8, group_size: 2}", "cluster: 8", "cluster is 8; it must be lines of `key: value`"),
        ("load_ms: 25.0", "", "lacks 'load_ms'"),
    ],
)
def test_a_wrong_form_is_named_by_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        load_profile(written(tmp_path, old, new))
    assert says in str(caught.value)


# --- one machine ------------------------------------------------------------------------------------------------------

HERE = "rtx3090-pcie3"


def test_one_machine_has_no_network() -> None:
    """What travels inside it takes no time, however much it is."""
    profile = find_profile(HERE)
    assert (profile.hop_s, profile.link_bits_per_s) == (0.0, math.inf)
    links = MainLinks(profile)
    assert [
        links.send_rows(3.0, 10**9),
        links.send_outputs(3.0, 1),
        links.send_alignment(3.0, 10**9),
        links.send_prediction(3.0),
    ] == [3.0] * 4
    assert (profile.workers, profile.group_size) == (1, 1)


def test_one_machine_runs_qwens_shape() -> None:
    """From its public configuration: 24 layers, 60 experts, top-4, 2048 wide, 1408 and 5632 inside, 151936 tokens."""
    profile = find_profile(HERE)
    assert (profile.layers, profile.experts, profile.top_k, profile.hidden_bytes) == (24, 60, 4, 2048 * 2)
    expert, parameters, main, shadow = profile.model_sizes or (0, 0, 0, 0)
    assert (parameters, expert) == (3 * 2048 * 1408, 2 * 3 * 2048 * 1408)
    attention, shared = 4 * 2048 * 2048, 3 * 2048 * 5632
    rest = 3 * 2048 + 2048 + 2048 * 60 + 2 * 2048 + (151936 * 2048 + 2048) / 24
    assert main == int(2 * (attention + shared + rest))
    assert shadow == int(attention + shared + 4 * parameters + 2 * rest)
    assert profile.kv_bytes == 2 * 16 * 128 * 2
    assert 17_301_504 / profile.load_s < 16 * 8e9 / 8 * 128 / 130, "what sixteen lanes of 8 GT/s carry"


def test_the_host_is_one_order_slower_and_reads_weights_once_for_all_rows() -> None:
    """The order: the importance paper's. Further rows: DeepSeek-V3 in KTransformers, 54.21 tokens/s on 32 cores."""
    profile = find_profile(HERE)
    assert profile.host_compute_s(1) == pytest.approx(10 * profile.compute_s(1))
    a_core = 54.21 * (61 - 3) * 8 * 2 * 3 * 7168 * 2048 / 32
    row_s = 2 * 3 * 2048 * 1408 / (10 * a_core)
    assert profile.host_compute_s(8) - profile.host_compute_s(7) == pytest.approx(row_s, rel=0.01)
    pays = [rows for rows in (61, 62) if profile.host_compute_s(rows) > profile.compute_s(rows) + profile.load_s]
    assert pays == [62]


def test_costs_are_a_call_and_its_rows() -> None:
    profile = replace(find_profile(HERE), expert_s=0.5, expert_extra_s=0.1, host_s=3.0, host_extra_s=2.0)
    for (call_s, row_s), lasts in (
        (profile.device_costs, profile.compute_s),
        (profile.host_costs, profile.host_compute_s),
    ):
        assert [call_s + rows * row_s for rows in (1, 2, 9)] == pytest.approx([lasts(rows) for rows in (1, 2, 9)])


def test_a_profile_without_a_host_says_so() -> None:
    profile = find_profile(NAME)
    assert profile.host_s is None
    with pytest.raises(ConfigError, match="rtx3090-1gbe has no times for experts computed in host memory"):
        profile.host_compute_s(1)
    with pytest.raises(ConfigError, match="host_ms"):
        _ = profile.host_costs


@pytest.mark.parametrize(("name", "bits"), [(NAME, 32), (HERE, 16)])
def test_a_smaller_form_loads_in_the_share_of_its_bits(name: str, bits: int) -> None:
    """Groups of 64 weights with a scale and a zero of 16 bits each."""
    profile = find_profile(name)
    assert profile.form_share("") == 1.0
    assert profile.form_share("int4") == pytest.approx((4 + 32 / 64) / bits)
    assert profile.form_share("int2") == pytest.approx((2 + 32 / 64) / bits)
    assert replace(profile, model_sizes=None).form_share("int4") == pytest.approx(4.5 / 16)
    with pytest.raises(ConfigError, match="'int3'; allowed: int4, int2"):
        profile.form_share("int3")


def test_a_store_says_how_large_its_forms_are() -> None:
    profile = replace(find_profile(NAME), form_shares=(("int4", 0.3),))
    assert profile.form_share("int4") == 0.3
    assert profile.form_share("int2") == pytest.approx(2.5 / 32), "one that it does not name"
    assert profile.form_load_s("int4") == pytest.approx(0.0075)


@pytest.mark.parametrize("name", [NAME, "rtx3080-1gbe"])
def test_restoring_moves_what_was_loaded_and_what_is_computed(name: str) -> None:
    parameters = 3 * 4096 * 14336
    bits_per_s = {NAME: 384 * 19.5e9, "rtx3080-1gbe": 320 * 19e9 * 760.3 / 760}[name]
    assert find_profile(name).restore_s == pytest.approx(parameters * (4.5 + 32) / bits_per_s, rel=1e-3)


def test_a_load_that_cannot_be_given_up_lasts_to_its_end() -> None:
    """Unless it is evicted before it has begun."""
    profile = replace(find_profile(NAME), cancellable=False, load_piece_s=0.0)
    assert [profile.ended_load_s(after) for after in (0.0, 0.001, 0.024, 0.025)] == [0.0, 0.025, 0.025, 0.025]
    assert profile.ended_load_s(0.001, 0.25) == 0.00625


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("host_ms: 1.0\n", "", "lacks 'host_ms'"),
        ("host_ms_per_extra_token: 0.025\n", "", "lacks 'host_ms_per_extra_token'"),
        ("host_ms: 1.0\n", "host_ms: 0.02\n", "host_ms is 0.02, less than host_ms_per_extra_token, 0.025"),
        ("host_ms: 1.0\n", "host_ms: -1\n", "host_ms is -1; it must be a number"),
        ("host_ms: 1.0\n", "host_ms: 1.0\nhop_ms: 0.45\n", "lacks 'link_bits_per_s'"),
        ("host_ms: 1.0\n", "host_ms: 1.0\nlink_bits_per_s: 1e9\n", "lacks 'hop_ms'"),
    ],
)
def test_a_host_or_a_network_that_is_half_said(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (PROFILES / f"{HERE}.yaml").read_text()
    assert old in text
    (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        load_profile(tmp_path / "bad.yaml")
    assert says in str(caught.value)


@pytest.mark.parametrize("name", [NAME, HERE])
def test_one_that_is_so_many_times_slower(name: str) -> None:
    """Whatever takes time takes as much longer, and nothing else changes."""
    plain, slow = find_profile(name), find_profile(f"{name}@8")
    for times in (
        lambda p: p.main_s(1),
        lambda p: p.main_s(50),
        lambda p: p.compute_s(1),
        lambda p: p.compute_s(50),
        lambda p: p.load_s,
        lambda p: p.hop_s,
        lambda p: p.shadow_s(1),
        lambda p: p.shadow_s(50),
        lambda p: p.load_piece_s,
        lambda p: p.restore_s,
        lambda p: 1 / p.link_bits_per_s,
        lambda p: p.host_compute_s(1) if p.host_s else 0,
        lambda p: p.host_extra_s,
    ):
        assert times(slow) == pytest.approx(8 * times(plain))
    assert [8 * time for fit in plain.fits for time in fit] == pytest.approx(
        [time for fit in slow.fits for time in fit]
    )
    assert slow.name == f"{name}@8"
    same = ("layers", "experts", "top_k", "hidden_bytes", "kv_bytes", "workers", "group_size", "model_sizes")
    assert [getattr(slow, field) for field in same] == [getattr(plain, field) for field in same]


@pytest.mark.parametrize("name", [f"{NAME}@", f"{NAME}@0", f"{NAME}@-1", f"{NAME}@x", "rtx9090@2", f"{NAME}@2.5"])
def test_so_many_times_slower_is_a_whole_number(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no profile"):
        find_profile(name)
