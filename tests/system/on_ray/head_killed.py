"""Run by test_head_killed.py in a process of its own, which Ray ends: prints tokens, and `killed` once the head is."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from checkpoint.store import ExpertStore
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from support.machines.processes import marked


def main(store: Path, prompt: list[int], tokens: int, mark: str) -> None:
    settings = Settings(model="demo", cluster="local", workers=1, shadow="none", threads=1)
    cluster = start_cluster(settings, ExpertStore.open(store))
    for number, step in enumerate(cluster.generate(prompt, tokens, ignore_eos=True)):
        if step.token_id is not None:
            print(f"token {step.token_id}", flush=True)
        if number == 5:
            (head,) = [line for line in marked(mark) if "/gcs/gcs_server" in line.partition(" -")[0]]
            os.kill(int(head.split()[0]), signal.SIGKILL)
            print("killed", flush=True)
    cluster.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
