"""The same checkpoint with larger experts, so that a load takes as long beside the rest as a real model's does.

    .venv/bin/python -m scripts.models.widen models/demo-moe /tmp/wide-moe --times 32
    .venv/bin/python -m scripts.papers.compare_systems --models models/demo-moe --widen 32 --dtype bfloat16   # the same

Each expert's inner dimension is --times as long; what is added is zero, so the model says what it said, and its gates
choose what they chose, while an expert's bytes, its load and its products are those of one so large. demo-moe's experts
are 0.3 MB in bfloat16, less than a message costs; times 32 they are 10.6 MB, half of Qwen1.5-MoE-A2.7B's 17.3 MB.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.lib.flags import positive, script_parser

INNER = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size", "qwen2_moe": "moe_intermediate_size"}
"""What an expert's inner dimension is called, by model type."""


def widened(model: Any, times: int) -> Any:
    """A copy of a Transformers model, with experts' inner dimension `times` as long. Raises SystemExit for a model
    whose experts are not known here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = model.config.model_type
    if kind not in INNER:
        raise SystemExit(f"the model is a {kind}; allowed: {', '.join(INNER)}")
    fields = model.config.to_dict()
    fields[INNER[kind]] *= times
    wide = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=model.dtype)
    weights = {name: _wider(name, value, times) for name, value in model.state_dict().items()}
    wide.load_state_dict(weights)
    wide.generation_config = model.generation_config
    return wide


def _wider(name: str, value: torch.Tensor, times: int) -> torch.Tensor:
    if name.endswith("experts.gate_up_proj"):  # [E, 2 I, H]: gate, then up
        return torch.cat([_padded(part, 1, times) for part in value.chunk(2, dim=1)], dim=1)
    if name.endswith("experts.down_proj"):  # [E, H, I]
        return _padded(value, 2, times)
    return value


def _padded(value: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    shape = list(value.shape)
    shape[dim] *= times - 1
    return torch.cat([value, value.new_zeros(shape)], dim=dim)


def write_widened(model: Path, out: Path, times: int) -> None:
    """`out`, whole or not at all: the checkpoint with its tokenizer, and what was learned of the gates, which are the
    same."""
    from transformers import AutoModelForCausalLM

    wide = widened(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), times)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder) / out.name
        wide.save_pretrained(partial)
        for file in sorted([*model.glob("token*"), *model.glob("special*")]):
            shutil.copy(file, partial)
        partial.rename(out)


def widened_copy(model: Path, times: int, folder: Path) -> Path:
    """The widened checkpoint in a folder of such, made where it is not there yet. Other weights have another path."""
    weights = hashlib.sha256()
    for file in sorted([*model.glob("*.safetensors"), model / "config.json"]):
        weights.update(file.read_bytes())
    out = folder / weights.hexdigest()[:12] / f"{model.name}-wide{times}"
    if not out.exists():
        write_widened(model, out, times)
    return out


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
