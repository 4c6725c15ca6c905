"""Random checkpoints as wide as published models, in the format in which those are published.

Written shard by shard: no more than one is in memory. They have no tokenizer: `odmoe generate` refuses them, and
scripts/measure/formats/published.py asks them with random tokens.

    .venv/bin/python -m scripts.checkpoints.make gpt-oss-20b --layers 6
    .venv/bin/python -m scripts.checkpoints.make deepseek-v3 --experts 64 --vocabulary 32768

All widths are the published ones. Fewer than published are the layers, and the experts and the vocabulary where a flag
says so. deepseek-v3 has one dense layer rather than three, and no layer for multi-token prediction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError
from scripts.checkpoints.models import MODELS, Model, weights
from scripts.checkpoints.weights import Weight
from scripts.lib.flags import positive, script_parser
from scripts.peers.checkpoints import INDEX, made_once

SHARD_BYTES = 1 << 29
"""A shard ends before the tensor that would make it longer."""


def make(
    model: Model,
    folder: Path,
    layers: int | None = None,
    experts: int | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
) -> Path:
    """The checkpoint's path beneath `folder`, written unless it is there already. Whole or not at all."""
    config = model.config(layers, experts, vocabulary)
    return write(model, config, folder, seed)


def write(model: Model, config: dict[str, Any], folder: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> Path:
    """The same for any configuration of the model's family."""
    wanted = list(weights(model, config))
    what = json.dumps([config, seed, shard_bytes, [(one.name, one.encoding, one.std) for one in wanted]])
    name = f"{model.name}-{config['num_hidden_layers']}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    return made_once(folder / name, lambda path: _write(config, list(shards(wanted, shard_bytes)), path, seed))


def shards(wanted: Iterable[Weight], shard_bytes: int) -> Iterator[list[Weight]]:
    """Weights of each file, in order."""
    held: list[Weight] = []
    for weight in wanted:
        if held and sum(one.nbytes for one in held) + weight.nbytes > shard_bytes:
            yield held
            held = []
        held.append(weight)
    yield held


def _write(config: dict[str, Any], files: list[list[Weight]], folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    index: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: value for weight in held for name, value in weight.draw(draw).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    total = sum(weight.nbytes for held in files for weight in held)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    from odmoe.stores import cache_dir

    parser = script_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=positive, help="MoE layers (6; deepseek-v3: 2)")
    parser.add_argument("--experts", type=positive, help="of a layer (as published)")
    parser.add_argument("--vocabulary", type=positive, help="tokens (as published)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "published", help="(%(default)s)")
    args = parser.parse_args()
    try:
        print(make(MODELS[args.model], args.folder, args.layers, args.experts, args.vocabulary, args.seed))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
