"""`odmoe verify`: it finds what was altered on purpose, and nothing where nothing was."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from transformers import PreTrainedModel

from checkpoint.manifest import seal
from checkpoint.store import ExpertStore
from main_node.choosing.chooser import Chooser
from main_node.engine.device_layer import DeviceLayerWork
from odmoe.commands.shared.comparison import ROUNDING, Answer, Verdict, as_dict, compare
from odmoe.commands.shared.whole_model import SPARE, check_memory, checked_config, load_whole
from odmoe.commands.texts.verify_text import as_text
from odmoe.commands.verify import answer, reference
from odmoe.stores import prepare_store
from scheduler.errors import ConfigError, DoesNotFitError
from support.devices.counted_device import Crossings
from support.devices.counted_machine import counted_machine, workers_there
from support.machines.cli import CommandLine, check_one_line

QUICK = ("--threads", "1", "--shadow", "none", "-n", "6")
PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"
LITTLE = ("HAMLET", "--threads", "1", "--shadow", "none", "-n", "3")
"""Of a device that is slow to compute on."""


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Transformers' models of these tests, which change none, are loaded once; not those on other devices."""
    once = functools.cache(load_whole)

    def load(path: Path, dtype: str, device: str | torch.device = "cpu") -> Any:
        return once(path, dtype) if torch.device(device).type == "cpu" else load_whole(path, dtype, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("odmoe.commands.shared.whole_model.load_whole", load)
        yield


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """What the command prints as JSON, for `as_text`."""
    found: list[Verdict] = []
    monkeypatch.setattr(
        "odmoe.commands.shared.comparison.as_dict", lambda verdict: found.append(verdict) or as_dict(verdict)
    )
    return found


@pytest.fixture
def verify(cli: CommandLine, demo: Path) -> Any:
    """`verify(*flags)`: exit code and verdict."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        answer = cli("verify", str(demo), PROMPT, *QUICK, "--json", *flags)
        assert answer.err == ""
        return answer.code, dict(json.loads(answer.out))

    return run


@pytest.fixture
def altered(demo: Path, tmp_path: Path) -> Path:
    """A store of the demo model whose checksums are right and one of whose layers has other experts."""
    path = prepare_store(str(demo), str(tmp_path / "store"), None).path
    manifest = json.loads((path / "manifest.json").read_text())
    layer = manifest["layers"]["4"]
    content = bytearray((path / layer["file"]).read_bytes())
    for blob in layer["blobs"]:
        place = slice(blob["offset"], blob["offset"] + blob["length"])
        weights = torch.frombuffer(content, dtype=torch.bfloat16)[place.start // 2 : place.stop // 2]
        weights.mul_(-1)
        blob["checksum"] = xxhash.xxh3_128_hexdigest(content[place])
    (path / layer["file"]).write_bytes(content)
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))
    ExpertStore.open(path).verify()
    return path


def test_the_demo_model_is_exact(verify: Any) -> None:
    code, found = verify()
    assert (code, found["verdict"], found["dtype"], found["approximate"]) == (0, "exact", "bfloat16", "")
    (prompt,) = found["prompts"]
    assert (prompt["tokens"], prompt["equal_tokens"]) == (6, 6)
    assert (prompt["logits"], prompt["bit_equal_logits"], prompt["logit_difference"]) == (6, 6, 0.0)


@pytest.mark.slow
def test_three_samples_and_a_verdict_in_words(cli: CommandLine, demo: Path) -> None:
    answer = cli("verify", str(demo), "--workers", "2", "--threads", "1", "--shadow", "none", "-n", "2")
    assert answer.code == 0, answer.err
    assert answer.out.count("2 of 2 tokens equal, logits equal bit for bit\n") == 3
    assert answer.out.endswith("\nExact: all 6 tokens equal those of Transformers.\n")


def test_other_experts_are_found(verify: Any, altered: Path, verdicts: list[Verdict]) -> None:
    code, found = verify("--store", str(altered))
    assert (code, found["verdict"]) == (1, "different")
    assert found["prompts"][0]["bit_equal_logits"] == 0
    assert found["prompts"][0]["logit_difference"] > found["prompts"][0]["rounding"]
    said = as_text(verdicts[0], Tokenizer())
    assert said.endswith("\nNot exact: the answers to prompt 1 of 1 differ from those of Transformers.")


@pytest.mark.slow
def test_another_token_is_found_though_the_logits_are_right(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token is the second best."""
    choose, count = Chooser.choose, 0

    def wrong(self: Chooser, logits: torch.Tensor) -> int:
        nonlocal count
        count += 1
        if count == 4:  # the first call tries the model's settings at the start
            logits = logits.index_fill(0, logits.argmax(), -1e30)
        return choose(self, logits)

    monkeypatch.setattr(Chooser, "choose", wrong)
    code, found = verify()
    (prompt,) = found["prompts"]
    assert (code, found["verdict"], prompt["equal_tokens"], prompt["difference"]["position"]) == (1, "different", 2, 2)
    assert prompt["logits"] == prompt["bit_equal_logits"] == 3, "behind the first difference there is none to compare"
    assert prompt["difference"]["logits"][0] > prompt["difference"]["logits"][1]


@pytest.mark.slow
def test_an_approximate_system_has_not_failed(verify: Any, verdicts: list[Verdict]) -> None:
    flags = ("--system", "importance", "--alpha", "0.9", "--device-memory", "25%")
    code, found = verify(*flags)
    assert (code, found["verdict"]) == (0, "approximate")
    assert found["approximate"] == "router expert-cache changes answers by design"
    assert found["prompts"][0]["bit_equal_logits"] < 6
    assert "Approximate: router expert-cache changes answers by design." in as_text(verdicts[0], Tokenizer())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, Crossings]]:
    with counted_machine(monkeypatch) as found:
        yield found


@pytest.mark.slow
def test_on_a_device_the_reference_is_there_too(
    cli: CommandLine, demo: Path, machine: tuple[torch.device, Crossings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what rounds differently would look like a defect."""
    device, crossings = machine
    workers_there(monkeypatch, device)
    answer = cli("verify", str(demo), *LITTLE, "--json", "--device", device.type, "--slots", "2")
    found = json.loads(answer.out)
    assert (answer.code, found["verdict"], found["approximate"], found["device"]) == (0, "exact", "", str(device))
    assert found["prompts"][0]["equal_tokens"] == 3
    assert crossings.by_asker("to device")["whole_model.py:load_whole"] > 0


@pytest.mark.slow
def test_roles_on_devices_that_round_differently_are_no_defect(
    cli: CommandLine, demo: Path, machine: tuple[torch.device, Crossings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where tokens differ: an output of the processor is off by a little here."""
    gather = DeviceLayerWork.rows_of

    def off(layer: DeviceLayerWork, command: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weights = gather(layer, command)
        return hidden, weights * 1.5

    monkeypatch.setattr(DeviceLayerWork, "rows_of", off)
    flags = (str(demo), PROMPT, *QUICK, "--device", machine[0].type)
    found = cli("verify", *flags, "--json")
    verdict = json.loads(found.out)
    assert (found.code, verdict["verdict"]) == (0, "approximate")
    assert verdict["prompts"][0]["bit_equal_logits"] == 0
    assert verdict["approximate"].startswith("the main node on privateuseone:0 (privateuseone) and workers on cpu (")
    assert verdict["approximate"].endswith("round differently")


def test_a_device_that_is_not_there_is_refused_before_the_model_is_loaded(
    cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.commands.shared.whole_model.load_whole", lambda *_: pytest.fail("the model was loaded"))
    words = ["--main-device is 'xpu'", "which this machine does not have"]
    check_one_line(cli("verify", str(demo), PROMPT, *QUICK, "--main-device", "xpu"), 2, "ConfigError", words)


def test_a_device_without_room_for_the_reference_is_named(
    cli: CommandLine, demo: Path, machine: tuple[torch.device, Crossings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 MiB")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    words = ["privateuseone:0 has no room for all of", "in bfloat16", "give --device cpu"]
    found = cli("verify", str(demo), PROMPT, *QUICK, "--device", machine[0].type)
    check_one_line(found, 1, "DoesNotFitError", words)


@pytest.mark.slow
def test_the_reference_is_that_of_the_tests(demo: Path, gsm8k: list[str], reference: Any, embedded: Any) -> None:
    expected = reference("float32", 1, 5)
    steps: list[int] = []
    found = _reference(load_whole(demo, "float32"), expected.prompt, 5, lambda: steps.append(1))
    assert (found.tokens, len(steps)) == (expected.tokens, 5)
    assert all(torch.equal(a, b) for a, b in zip(found.logits or [], expected.logits, strict=True))
    got, report = answer(embedded(shadow="none", mini_batch=4096), expected.prompt, 5)
    assert report.token_ids == got.tokens == expected.tokens
    assert compare(got, found, "float32").exact


_reference = reference


@pytest.fixture
def beams(demo: Path, tmp_path: Path) -> Callable[..., Path]:
    """`beams(num_beams=2)`: the demo model with other generation settings."""

    def made(**settings: Any) -> Path:
        path = tmp_path / "beams"
        path.mkdir(exist_ok=True)
        for file in demo.iterdir():
            if not (path / file.name).exists():
                (path / file.name).symlink_to(file)
        config = json.loads((demo / "generation_config.json").read_text())
        (path / "generation_config.json").unlink()
        (path / "generation_config.json").write_text(json.dumps(config | settings))
        return path

    return made


@pytest.mark.slow
def test_generation_settings_that_the_engine_ignores_are_no_part_of_the_comparison(
    cli: CommandLine, beams: Callable[..., Path]
) -> None:
    """Neither side searches with beams, so the answers are to be the same; a stop text is no reason to fail either."""
    path = beams(num_beams=2, stop_strings=["never"])
    answer = cli("verify", str(path), PROMPT, *QUICK, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert (found["verdict"], found["approximate"], found["prompts"][0]["equal_tokens"]) == ("exact", "", 6)


def test_settings_that_transformers_refuses_are_an_error_of_the_model(beams: Callable[..., Path]) -> None:
    path = beams(repetition_penalty=-1.0)
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*penalty"):
        reference(load_whole(path, "bfloat16"), [5, 6, 7], 2)


def logits(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_an_approximate_system_has_failed_where_logits_are_no_numbers() -> None:
    """Though its tokens may differ: here they do at once, and a later logit is NaN."""
    wanted = Answer([1, 1], [logits(1, 5), logits(1, 5)])
    for row, code in ((logits(2, float("nan")), "different"), (logits(2, 3), "approximate")):
        got = compare(Answer([0, 1], [logits(5, 1), row]), wanted, "float32")
        found = Verdict(
            "model", "importance", "embedded", "float32", "cpu", "router expert-cache changes answers", [got]
        )
        assert found.verdict == code
        assert ("NaN" in as_text(found, Tokenizer())) is (code == "different")


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return str(tokens)


def test_missing_logits_are_not_passed_over() -> None:
    wanted = Answer([1, 1], [logits(1, 5), logits(1, 5)])
    for got in ([], [logits(1, 5)]):
        with pytest.raises(ValueError, match=f"{len(got)} logits of 2 tokens"):
            compare(Answer([1, 1], got), wanted, "float32")
    assert compare(Answer([1, 1], None), wanted, "float32").exact


@pytest.mark.parametrize(
    ("got", "wanted", "exact", "near_tie"),
    [
        ((logits(1, 5), 1), (logits(1, 5), 1), True, None),
        ((logits(1, 5.00001), 1), (logits(1, 5), 1), True, None),
        ((logits(1, 5.01), 1), (logits(1, 5), 1), False, None),
        ((logits(float("nan"), 5), 1), (logits(1, 5), 1), False, None),
        ((logits(-torch.inf, 5), 1), (logits(-torch.inf, 5), 1), True, None),
        ((logits(5, 1), 0), (logits(1, 5), 1), False, False),
        ((logits(5.00001, 5), 0), (logits(5, 5.00001), 1), False, True),
    ],
)
def test_logits_are_equal_up_to_rounding_and_tokens_equal(
    got: tuple[torch.Tensor, int], wanted: tuple[torch.Tensor, int], exact: bool, near_tie: bool | None
) -> None:
    found = compare(Answer([got[1]], [got[0]]), Answer([wanted[1]], [wanted[0]]), "float32")
    assert found.exact is exact
    assert (None if found.difference is None else found.difference.near_tie) is near_tie


def test_rounding_is_a_few_units_in_the_last_place() -> None:
    for name, most in ROUNDING.items():
        assert 3 <= most / torch.finfo(getattr(torch, name)).eps <= 100


def numbers_in(model: Path) -> int:
    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 - it is no dictionary


@pytest.mark.slow
def test_memory_is_needed_for_every_weight(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, config = numbers_in(demo), checked_config(demo)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        monkeypatch.setattr("worker_node.loaders.slab.available_memory", lambda size=size: weights * size + SPARE)
        check_memory(demo.name, config, dtype)
        monkeypatch.setattr("worker_node.loaders.slab.available_memory", lambda size=size: weights * size + SPARE - 1)
        with pytest.raises(DoesNotFitError):
            check_memory(demo.name, config, dtype)


def test_memory_is_checked_for_the_dtype_of_the_store(
    cli: CommandLine, demo: Path, demo_store: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 store of a bfloat16 checkpoint: Transformers is to load float32, too."""
    store = demo_store("float32").path
    monkeypatch.setattr("odmoe.commands.shared.whole_model.load_whole", lambda *_: pytest.fail("the model was loaded"))
    weights = numbers_in(demo)
    monkeypatch.setattr("worker_node.loaders.slab.available_memory", lambda: weights * 2 + SPARE)
    answer = cli("verify", str(demo), PROMPT, *QUICK, "--store", str(store))
    check_one_line(answer, 1, "DoesNotFitError", ["in float32"])


def test_prompts_are_checked_before_a_store_is_made(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.stores.prepare_store", lambda *_: pytest.fail("a store was made"))
    for args, code, words in (
        (("", *QUICK), 2, ["PromptError", "empty"]),
        ((PROMPT, "-n", "1020"), 2, ["PromptError", "context of 1024", "allowed for --tokens: 1 to "]),
    ):
        answer = cli("verify", str(demo), *args, "--store", str(tmp_path / "store"))
        assert answer.code == code
        assert all(word in answer.err for word in words), answer.err


def test_it_makes_the_store_that_generate_would(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*given: Any, experts: str | None = None, **more: Any) -> ExpertStore:
        raise ConfigError(f"experts: {experts}")

    monkeypatch.setattr("odmoe.stores.prepare_store", made)
    for experts in ("native", "dequantised"):
        answer = cli("verify", str(demo), PROMPT, *QUICK, "--experts", experts)
        check_one_line(answer, 2, "ConfigError", [f"experts: {experts}"])
    check_one_line(cli("verify", str(demo), "--experts", "other"), 2, "ConfigError", ["--experts", "native"])


def test_the_model_may_be_named_by_a_flag(cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for generate, and then the first argument is the prompt."""
    given: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        "odmoe.commands.verify.run_verify", lambda settings, texts, *_: given.append((settings.model, texts)) or True
    )
    for args in ((str(demo), PROMPT), ("-m", str(demo), PROMPT), (PROMPT, "--model", str(demo))):
        assert cli("verify", *args).code == 0
    assert given == [(str(demo), [PROMPT])] * 3
    check_one_line(cli("verify", "-m", "a", "b", "c"), 2, "ConfigError", ["two models are given, 'b' and -m 'a'"])
    check_one_line(cli("verify"), 2, "ConfigError", ["no model is given"])


@pytest.mark.slow
def test_what_cannot_be_is_said_before_anything_is_loaded(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odmoe.commands.shared.whole_model.load_whole", lambda *_: pytest.fail("the model was loaded"))
    store = str(prepare_store(str(demo), None, None).path)
    model = str(demo)
    for args, code, kind, words in (
        ((model, "-n", "0"), 2, "ConfigError", ["--tokens is 0", "allowed: 1, 2, ..."]),
        ((model, "--workers", "0"), 2, "ConfigError", ["--workers is 0;"]),
        ((model, "--cluster", "cluster.yaml"), 2, "ConfigError", ["cluster.yaml", "embedded, local"]),
        ((model, ""), 2, "PromptError", ["the prompt is empty"]),
        ((model, "-n", "1020"), 2, "PromptError", ["context of 1024", "allowed for --tokens: 1 to "]),
        ((model, "--temperature", "1"), 2, "ConfigError", ["--temperature"]),
        ((str(tmp_path),), 1, "MissingShardError", [str(tmp_path)]),
        ((store,), 2, "ConfigError", ["is an expert store", f"--store {store}"]),
    ):
        check_one_line(cli("verify", *args), code, kind, words)
    monkeypatch.setattr("worker_node.loaders.slab.available_memory", lambda: 5 * 10**8)
    words = ["DoesNotFitError: Transformers needs 1.1 GB", "0.5 GB are available"]
    check_one_line(cli("verify", model), 1, "DoesNotFitError", words)
