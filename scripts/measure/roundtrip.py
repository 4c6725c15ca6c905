"""Our round trip, codec included, beside bare gRPC echoes and plain TCP of the same size, in turns.

.venv/bin/python -m scripts.measure.roundtrip                          # 1 KB to 1 MB, p50, p90, ratio to the bare echo
.venv/bin/python -m scripts.measure.roundtrip --sizes 16384 --turns 300 --json --plot results/roundtrip.png
.venv/bin/python -m scripts.measure.roundtrip --sizes 16384 --tls      # and both of gRPC with mutual TLS

Each contender has two processes of its own, a server and a client, and all of them take turns, so that noise hits all
alike and no contender's threads disturb another's. A round
trip starts when the message is handed over and ends when the answer is there, in the thread that reads the stream. Ours
is a `Compute` with `size` bytes of hidden states, answered by a `Computed` of as many from the node's `on_message`;
the bare echoes move that many bytes as they are, with the settings of our streams.
"""

from __future__ import annotations

import json
import statistics
import timeit
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.lib.flags import script_parser
from scripts.lib.provenance import command, header, machine, save_rows
from scripts.measure.echoes import AIO, BARE, OURS, OURS_TLS, answer, compute, contenders
from wire.codec import FROM_WORKER, TO_WORKER
from wire.messages import Computed

SIZES = (1024, 4096, 16384, 65536, 1 << 20)


# --- measuring -------------------------------------------------------------------------------------------------


def codec_us(size: int) -> float:
    """Microseconds to encode and decode both messages of a round trip: the best of several runs."""
    there, back = compute(size), Computed(1, compute(size).hidden, 0.0)
    encoded = TO_WORKER.encode(there), FROM_WORKER.encode(back)

    def both() -> None:
        TO_WORKER.decode(encoded[0])
        FROM_WORKER.decode(encoded[1])
        TO_WORKER.encode(there)
        FROM_WORKER.encode(back)

    count = max(20, min(2000, (32 << 20) // size))
    return min(timeit.repeat(both, number=count, repeat=5)) / count * 1e6


def measure(sizes: list[int], turns: int, per_turn: int, tls: bool = False) -> list[dict[str, Any]]:
    """A row for each size and contender: microseconds, and the ratio of the medians to the bare echo's."""
    rows = []
    with ExitStack() as stack:
        found = contenders(stack, tls)
        for size in sizes:
            taken: dict[str, list[float]] = {name: [] for name in found}
            for turn in track(range(turns + 2), console=Console(stderr=True), description=f"{size} bytes"):
                for name, client in found.items():
                    client.send((size, per_turn))
                    seconds = answer(client)
                    taken[name] += seconds if turn >= 2 else []
            p50 = {name: statistics.median(seconds) for name, seconds in taken.items()}
            for name, seconds in taken.items():
                row = {"size": size, "what": name, "p50_us": p50[name] * 1e6}
                row |= {"p90_us": statistics.quantiles(seconds, n=10)[-1] * 1e6, "count": len(seconds)}
                row |= {"ratio_to_bare": p50[name] / p50[BARE], "ratio_to_aio": p50[name] / p50[AIO]}
                if name == OURS_TLS:
                    row |= {"ratio_to_plain": p50[name] / p50[OURS]}
                rows.append(row | ({"codec_us": codec_us(size)} if name == OURS else {}))
    return rows


# --- showing ---------------------------------------------------------------------------------------------------


def shown_size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="round trips, microseconds", title_justify="left")
    for column in ("size", "what", "p50", "p90", "to bare gRPC", "to aio", "codec alone"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for i, row in enumerate(rows):
        figures = [f"{row[key]:.0f}" for key in ("p50_us", "p90_us")]
        ratios = [f"{row[key]:.2f}" for key in ("ratio_to_bare", "ratio_to_aio")]
        codec = f"{row['codec_us']:.1f}" if "codec_us" in row else ""
        last = i + 1 == len(rows) or rows[i + 1]["size"] != row["size"]
        table.add_row(shown_size(row["size"]), row["what"], *figures, *ratios, codec, end_section=last)
    Console(width=110).print(table)
    for row in rows:
        if "ratio_to_plain" in row:
            size = shown_size(row["size"])
            print(f"mutual TLS takes {row['ratio_to_plain']:.2f} times the plain stream's time at {size}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Median and 90th percentile of each contender over the size, and how many times the bare echo ours takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), width_ratios=(3, 2), layout="constrained")
    names = list(dict.fromkeys(row["what"] for row in rows))
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    for name in names:
        mine = [row for row in rows if row["what"] == name]
        p50, p90 = [[row[key] for row in mine] for key in ("p50_us", "p90_us")]
        (line,) = left.plot(sizes, p50, marker="o", label=name, linewidth=2.5 if name == OURS else 1.2)
        left.fill_between(sizes, p50, p90, color=line.get_color(), alpha=0.12, linewidth=0)
    left.set(xscale="log", yscale="log", xlabel="bytes each way", ylabel="microseconds, median to 90th percentile")
    left.set_title("Round trip")
    left.legend(frameon=False, fontsize=9)
    ours = [row for row in rows if row["what"] == OURS]
    bars = right.bar([shown_size(size) for size in sizes], [row["ratio_to_bare"] for row in ours], color="tab:blue")
    right.bar_label(bars, fmt="%.2f", padding=2)
    right.axhline(1.0, color="black", linewidth=0.8)
    right.axhline(1.3, color="tab:red", linewidth=1.0, linestyle="--", label="goal at 16 KB: 1.3")
    right.set_ylim(0, max(1.6, 1.15 * max(row["ratio_to_bare"] for row in ours)))
    right.set_title("Ours, codec included, over bare gRPC")
    right.legend(frameon=False, fontsize=9, loc="upper right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    for axis in (left.xaxis,):
        axis.set_ticks(sizes, [shown_size(size) for size in sizes])
        axis.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes each way, multiples of 4")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--per-turn", type=int, default=20, help="round trips of each contender in a turn")
    parser.add_argument("--tls", action="store_true", help="with mutual TLS, too, as off loopback")
    parser.add_argument("--json", action="store_true", help="print one object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as a PNG")
    args = parser.parse_args()
    if not args.json:
        header("Round trips")
    rows = measure(args.sizes, args.turns, args.per_turn, args.tls)
    if args.json:
        print(json.dumps({"machine": machine(), "command": command(), "rows": rows}, indent=1))
    else:
        show(rows)
        print(f"written to {save_rows('roundtrip', rows)}")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
