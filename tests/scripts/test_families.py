"""The tables of docs/models.md are those that `scripts.families` would write, and failures stand out in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import kv
from scripts import families as script
from support.models.families import FAMILIES, REFUSED, configuration, features

SHADOWS = ("fp16", "nf4", "int8")
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
    from transformers import AutoModelForCausalLM

    config = configuration(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = {"features": ", ".join(features(model)), "cache": ", ".join(kv.kinds(config))}
    return [
        *(case(f"{TOKENS}[{family}-{shadow}]") for shadow in SHADOWS),
        case(f"{ALIGNED}[{family}-1]"),
        case(f"test_top_k_is_what_the_routers_choose[{family}]", facts),
    ]


def test_the_page_has_the_tables_of_a_run_in_which_every_test_passed(tmp_path: Path) -> None:
    """That they do pass is what tests/system/nodes/test_every_family.py shows."""
    refused = [
        case(f"test_refused_before_anything_is_written[{family}]", {"refused": f"{error.__name__}: {part}"})
        for family, (error, part) in REFUSED.items()
    ]
    ran = [each for family in FAMILIES for each in of_family(family)]
    text = script.table(*script.read(result(tmp_path / "all.xml", ran + refused)))
    page = script.PAGE.read_text()
    assert script.replaced(page, text) == page, "run .venv/bin/python -m scripts.families"


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (f"{TOKENS}[mixtral-nf4]", "| mixtral | mistralai/Mixtral-8x7B-v0.1 | - | **no** | rows | **none** |"),
        (f"{ALIGNED}[mixtral-1]", "| mixtral | mistralai/Mixtral-8x7B-v0.1 | - | yes | **fails** | fp16, nf4 |"),
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
