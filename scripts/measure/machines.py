"""What `odmoe plan --machine` advises, emulated on a small model: several machines beside one.

.venv/bin/python -m scripts.measure.machines -m scripts/data/glm-5.json --machine 'pc x8: ram=64GB'

The engine runs for real on `--model-run`, at the planned times of a layer of the model that is planned, `--slowdown`
times as slow, so that eight workers do not compete for this machine's cores. Workers have slots for the planned share
of the experts. Routes are those of the small model; where it chooses fewer experts a token, each takes as much longer.
So compare how many times as fast several machines are, not tokens/s. One machine also prefetches by the next gate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from main_node.shape import model_shape
from odmoe.api.planning import advise_from_settings
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.plan_settings import HOME_PROFILE, PlanSettings
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from odmoe.text import load_tokenizer
from scheduler.planning.layout_speed import profile_of
from scheduler.planning.machines import ALL, Layout
from scheduler.timing.profile import Profile, find_profile
from scheduler.types import ModelShape
from scripts.lib.clusters import answer
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import ROOT
from scripts.lib.prompts import mixed_prompts
from scripts.lib.provenance import header
from scripts.lib.tables import Column, text_table

COLUMNS = (
    Column("machines", "machines", "d"),
    Column("experts with slots", "experts_with_slots", ".0%"),
    Column("planned tokens/s", "planned_tokens_per_s", ".2f"),
    Column("emulated tokens/s", "emulated_tokens_per_s", ".2f"),
)


def write_profile(profile: Profile, run: ModelShape, layout: Layout, folder: Path) -> Path:
    """The planned times of a layer, with the sizes of the model that runs."""
    more = profile.top_k / run.top_k
    networked = {"hop_ms": 1e3 * profile.hop_s, "link_bits_per_s": profile.link_bits_per_s}
    fields = {
        "name": f"{len(layout.machines)}-machines",
        "model": {
            "layers": len(run.layers),
            "experts": run.experts,
            "top_k": run.top_k,
            "hidden_bytes": profile.hidden_bytes,
            "kv_bytes_per_token_layer": profile.kv_bytes,
        },
        "cluster": {"workers": len(layout.seats), "group_size": min(run.top_k, len(layout.seats))},
        "main_layer_ms": 1e3 * profile.main_layer_s,
        "main_layer_ms_per_extra_token": 1e3 * profile.main_extra_s,
        "expert_ms": 1e3 * more * profile.expert_s,
        "expert_ms_per_extra_token": 1e3 * more * profile.expert_extra_s,
        "load_ms": 1e3 * more * profile.load_s,
        "shadow_layer_ms": 1e3 * profile.shadow_layer_s,
        **(networked if profile.is_networked else {}),
    }
    path = folder / f"{fields['name']}.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False), "utf-8")
    return path


def settings_of(layout: Layout, experts: int, profile: Path, args: argparse.Namespace) -> Settings:
    """Of the cluster that stands for the layout: `experts` are the small model's."""
    kept_all = layout.keeps == ALL
    share = layout.slots / layout.experts / len(layout.seats)
    given: dict[str, Any] = {"system": "fully-cached"}
    if not kept_all:
        given = {"system": "on-demand", "residency": layout.eviction, "slots": max(1, round(share * experts))}
    if not kept_all and len(layout.machines) == 1:
        given["predictor"] = "next-gate"
    slower = f"{profile}@{args.slowdown}" if args.slowdown > 1 else str(profile)
    return Settings(model=args.model_run, workers=len(layout.seats), profile=slower, threads=1, **given)


def decode_rates(settings: Settings, store: Any, prompts: list[list[int]], tokens: int) -> list[float]:
    """Decode tokens/s of each prompt. The first answer fills caches and is not counted."""
    cluster = start_cluster(settings, store)
    try:
        reports = [answer(cluster, prompt, tokens) for prompt in [prompts[0], *prompts]]
    finally:
        cluster.close()
    return [report.decode_tokens_per_s for report in reports[1:]]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("-m", "--model", required=True, help="the model that is planned: directory or config.json")
    parser.add_argument("--machine", action="append", required=True, help="as `odmoe plan --machine`")
    parser.add_argument("--experts", default="int4", help="bits of its experts (%(default)s)")
    parser.add_argument("--dense", default="int4", help="bits of its dense part (%(default)s)")
    parser.add_argument("--model-run", default=str(ROOT / "models/many-moe"), help="the small model (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=24, help="of each answer (%(default)s)")
    parser.add_argument("--prompts", type=positive, default=3, help="(%(default)s)")
    parser.add_argument("--slowdown", type=positive, default=4, help="times (%(default)s)")
    args = parser.parse_args()
    header("Several emulated machines beside one")
    asked = PlanSettings(model=args.model, machine=args.machine, experts=args.experts, dense=args.dense)
    advice, _ = advise_from_settings(asked)
    if advice.alone is None:
        raise SystemExit(f"{', '.join(args.machine)}: one machine alone is advised; there is nothing to compare")
    prepare_process()
    store = prepare_store(args.model_run, None, "float32")
    run, base = model_shape(store), find_profile(HOME_PROFILE)
    experts = len(run.layers) * run.experts
    prepare_libraries(1)
    tokenizer = load_tokenizer(store.dense)
    prompts = [tokenizer(text)["input_ids"][:64] for _, text in mixed_prompts(args.prompts)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, planned in ((advice.layout, advice.tokens_per_s), advice.alone):
            profile = write_profile(profile_of(base, layout), run, layout, Path(folder))
            settings = settings_of(layout, experts, profile, args)
            rates = decode_rates(settings, store, prompts, args.tokens)
            part = len(run.layers) / layout.model.layers
            rows.append(
                {
                    "machines": len(layout.machines),
                    "keeps": layout.keeps,
                    "experts_with_slots": min(1.0, layout.slots / layout.experts),
                    "planned_tokens_per_s": planned,
                    "emulated_tokens_per_s": statistics.median(rates) * args.slowdown * part,
                }
            )
    print(text_table(COLUMNS, rows))
    several, one = rows
    for kind in ("planned", "emulated"):
        name = f"{kind}_tokens_per_s"
        print(f"{kind}: {several[name] / one[name]:.2f} times one machine's speed")


if __name__ == "__main__":
    main()
