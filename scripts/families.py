"""Writes the tables of model families in docs/models.md from the results of tests/families.

.venv/bin/python -m scripts.families            # runs the tests for every family (minutes), then writes the tables
.venv/bin/python -m scripts.families --check    # the same, but writes nothing and fails if the tables differ
.venv/bin/python -m scripts.families --check --from results/families.xml    # uses the results of an earlier run
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.flags import script_parser
from scripts.lib.paths import RESULTS, ROOT
from scripts.lib.provenance import header

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
TESTS = "tests/families"
REFUSES = "test_refused_before_anything_is_written"
FOLLOWS, MOVES = "test_tokens_of_eager_and_a_shadow_that_follows", ("test_the_next_pass", "test_in_the_midst")
BETTER_KNOWN = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "gemma4_text": "google/gemma-4-26B-A4B-it",
    "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
    "granitemoe": "ibm/PowerMoE-3b",
    "granitemoehybrid": "ibm-granite/granite-4.0-h-tiny",
    "granitemoeshared": "ibm-research/moe-7b-1b-active-shared-experts",
    "minimax_m2": "MiniMaxAI/MiniMax-M2",
}
"""Replaces the example from Transformers if that one belongs to another family or is a toy."""
PUBLISHED = {
    "deepseek_v3": "FP8",
    "deepseek_v32": "FP8",
    "deepseek_v4": "FP8, FP8 with FP4 experts",
    "gpt_oss": "MXFP4",
    "inkling2_text": "MXFP8",
    "kimi_k25": "compressed-tensors",
    "mimo_v2_flash": "FP8",
    "minimax_m2": "FP8",
    "qwen3_5_moe_text": "plain, FP8",
    "qwen2_moe": "plain, GPTQ",
    "qwen3_moe": "plain, FP8, GPTQ",
    "qwen3_next": "plain, FP8",
    "qwen3_vl_moe": "plain, FP8",
}
"""Formats of the publishers' own checkpoints, if one is quantised."""
FULL_WIDTH = {"deepseek_v3": ("FP8",), "gpt_oss": ("MXFP4",), "qwen3_moe": ("plain",)}
"""Formats of a family in which a random checkpoint of full width, with few layers, was sharded and answered by an
earlier version. The script is last in commit babfef8."""
_OTHERS = ("test_published", "test_gguf", "test_rope_scaling")
"""Modules whose tests are of a format or of a kind of RoPE scaling: their parameters do not begin with a family."""
READS = "test_tokens_and_logits_of_the_dequantised_model"
TITLES = (
    *("family", "example", "published as", "read as published", "architecture"),
    *("tokens match", "KV cache, aligned", "shadows"),
)


@dataclass
class Row:
    """Test results of one family."""

    tests: dict[str, bool] = field(default_factory=dict)
    """Whether a test passed, by its name without the family."""
    facts: dict[str, str] = field(default_factory=dict)
    """Properties that the tests recorded, such as the kinds of KV cache."""
    read: dict[str, bool] = field(default_factory=dict)
    """Whether tiny checkpoints gave Transformers' tokens and logits, by their published format."""

    def passed(self, *starts: str) -> list[str]:
        """The tests whose names start with one of `starts`; empty unless all of them passed."""
        found = [name for name in self.tests if name.startswith(starts)]
        return found if all(self.tests[name] for name in found) else []


def run_tests(result: Path) -> None:
    """Runs tests/families for every family and writes a JUnit XML. Failed tests are no error here."""
    environment = {**os.environ, "FAMILIES": "all", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-m", "", TESTS, f"--junitxml={result}"]
    command += ["-o", "junit_family=xunit1"]
    code = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"{TESTS} could not be run: pytest ended with {code}")


def read(result: Path) -> tuple[dict[str, Row], dict[str, Row]]:
    """The supported and the rejected families of a JUnit XML."""
    ran: dict[str, Row] = {}
    refused: dict[str, Row] = {}
    for case in ElementTree.parse(result).getroot().iter("testcase"):
        name, _, parameters = case.get("name", "").rstrip("]").partition("[")
        if not parameters:
            continue
        passed = not any(case.findall(kind) for kind in ("failure", "error", "skipped"))
        facts = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        if name == READS:
            if "family" not in facts:
                raise SystemExit(f"{name}[{parameters} did not begin; see the errors of {TESTS}")
            of = ran.setdefault(facts["family"], Row()).read
            of[facts["published as"]] = of.get(facts["published as"], True) and passed
        if name == READS or case.get("classname", "").endswith(_OTHERS):
            continue
        if name == REFUSES:
            row = refused.setdefault(parameters, Row())
        else:
            family, _, rest = parameters.partition("-")
            row, name = ran.setdefault(family, Row()), f"{name}-{rest}"
        row.tests[name] = passed
        row.facts |= facts
    return ran, refused


def example(family: str) -> str:
    """The Hub name of a published model: `BETTER_KNOWN`, else the one in Transformers' configuration module."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = inspect.getsource(sys.modules[CONFIG_MAPPING[family].__module__])
    found = re.findall(r'checkpoint="([\w.-]+/[\w.-]+)"', source)
    return BETTER_KNOWN.get(family) or (found[0] if found else "-")


def table(ran: dict[str, Row], refused: dict[str, Row]) -> str:
    """Both tables as Markdown; what failed stands in bold."""
    lines = [_line(TITLES), _line(["---"] * len(TITLES))]
    for family, row in sorted(ran.items()):
        runs = row.passed(FOLLOWS)
        shadows = sorted(name.removeprefix(f"{FOLLOWS}-") for name in runs)  # they ran in any order
        aligned = row.facts.get("cache", "-") if row.passed(*MOVES) else "**fails**"
        facts = row.facts.get("features") or "-"
        tokens = "yes" if runs else "**no**"
        read = PUBLISHED.get(family, "-"), _read(family, row)
        lines.append(_line([family, example(family), *read, facts, tokens, aligned, ", ".join(shadows) or "**none**"]))
    lines += ["", "Rejected:", "", "| family | error |", "| --- | --- |"]
    for family, row in sorted(refused.items()):
        fails = not all(row.tests.values())
        lines.append(f"| {family} | {'**not rejected**' if fails else row.facts.get('refused', '-')} |")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(family: str, row: Row) -> str:
    """The formats in which checkpoints of a family were read, and how wide those were."""
    wide = FULL_WIDTH.get(family, ())
    names = sorted({*row.read, *wide})
    found = []
    for name in names:
        widths = ["tiny" if row.read[name] else "**fails**"] if name in row.read else []
        found.append(f"{name} ({' and '.join([*widths, *(['full width'] if name in wide else [])])})")
    return ", ".join(found) or "-"


def replaced(page: str, text: str) -> str:
    """`page` with `text` between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} lacks the markers {BEGIN} ... {END}; add them where the tables go")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--check", action="store_true", help=f"write nothing; fail if {PAGE.name} has other tables")
    parser.add_argument("--from", dest="result", type=Path, help="JUnit XML of an earlier run of tests/families")
    args = parser.parse_args()
    header("Model families")
    result = args.result or RESULTS / "families.xml"
    if args.result is None:
        run_tests(result)
    text = table(*read(result))
    print(text)
    page = PAGE.read_text()
    new = replaced(page, text)
    if args.check and new != page:
        raise SystemExit(
            f"the tables in {PAGE.relative_to(ROOT)} differ from the test results; "
            "run .venv/bin/python -m scripts.families"
        )
    if not args.check:
        PAGE.write_text(new)
    if "**" in text:
        raise SystemExit("some families failed; they stand in bold above")


if __name__ == "__main__":
    main()
