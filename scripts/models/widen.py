"""The same checkpoint with larger experts, so that a load takes as long beside the rest as a real model's does.

    .venv/bin/python -m scripts.models.widen models/demo-moe /tmp/wide-moe --times 32
    .venv/bin/python -m scripts.papers.compare_systems --models models/demo-moe --widen 32 --dtype bfloat16   # the same

Each expert's inner dimension is --times as long; what is added is zero, so the model says what it said, and its gates
choose what they chose, while an expert's bytes, its load and its products are those of one so large. demo-moe's experts
are 0.3 MB in bfloat16, less than a message costs; times 32 they are 10.6 MB, half of Qwen1.5-MoE-A2.7B's 17.3 MB.
"""

from __future__ import annotations

from pathlib import Path

from scripts.lib.flags import positive, script_parser
from scripts.lib.widened import write_widened


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=positive, default=32, help="%(default)s unless said")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is no checkpoint: it has no config.json")
    if args.out.exists():
        parser.error(f"{args.out} is there; give another place")
    write_widened(args.model, args.out, args.times)
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.glob('*.safetensors')) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
