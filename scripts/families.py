"""Which model families run, from the tests that show it: the table at the end of the README.

.venv/bin/python -m scripts.families            # every family, some minutes; writes the table
.venv/bin/python -m scripts.families --check    # the same, but fails where the README's table is another
.venv/bin/python -m scripts.families --check --from results/families.xml    # by the last run's results
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.flags import script_parser
from scripts.lib.paths import RESULTS, ROOT
from scripts.lib.provenance import header

README = ROOT / "README.md"
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
"""Where Transformers names a model of another family, or a toy."""
TITLE = "| family | such as | its experts and layers | tokens of `eager` | what is aligned | shadows |"


@dataclass
class Row:
    """What the tests said of a family. `tests`: whether each has passed, by its name without the family."""

    tests: dict[str, bool] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def passed(self, *starts: str) -> list[str]:
        """Names of those that begin so, where all of them passed."""
        found = [name for name in self.tests if name.startswith(starts)]
        return found if all(self.tests[name] for name in found) else []


def run_tests(result: Path) -> None:
    """Every family through every test; what failed is in the result."""
    environment = {**os.environ, "FAMILIES": "all", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "pytest", "-q", TESTS, f"--junitxml={result}", "-o", "junit_family=xunit1"]
    code = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"{TESTS} could not be run: pytest ended with {code}")


def read(result: Path) -> tuple[dict[str, Row], dict[str, Row]]:
    """Families that ran, and those that were refused, in the order of the tests."""
    ran: dict[str, Row] = {}
    refused: dict[str, Row] = {}
    for case in ElementTree.parse(result).getroot().iter("testcase"):
        name, _, parameters = case.get("name", "").rstrip("]").partition("[")
        if not parameters:
            continue
        if name == REFUSES:
            row = refused.setdefault(parameters, Row())
        else:
            family, _, rest = parameters.partition("-")
            row, name = ran.setdefault(family, Row()), f"{name}-{rest}"
        row.tests[name] = not any(case.findall(kind) for kind in ("failure", "error", "skipped"))
        row.facts |= {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
    return ran, refused


def example(family: str) -> str:
    """A published model: as a rule the one that Transformers names beside the family's configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = inspect.getsource(sys.modules[CONFIG_MAPPING[family].__module__])
    found = re.findall(r'checkpoint="([\w.-]+/[\w.-]+)"', source)
    return BETTER_KNOWN.get(family) or (found[0] if found else "-")


def table(ran: dict[str, Row], refused: dict[str, Row]) -> str:
    lines = [TITLE, "| --- | --- | --- | --- | --- | --- |"]
    for family, row in sorted(ran.items()):
        runs = row.passed(FOLLOWS)
        shadows = [name.removeprefix(f"{FOLLOWS}-") for name in runs]
        aligned = row.facts.get("cache", "-") if row.passed(*MOVES) else "**fails**"
        facts = row.facts.get("features") or "-"
        tokens = "yes" if runs else "**no**"
        lines.append(
            f"| {family} | {example(family)} | {facts} | {tokens} | {aligned} | {', '.join(shadows) or '**none**'} |"
        )
    lines += ["", "Refused before anything is loaded or written:", "", "| family | error |", "| --- | --- |"]
    for family, row in sorted(refused.items()):
        fails = not all(row.tests.values())
        lines.append(f"| {family} | {'**not refused**' if fails else row.facts.get('refused', '-')} |")
    return "\n".join(lines)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the README says otherwise")
    parser.add_argument("--from", dest="result", type=Path, help="a JUnit XML that these tests wrote")
    args = parser.parse_args()
    header("Model families")
    result = args.result or RESULTS / "families.xml"
    if args.result is None:
        run_tests(result)
    ran, refused = read(result)
    text = table(ran, refused)
    print(text)
    page = README.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README.name} has no {BEGIN} ... {END}")
    new = f"{before}{BEGIN}\n{text}\n{END}{after}"
    if args.check and new != page:
        raise SystemExit(
            f"the table in {README.name} is not what the tests give; run .venv/bin/python -m scripts.families"
        )
    if not args.check:
        README.write_text(new)
    if "**" in text:
        raise SystemExit("not every family passes")


if __name__ == "__main__":
    main()
