"""The tables of docs/models.md are those that `scripts.families` would write, and failures stand out in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import kv
from scripts import families as script
from support.models.families import FAMILIES, REFUSED, auto_class, configuration, features

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
SHADOWS = ("fp16", "nf4", "int8")
READ = {
    "deepseek_v3": (
        *("FP8", "GPTQ of 4 bits", "bitsandbytes fp4"),
        *("compressed-tensors mixed-precision", "compressed-tensors pack-quantized"),
    ),
    "kimi_k25": ("compressed-tensors pack-quantized",),
    "mixtral": ("GPTQ of 2 bits",),
    "deepseek_v4": ("FP8 with FP4 experts",),
    "glm4_moe": ("FP8",),
    "glm_moe_dsa": ("FP8",),
    "gpt_oss": ("MXFP4",),
    "minimax_m2": ("FP8", "GGUF"),
    "qwen2_moe": ("GGUF",),
    "qwen3_5_moe_text": ("GGUF",),
    "qwen3_moe": (
        *("FP8", "GGUF", "MXFP8", "AWQ of 4 bits", "GPTQ of 8 bits", "bitsandbytes int8", "bitsandbytes nf4"),
        *(f"compressed-tensors {name}-quantized" for name in ("float", "int", "nvfp4-pack", "pack")),
    ),
}
"""What tests/families/test_published.py and test_gguf.py read."""
TOKENS, ALIGNED = (
    "test_tokens_of_eager_and_a_shadow_that_follows",
    "test_the_next_pass_is_the_main_models",
)


def case(name: str, properties: dict[str, str] | None = None, outcome: str = "") -> str:
    """One test as pytest writes it into a JUnit XML."""
    listed = "".join(f'<property name="{key}" value="{value}"/>' for key, value in (properties or {}).items())
    return f'<testcase name="{name}"><properties>{listed}</properties>{outcome}</testcase>'


def result(path: Path, cases: list[str]) -> Path:
    path.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    return path


def of_family(family: str) -> list[str]:
    """Every test of a family passed; what they record is taken from the model without weights."""
    config = configuration(family)
    with torch.device("meta"):
        model = auto_class(family).from_config(config)
    facts = {"features": ", ".join(features(model)), "cache": ", ".join(kv.kinds(config))}
    return [
        *(case(f"{TOKENS}[{family}-{shadow}]") for shadow in SHADOWS),
        case(f"{ALIGNED}[{family}-1]"),
        case(f"test_top_k_is_what_the_routers_choose[{family}]", facts),
    ]


def read_case(family: str, name: str, outcome: str = "") -> str:
    """A test of a tiny checkpoint in a published format."""
    return case(f"{script.READS}[{family} {name}]", {"family": family, "published as": name}, outcome)


def test_the_page_has_the_tables_of_a_run_in_which_every_test_passed(tmp_path: Path) -> None:
    """That they do pass is what `make test-slow` shows."""
    refused = [
        case(f"test_refused_before_anything_is_written[{family}]", {"refused": f"{error.__name__}: {part}"})
        for family, (error, part) in REFUSED.items()
    ]
    ran = [each for family in FAMILIES for each in of_family(family)]
    ran += [read_case(family, name) for family, names in READ.items() for name in names]
    text = script.table(*script.read(result(tmp_path / "all.xml", ran + refused)))
    page = script.PAGE.read_text()
    assert script.replaced(page, text) == page, "run .venv/bin/python -m scripts.families"


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (f"{TOKENS}[mixtral-nf4]", "| mixtral | mistralai/Mixtral-8x7B-v0.1 | - | - | - | **no** | rows | **none** |"),
        (
            f"{ALIGNED}[mixtral-1]",
            "| mixtral | mistralai/Mixtral-8x7B-v0.1 | - | - | - | yes | **fails** | fp16, nf4 |",
        ),
        ("test_refused_before_anything_is_written[llama]", "| llama | **not rejected** |"),
    ],
)
def test_a_failed_test_stands_in_bold(failed: str, expected: str, tmp_path: Path) -> None:
    cases = {
        f"{TOKENS}[mixtral-fp16]": {},
        f"{TOKENS}[mixtral-nf4]": {},
        f"{ALIGNED}[mixtral-1]": {},
        "test_top_k_is_what_the_routers_choose[mixtral]": {"cache": "rows"},
        "test_refused_before_anything_is_written[llama]": {"refused": "NotMoEError: ExpertsInterface"},
    }
    written = [case(name, facts, "<failure/>" if name == failed else "") for name, facts in cases.items()]
    text = script.table(*script.read(result(tmp_path / "one.xml", written)))
    assert expected in text.splitlines()
    assert text.count("**") // 2 == expected.count("**") // 2


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"models\.md lacks the markers"):
        script.replaced("# A page", "| a table |")


def test_a_format_that_is_not_read_stands_in_bold(tmp_path: Path) -> None:
    """Of several checkpoints in one format, one that fails is enough."""
    cases = [read_case("gpt_oss", "MXFP4"), read_case("gpt_oss", "MXFP4", "<failure/>"), read_case("gpt_oss", "FP8")]
    text = script.table(*script.read(result(tmp_path / "one.xml", cases)))
    assert "| gpt_oss | openai/gpt-oss-20b | MXFP4 | FP8 (tiny), MXFP4 (**fails**" in text


def test_a_read_that_did_not_begin_is_no_result(tmp_path: Path) -> None:
    file = result(tmp_path / "one.xml", [case(f"{script.READS}[gpt_oss]", outcome="<error/>")])
    with pytest.raises(SystemExit, match="did not begin"):
        script.read(file)
