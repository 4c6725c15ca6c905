"""`odmoe plan`: from a configuration alone to an answer that a person understands."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import odmoe
from odmoe.api.plan_model import model_of
from scheduler.planning.scaling import (
    DRAFTED,
    Hardware,
    Policy,
    Setup,
    memory,
    other_fits,
    outcome,
    speed_together,
)
from scheduler.timing.profile import PROFILES, find_profile
from shadow_node.model import ShadowModel
from support.machines.cli import CommandLine
from support.paths import CONFIGS

MIXTRAL = str(CONFIGS / "mixtral-8x7b.json")
pytestmark = pytest.mark.usefixtures("short_plans")


@pytest.fixture(scope="module", autouse=True)
def simulated_once() -> Iterator[None]:
    """What two plans simulate alike is simulated once, in this process."""
    once = functools.cache(outcome)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.planning.scaling.outcome", once)
        patch.setattr("scheduler.planning.scaling.speed_together", functools.cache(speed_together))
        patch.setattr("odmoe.simulation_pool._make_pool", lambda: None)
        yield


quick, quick_together = functools.cache(outcome), functools.cache(speed_together)
"""Each setup once. Only for tests with `few_visits`, which bounds the tokens."""


@pytest.fixture
def few_tokens(few_visits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have two tokens, for what does not depend on how fast they are."""
    monkeypatch.setattr("scheduler.planning.scaling.outcome", quick)
    monkeypatch.setattr("scheduler.planning.scaling.speed_together", quick_together)


@pytest.fixture
def no_changes(few_tokens: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are changes and several requests simulated, for what the model alone says."""
    monkeypatch.setattr("scheduler.planning.plan.trials", lambda *_: [])
    monkeypatch.setattr("scheduler.planning.plan.TOGETHER", [])


@pytest.fixture
def planned(cli: CommandLine) -> Callable[..., dict[str, Any]]:
    def call(*args: str) -> dict[str, Any]:
        answer = cli("plan", "--json", *args)
        assert answer.code == 0, answer.err
        found: dict[str, Any] = json.loads(answer.out)
        return found

    return call


def test_what_is_known_first_comes_first(cli: CommandLine) -> None:
    """Memory, then the answer in words and its figures, then what would help."""
    answer = cli("plan", "-m", MIXTRAL, "--workers", "8", "--worker-memory", "1GB")
    assert (answer.code, answer.err) == (0, "")
    head, roles, words, figures, helps = answer.out.split("\n\n")[:5]
    assert head == "Device memory of each role:"
    for part in (
        "704.6 MB each",
        "main node 7.50 GB",
        "shadow 47.50 GB (int8)",
        "a worker 728.8 MB of the 1.00 GB given: 1 slot, the least, and room to compute; 180.39 GB of host memory",
        "whole model 187.88 GB",
    ):
        assert part in " ".join(roles.split())
    assert words.startswith("Loads end 3.25 ms late: an expert takes 25.0 ms to load")
    for part in (
        "tokens/s",
        "It takes 10 machines: one for the main node, one for the shadow, 8 for workers",
        "A worker uses 728.8 MB of device memory of the 1.00 GB given",
        "The shadow's machine needs 47.50 GB of device memory",
    ):
        assert part in " ".join(words.split())
    assert helps.startswith("The best single change: drafts of the shadow")
    for part in (
        "too long with fewer than 10 workers",
        "--workers 8 --group-size 2 --slots 1",
        "bottleneck, the largest part: main node and experts together",
    ):
        assert part in " ".join(figures.split())


@pytest.mark.slow
def test_the_same_as_one_object(planned: Callable[..., dict[str, Any]]) -> None:
    found = planned("-m", MIXTRAL)
    assert found["equation_1"]["holds"] is False
    assert found["equation_1"]["slack_s"] == pytest.approx(-0.00325)
    assert found["equation_1"]["workers_needed"] == 10
    paper, ideal = 3.69, found["decode_tokens_per_s_if_loads_took_no_time"]
    assert paper < found["decode_tokens_per_s"] < ideal, "the paper's shadow departs late"
    assert found["helps_most"] == next(change for change in found["changes"] if change["real"])
    assert found["model"]["expert_bytes"] == 704_643_072
    assert len(found["assumed"]) == 8


@pytest.mark.usefixtures("few_tokens")
def test_the_same_for_python(planned: Callable[..., dict[str, Any]]) -> None:
    found = odmoe.plan(MIXTRAL, context=512)
    assert found.memory_bytes["together"] == pytest.approx(60e9, rel=0.03)
    assert json.loads(json.dumps(found.as_dict())) == planned("-m", MIXTRAL, "--context", "512")
    assert found.equation_1.io_bound
    assert (found.model.experts, found.workers, len(found.tried) > 1) == (8, 8, True)


@pytest.mark.slow
def test_several_requests_at_once(
    planned: Callable[..., dict[str, Any]], cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load serves all that need it, and the dense part too where it is batched."""
    monkeypatch.setattr("scheduler.planning.plan.DRAFTED", DRAFTED)
    found = planned("-m", MIXTRAL)
    rates = {(one["requests"], one["batch_dense"]): one["tokens_per_s"] for one in found["requests_at_once"]}
    assert list(rates) == [(n, batched) for n in (1, 4) for batched in (False, True)]
    assert rates[1, False] == rates[1, True] == found["decode_tokens_per_s"]
    assert rates[1, False] < rates[4, False] < 1 / (32 * 3.6e-3), "the main node's layers"
    assert rates[4, False] < rates[4, True] < 4 * 8 * 40 / (32 * 8 * (1 - 0.75**4)), "the workers' loads"
    assert any("random ones 7.2" in line for line in found["assumed"])
    drafts = {(one["requests"], one["draft"]): one["tokens_per_s"] for one in found["drafts_at_once"]}
    assert list(drafts) == [(1, 7), (1, "auto")]
    assert rates[1, False] < drafts[1, 7]
    assert drafts[1, "auto"] > 1.5 * rates[1, False]
    said = " ".join(cli("plan", "-m", MIXTRAL).out.split())
    assert f"of drafts are right; {drafts[1, 'auto']:.2f} with --draft auto in short answers (long ones gain" in said
    assert f"{drafts[1, 7]:.2f} with --draft 7" in said
    assert f"4 at once: {rates[4, False]:.2f} tokens/s together, {rates[4, True]:.2f} with --batch-dense" in said


@pytest.mark.slow
def test_advice_has_its_range_over_the_fits_of_a_profile(
    planned: Callable[..., dict[str, Any]], cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of 22.5 ms with layers of the shadow of 7.09 ms decode as fast, and need other machines."""
    monkeypatch.setattr("scheduler.planning.plan.other_fits", other_fits)
    found = planned("-m", MIXTRAL)
    assert len(found["decode_tokens_per_s_by_fit"]) == len(find_profile("rtx3090-1gbe").fits) == 3
    ranges = {one["what"].split(":")[0]: one["factors"] for one in found["changes"] if one["real"]}
    least, most = ranges["a shadow twice as fast"]
    assert least < 1.01 < 1.05 < most, "the shadow is slow in the others"
    least, most = ranges["2 slots per worker in place of 1"]
    assert least < 1.03 < 1.05 < most, "loads are slow in the first"
    said = " ".join(cli("plan", "-m", MIXTRAL).out.split())
    assert f"a shadow twice as fast ({ranges['a shadow twice as fast'][0] - 1:+.0%} to" in said
    assert "is one of 4 sets of times that give the measured speed: loads of 22.5 to 25 ms" in said
    assert said.index("by fit (over the 4 sets of times that give the measured speed)") == said.index("by fit")


@pytest.mark.usefixtures("few_tokens")
def test_what_is_said_is_no_longer_assumed(planned: Callable[..., dict[str, Any]]) -> None:
    flags = "--dtype bfloat16 --worker-memory 1GB --load-bandwidth 10GB/s --link 2.5Gbit --recall 0.9 --workers 4"
    found = planned("-m", MIXTRAL, *flags.split())
    assert not any("bandwidth" in line or "links" in line or "recall" in line for line in found["assumed"])
    assert any("has not been run on a GPU yet" in line for line in found["assumed"])
    assert found["equation_1"]["load_s"] == pytest.approx(352_321_536 / 10e9)
    assert found["workers"] == 4


@pytest.mark.usefixtures("no_changes")
def test_deepseek_v3_on_weak_machines(planned: Callable[..., dict[str, Any]]) -> None:
    few = ("--group-size", "8", "--slots", "1")  # otherwise all that are possible are simulated
    machines = ("--worker-memory", "200MB", "--load-bandwidth", "3GB/s")
    found = planned("-m", str(CONFIGS / "deepseek-v3.json"), *machines, *few)
    assert found["model"]["layers"] == 58
    assert found["model"]["expert_bytes"] == 3 * 7168 * 2048 * 2
    assert found["equation_1"]["load_s"] == pytest.approx(3 * 7168 * 2048 * 2 / 3e9)
    assert found["memory_bytes"]["worker"] < 200e6
    assert found["memory_bytes"]["whole"] == pytest.approx(671e9 * 2, rel=0.002)


def test_a_gguf_file_that_is_not_there_is_refused_as_elsewhere(cli: CommandLine) -> None:
    planned, answered = cli("plan", "-m", "models/no.gguf"), cli("generate", "-m", "models/no.gguf", "hi")
    assert "'models/no.gguf' is a GGUF file that does not exist; check the name" in planned.err
    assert (planned.code, planned.err) == (answered.code, answered.err)
    assert "GGUF" in cli("plan", "--help").out


@pytest.mark.slow
@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(("shadow", "machines"), [("int8", 6), ("none", 5)])
def test_a_shadow_that_is_larger_than_the_model_is_not_advised(
    cli: CommandLine, tmp_path: Path, shadow: str, machines: int
) -> None:
    """gpt-oss-120b is published in 65 GB; its int8 shadow takes 118."""
    fields = json.loads((CONFIGS / "gpt-oss-120b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    few = ("--workers", "4", "--group-size", "4", "--slots", "1", "--shadow", shadow)
    text = " ".join(cli("plan", "-m", str(tmp_path), *few).out.split())
    found = json.loads(cli("plan", "-m", str(tmp_path), *few, "--json").out)
    assert found["machines"] == machines
    schemes = ("fp16 shadow", "int8 shadow", "nf4 shadow")
    assert not any(scheme in one["what"] for one in found["changes"] for scheme in schemes), "67.6 GB in nf4"
    assert ("needs a machine with 118" in text) is (shadow == "int8")
    assert ("such a machine holds every expert and needs no workers" in text) is (shadow == "int8")


FEW_LAYERS = {"model_type": "qwen3_next", "dtype": "bfloat16", "num_experts": 16, "num_hidden_layers": 8}


@pytest.mark.slow
@pytest.mark.usefixtures("few_tokens")
def test_states_of_recurrent_layers_bound_the_speed_on_a_slow_link(cli: CommandLine, tmp_path: Path) -> None:
    """Qwen3-Next-80B has 78 MB of them in 48 layers, however many experts: 0.62 s at 1 Gbit/s. So they are sent after
    as many tokens as 1 MiB a token asks for, and a token bears its share."""
    (tmp_path / "config.json").write_text(json.dumps(FEW_LAYERS))
    few = ("plan", "-m", str(tmp_path), "--workers", "8", "--group-size", "8", "--slots", "1")
    slow, fast = (json.loads(cli(*few, "--link", link, "--json").out) for link in ("50Mbit", "10Gbit"))
    row, state = slow["model"]["cache_token"], slow["model"]["state"]
    assert row == 2 * 2 * 2 * 256, "keys and values of 2 layers with two heads of 256"
    assert state * 2 == pytest.approx(78e6 * 8 / 48, rel=0.01)
    every = math.ceil(state * 2 / 2**20)
    assert every == 13
    assert slow["decode_tokens_per_s"] == pytest.approx(50e6 / 8 / (2 * (row + state / every)), rel=1e-3)
    assert slow["bound"] == "network"
    assert slow["decode_tokens_per_s"] < fast["decode_tokens_per_s"]
    assert "The link bounds it: what a token's alignment sends to the shadow" in " ".join(
        cli(*few, "--link", "50Mbit").out.split()
    )


@pytest.mark.usefixtures("no_changes")
def test_the_whole_model_has_its_experts_as_stored(cli: CommandLine, tmp_path: Path) -> None:
    """As in the report of an answer. What it takes dequantised has a name of its own."""
    fields = json.loads((CONFIGS / "gpt-oss-120b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    command = ("plan", "-m", str(tmp_path), "--workers", "4", "--group-size", "4", "--slots", "1")
    found = json.loads(cli(*command, "--json").out)["memory_bytes"]
    text = " ".join(cli(*command).out.split())
    assert found["whole"] == found["main"] + found["store"]
    assert found["whole_dequantised"] - found["main"] == pytest.approx(found["store"] * 16 / 4.25, rel=0.01)
    native, dequantised = found["whole"] / 1e9, found["whole_dequantised"] / 1e9
    assert f"whole model {native:.2f} GB on one device, {dequantised:.2f} GB dequantised" in text
    assert f"{found['together'] / found['whole']:.0%} of what one machine with all experts needs" in text


@pytest.mark.usefixtures("no_changes")
def test_a_directory_or_a_store_serves_as_well(
    planned: Callable[..., dict[str, Any]], demo: Path, demo_store: Callable[[str], Any]
) -> None:
    """A store is planned in its own dtype."""
    store = demo_store("float32")
    by_name = {name: planned("-m", name)["model"] for name in (str(demo), str(demo / "config.json"), str(store.path))}
    first, second, stored = by_name.values()
    assert {k: v for k, v in first.items() if k != "name"} == {k: v for k, v in second.items() if k != "name"}
    assert (first["item_bytes"], stored["item_bytes"]) == (2, 4)
    assert stored["expert_bytes"] == store.manifest.blob_bytes
    assert stored["expert_bytes"] * stored["layers"] * stored["experts"] == store.manifest.expert_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "off"), [("fp16", 0.005), ("int8", 0.03), ("nf4", 0.06)])
def test_a_planned_shadow_is_as_large_as_a_real_one(
    demo: Path, demo_store: Callable[[str], Any], scheme: str, off: float
) -> None:
    """On this CPU what is not quantised has four bytes; scales are what the plan leaves out."""
    store = demo_store("float32")
    model = model_of("demo", store.manifest.config, "float32", 1)
    setup = Setup(model, Hardware(find_profile("rtx3090-1gbe"), 8), Policy(scheme))
    real = ShadowModel(store, scheme).device_bytes
    assert memory(setup, 1, rest_bytes=4)["shadow"] == pytest.approx(real, rel=off)


@pytest.mark.usefixtures("no_changes")
def test_the_papers_shadow_fits_on_two_devices_of_24_gb(planned: Callable[..., dict[str, Any]]) -> None:
    """OD-MoE 4.1: two RTX 3090."""
    found = planned("-m", MIXTRAL, "--shadow-memory", "24GB,24GB")
    assert sum(found["shadow_bytes"]) == pytest.approx(found["memory_bytes"]["shadow"], abs=64)
    assert max(found["shadow_bytes"]) < 24e9


@pytest.mark.usefixtures("no_changes")
def test_devices_of_a_shadow_may_be_of_several_machines(cli: CommandLine) -> None:
    said = " ".join(cli("plan", "-m", MIXTRAL, "--shadow-memory", "24GB,24GB").out.split())
    assert "devices of one machine (--shadow-device) or of a machine each (--shadow-hosts 2)" in said
    assert "The shadow needs 47.50 GB of device memory, of one machine or of 2 together" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--shadow-memory", "24GB,"), "--shadow-memory is '24GB,'; allowed: a size such as 1GB"),
        (("--workers", "1000000000"), "--workers is 1000000000; allowed: 1, 2, ... 256"),
        (("--slots", "65536"), "--slots is 65536 with 8 workers, 524,288 together; allowed: 1 to 16384"),
        (("--group-size", "9"), "--group-size is 9; allowed: 1 to --workers (8)"),
        (("--worker-memory", "much"), "--worker-memory is 'much'; allowed: a size such as 1GB"),
        (("--link", "1GB/s"), "--link is '1GB/s'; allowed: bits a second"),
        (("--load-bandwidth", "25Gbit/s"), "--load-bandwidth is '25Gbit/s'; allowed: bytes a second"),
        (("--recall", "1.5"), "--recall is 1.5; allowed: a number from 0 to 1"),
        (("--recall", "0.5", "--shadow", "none"), "--recall is given with --shadow none"),
        (("--context", "99999999"), "--context is 99999999; allowed: 1 to 32768, the model's limit"),
        (("--profile", "nope"), "there is no profile 'nope'"),
        (("--shadow", "int4"), "--shadow is 'int4'; allowed: fp16, int8, nf4, int8-nf4, int8-int2, none"),
        (("--shadow", "int8-int2"), "--shadow is int8-int2, whose recall nobody has published; give --recall, too"),
        (("--prefill", "never"), "--prefill is 'never'; allowed: ahead, pipelined, in-turn"),
        (("--prefill", "never", "-m", "/none"), "--prefill is 'never'; allowed: ahead, pipelined, in-turn"),
    ],
)
def test_what_cannot_be_is_one_line(cli: CommandLine, flags: tuple[str, ...], says: str) -> None:
    answer = cli("plan", "-m", MIXTRAL, *flags)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("odmoe: ConfigError: ")
    assert answer.err.count("\n") == 1
    assert says in answer.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--shadow-memory", "24GB"), "but the int8 shadow of mixtral-8x7b (mixtral, float32) takes 47.50 GB"),
        (("--worker-memory", "500MB"), "one expert of mixtral-8x7b (mixtral, float32) takes 728.8 MB"),
        (
            ("--worker-memory", "1GB", "--slots", "2"),
            "--slots is 2, but --worker-memory 1.00 GB has room for 1 expert of",
        ),
    ],
)
def test_what_does_not_fit_is_exit_code_1(cli: CommandLine, flags: tuple[str, ...], says: str) -> None:
    answer = cli("plan", "-m", MIXTRAL, *flags)
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert answer.err.startswith("odmoe: DoesNotFitError: ")
    assert says in answer.err


@pytest.mark.usefixtures("few_tokens")
def test_no_line_is_wider_than_the_terminal(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of the words is lost by that."""
    shown = {}
    for columns in (60, 80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown[columns] = cli("plan", "-m", MIXTRAL).out
        assert 40 < max(map(len, shown[columns].splitlines())) <= min(columns, 100)
    assert shown[60].split() == shown[80].split() == shown[300].split()


@pytest.mark.usefixtures("few_tokens")
def test_a_profile_on_which_loads_take_no_time(cli: CommandLine, tmp_path: Path) -> None:
    text = (PROFILES / "rtx3090-1gbe.yaml").read_text()
    text = text.replace("load_ms: 25.0", "load_ms: 0").replace("load_piece_ms: 0.298", "")
    (tmp_path / "quick.yaml").write_text(text)
    answer = cli("plan", "-m", MIXTRAL, "--profile", str(tmp_path / "quick.yaml"), "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["equation_1"]["load_s"] == 0
    assert found["decode_tokens_per_s"] == found["decode_tokens_per_s_if_loads_took_no_time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "MissingShardError: .* does not exist"),
        ("{", "CheckpointError: .* is not valid JSON"),
        ("[]", "CheckpointError: .* has no model_type"),
        ('{"vocab_size": 3}', "CheckpointError: .* has no model_type"),
        ('{"model_type": "no_such"}', "CheckpointError: .*no_such"),
        ('{"model_type": "llama"}', "NotMoEError"),
    ],
)
def test_what_is_no_model_is_named(cli: CommandLine, tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    answer = cli("plan", "-m", str(tmp_path))
    assert (answer.code, answer.out) == (1, "")
    assert re.search(says, answer.err), answer.err


def test_a_wrong_path_is_answered_before_torch_is_there(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        f"sys.argv = ['odmoe', 'plan', '-m', {str(tmp_path / 'none')!r}]\n"
        "from odmoe.command_line import run\nsys.exit(run())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "MissingShardError" in done.stderr
