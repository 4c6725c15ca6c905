"""Does an emulated run of each system take as long as the simulator says of the same routes?

    .venv/bin/python -m scripts.measure.agreement.systems --quick
    .venv/bin/python -m scripts.measure.agreement.systems --systems fate smoe
    .venv/bin/python -m scripts.measure.agreement.systems --systems sep-arc --profile rtx3090-1gbe@12

A machine that cannot keep up with a profile makes ratios larger, not smaller: @12 after its name gives everything
twelve times as long.

For each system a new cluster in this process answers a warm-up, and then prompts one at a time, recorded. All of them
are simulated, in their order and with what the cluster keeps from one to the next, with the same profile's times; and
the record is told to the scheduler once more, which must decide the same. Systems for one machine have --pc and the
share --device-memory of the experts, the others --profile. A ratio is what was measured over what was simulated; it is
to be within 5 % of 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from odmoe.stores import with_forms
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.policies.registry import caches, forms_of
from scheduler.policies.systems import SYSTEMS
from scripts.lib.clusters import KeptCluster, answer, open_model
from scripts.lib.experiment import Cell, Experiment, plural
from scripts.lib.flags import common_flags, experiment_flags, parse_flags
from scripts.lib.ledger import PACKAGES, sources
from scripts.lib.prompts import prompts_of_length
from scripts.lib.provenance import header
from scripts.lib.recorded_runs import compare_in_turn
from scripts.lib.tables import Column, text_table

VERSION = 1
GOAL = 0.05
FORMS = ("int4", "int2")

COLUMNS = (
    Column("system", "system"),
    Column("profile", "profile"),
    Column("s/token", "token_s", ".4f"),
    Column("simulated", "simulated_token_s", ".4f"),
    Column("ratio", "ratio", ".3f"),
    Column("TTFT s", "ttft_s", ".3f"),
    Column("simulated", "simulated_ttft_s", ".3f"),
    Column("ratio", "ttft_ratio", ".3f"),
    Column("replayed", "replayed"),
)


@dataclass(frozen=True, slots=True)
class Measure:
    """Computes the cell of one system."""

    args: Any
    tokenizer: Any
    run: Experiment
    kept: KeptCluster

    def __call__(self, params: dict[str, Any]) -> dict[str, Any]:
        path = Path(self.run.path(params, ".recording"))
        prompts = prompts_of_length(self.tokenizer, self.args.prompts + 1, self.args.prompt_tokens, self.args.seed)
        try:
            cluster = self.kept.cluster(settings_of(params, self.args, str(path)))
        except ConfigError as error:
            return {"refused": str(error)}
        reports = [answer(cluster, prompt, self.args.tokens) for prompt in prompts]
        write_whole(path, cluster.recording())
        self.kept.close()
        recording = read_recording(path)
        times = [(report.ttft_s, report.decode_s) for report in reports]
        answers = compare_in_turn(recording, times, params["profile"])
        return {"answers": answers[1:], "difference": replay(recording).difference}


def settings_of(params: dict[str, Any], args: Any, record: str) -> Settings:
    """Raises ConfigError for a system that cannot be with these flags."""
    room = {"device_memory": params["device_memory"]} if params["device_memory"] else {}
    return Settings(
        model=args.model,
        dtype="float32",
        system=params["system"],
        profile=params["profile"],
        shadow=params["shadow"],
        record=record,
        threads=1,
        **room,
    )


def params_of(system: str, args: Any) -> dict[str, Any]:
    """What decides the cell of a system."""
    preset = SYSTEMS[system]
    kept = caches(preset.config) and preset.config.residency != "all"
    return {
        "system": system,
        "profile": args.pc if preset.single_machine else args.profile,
        "device_memory": args.device_memory if kept else None,
        "shadow": args.shadow if preset.config.predictor == "sep" else "none",
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "seed": args.seed,
    }


def row_of(params: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Means over the prompts; of a system that cannot be, why."""
    row = {"system": params["system"], "profile": params["profile"]}
    if "refused" in result:
        return row | {"refused": result["refused"]}
    answers = result["answers"]
    names = ("token_s", "simulated_token_s", "ttft_s", "simulated_ttft_s")
    row |= {name: sum(one[name] for one in answers) / len(answers) for name in names}
    row["ratio"] = row["token_s"] / row["simulated_token_s"]
    row["ttft_ratio"] = row["ttft_s"] / row["simulated_ttft_s"]
    return row | {"replayed": result["difference"] or "identical"}


def outside(rows: list[dict[str, Any]]) -> list[str]:
    """Systems whose decoding or prefill is not within the goal."""
    return [
        row["system"]
        for row in rows
        if any(abs(row[name] - 1) > GOAL for name in ("ratio", "ttft_ratio") if name in row)
    ]


def parse() -> Any:
    parser = experiment_flags(__doc__ or "", prompts=(3, 1), tokens=(32, 8))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), help="all unless said")
    parser.add_argument("--pc", default="rtx3090-pcie3@16", help="profile of systems for one machine (%(default)s)")
    parser.add_argument("--device-memory", default="25%", help="of systems that keep experts (25%% unless said)")
    common_flags(parser, "profile", "shadow", "prompt-tokens", profile="rtx3090-1gbe@4")
    args = parse_flags(parser)
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: a token is timed from the one before it")
    return args


def main() -> int:
    args = parse()
    header(f"Emulated against simulated, {plural(len(args.systems), 'system')}, answers of {args.tokens} tokens")
    store, tokenizer = open_model(args, "float32")
    if any(set(forms_of(SYSTEMS[name].config)) & set(FORMS) for name in args.systems):
        store = with_forms(store, list(FORMS))
    wanted = [Cell(params_of(name, args)) for name in args.systems]
    depends = {"model": store.manifest.fingerprint, "sources": sources(*PACKAGES)}
    note = f"emulated and simulated: {args.profile} and {args.pc}"
    with Experiment("agreement-systems", args, VERSION, depends, note) as run, KeptCluster(store) as kept:
        results = run.all(wanted, Measure(args, tokenizer, run, kept))
        rows = [row_of(cell.params, result) for cell, result in zip(wanted, results, strict=True)]
        run.write(rows, cells=results)
        print(text_table(COLUMNS, [row for row in rows if "refused" not in row]))
        for row in rows:
            if "refused" in row:
                print(f"{row['system']}: not measured: {row['refused']}")
        print(f"not within {GOAL:.0%}: {', '.join(outside(rows)) or 'none'}")
        print(run.written())
    return int(any(row.get("replayed", "identical") != "identical" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
