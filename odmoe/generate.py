"""`odmoe generate`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import closing

from odmoe.process import prepare_process
from odmoe.settings import Settings
from odmoe.start import start_cluster
from odmoe.terminal import Terminal


def run_generate(settings: Settings, prompt: str, as_json: bool, terminal: Terminal) -> None:
    """Everything that can be wrong with model, store or prompt is found before a node is started."""
    prepare_process(terminal.debug)
    with terminal.progress() as progress:
        from odmoe.stores import prepare_store

        store = prepare_store(settings.model, settings.store, settings.dtype, progress)
    with terminal.status() as say:
        say("reading the tokenizer")
        from main_node.node import model_shape
        from odmoe.text import TextStream, encode, load_tokenizer

        tokenizer = load_tokenizer(store.dense)
        ids = encode(tokenizer, prompt, model_shape(store).context)
        cluster = start_cluster(settings, store, say)
    text = TextStream(tokenizer)
    pieces: list[str] = []
    report = None
    with closing(cluster), closing(cluster.generate(ids, settings.max_new_tokens)) as steps:
        for step in steps:
            piece = text.push(step.token_id) + (text.flush() if step.report else "")
            pieces.append(piece)
            report = step.report
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if report is None:
        return
    if as_json:
        print(json.dumps({"text": "".join(pieces), **dataclasses.asdict(report), "cluster": settings.cluster,
                          "shadow": settings.shadow, "dtype": store.manifest.dtype}))  # fmt: skip
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    terminal.report(report, settings.cluster)
