"""The engines, each made in a process of its own and given the same tokens to decode.

An engine does not continue with the token that it would choose: every engine is given the same one at each step, so
that all compute the same routes. What it would have chosen is kept, to show that all compute the same model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scripts.lib.disk import disk_bytes
from scripts.peers.checkpoints import VOCABULARY

EAGER, ACCELERATE, LLAMA, OURS = "Transformers eager", "accelerate", "llama.cpp", "OD-MoE"
PROMPT = 128
"""Tokens of each prompt."""
FIRST_TOKEN = 3
"""Token ids below are special ones."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a process needs to make its engine."""

    kind: str
    """One of the names above."""
    model: Path
    """A checkpoint, a GGUF file, or of `OURS` a store."""
    threads: int
    store: Path | None = None
    """Of `OURS` the expert store, of `ACCELERATE` the folder of the offloaded experts."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `OURS` those of a cluster, of `LLAMA` whether to `repack`."""


@dataclass(frozen=True, slots=True)
class Task:
    """Tokens that every engine is given."""

    prompt: list[int]
    continuation: list[int]


def forced_task(seed: int, turn: int, tokens: int) -> Task:
    """Drawn anew for each turn, so that no cache and no predictor has seen a turn's routes before."""
    draw = random.Random(f"{seed}/{turn}")
    ids = [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT + tokens)]
    return Task(ids[:PROMPT], ids[PROMPT:])


@dataclass(slots=True)
class Turn:
    """One task computed. Times in seconds."""

    ttft_s: float
    """From the task to the logits of the prompt's last token."""
    decode_s: float
    """From there to the logits of the continuation's last token."""
    choices: list[int]
    """The engine's own greedy token after the prompt and after each forced token."""
    read_bytes: int
    """Read from disks for the continuation."""
    first_token_at: float
    """time.monotonic() when the first token was there."""
    hits: int | None = None
    named: int | None = None
    """Of `OURS`: experts that the continuation's gates chose. `hits` of them were in a slot."""
    exact: bool | None = None
    others_cores: float | None = None
    """Cores that other processes used meanwhile, on average."""


class Steps:
    """Keeps times and choices of one task, a call of `chosen` for each pass."""

    def __init__(self) -> None:
        self._choices: list[int] = []
        self._start = self._first = self._last = time.monotonic()
        self._before = self._after = 0

    def chosen(self, token: int) -> None:
        self._last = time.monotonic()
        self._choices.append(token)
        if len(self._choices) == 1:
            self._before = disk_bytes()
            self._first = time.monotonic()
            self.first_token_at = self._last
        self._after = disk_bytes()

    def turn(self) -> Turn:
        return Turn(
            self.first_token_at - self._start,
            self._last - self._first,
            self._choices,
            self._after - self._before,
            self.first_token_at,
        )


class Made(Protocol):
    """An engine that is ready."""

    def answer(self, task: Task) -> Turn: ...

    def close(self) -> None: ...


class Eager:
    """A Transformers model, with all experts in memory or offloaded by accelerate."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def answer(self, task: Task) -> Turn:
        import torch

        steps = Steps()
        given, cache = task.prompt, None
        with torch.inference_mode():
            for token in (*task.continuation, None):
                out = self._model(
                    input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache = out.past_key_values
                steps.chosen(int(out.logits[0, -1].float().argmax()))
                if token is not None:
                    given = [token]
        return steps.turn()

    def close(self) -> None:
        pass


class LlamaCpp:
    """llama-cpp-python with the weights mapped from the GGUF file, which is its default.

    `repack`: whether it may copy weights into a layout of its own, also its default. Those are then twice in memory.
    """

    def __init__(self, file: Path, threads: int, context: int, repack: bool = True) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def chosen() -> Any:
            found = defaults()
            found.use_extra_bufts = repack
            return found

        llama_cpp.llama_cpp.llama_model_default_params = chosen  # the class has no argument for it
        self._model: Any = llama_cpp.Llama(
            str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False
        )

    def answer(self, task: Task) -> Turn:
        import numpy as np

        steps = Steps()
        self._model.reset()
        for given in (task.prompt, *([token] for token in task.continuation)):
            self._model.eval(given)
            pointer = self._library.llama_get_logits_ith(self._model.ctx, -1)
            steps.chosen(int(np.ctypeslib.as_array(pointer, shape=(self._model.n_vocab(),)).argmax()))
        return steps.turn()

    def close(self) -> None:
        self._model.close()


class ForcedChooser:
    """Takes the place of an answer's chooser: keeps the greedy token and returns the forced one."""

    def __init__(self, tokens: list[int], steps: Steps) -> None:
        self.ends = self.last_tokens = frozenset[int]()
        self.complete_at: int | None = None
        self.seed: int | None = None
        self.ignored: list[str] = []
        self._tokens = iter(tokens)
        self._steps = steps

    def choose(self, logits: Any) -> int:
        token = int(logits.argmax())
        self._steps.chosen(token)
        return next(self._tokens, token)


class Ours:
    """An embedded cluster of this project."""

    def __init__(self, engine: Engine) -> None:
        from odmoe.clusters.process import prepare_libraries, prepare_process
        from odmoe.settings.settings import Settings
        from odmoe.start import start_cluster
        from odmoe.stores import prepare_store

        prepare_process()
        prepare_libraries(engine.threads)
        settings = Settings(
            model=str(engine.model),
            store=None if engine.store is None else str(engine.store),
            dtype="bfloat16",
            threads=engine.threads,
            **{"workers": 1, "loader": "disk", **engine.settings},
        )
        self._cluster: Any = start_cluster(settings, prepare_store(settings.model, settings.store, settings.dtype))

    def answer(self, task: Task) -> Turn:
        steps = Steps()
        answer = self._cluster.generate(task.prompt, len(task.continuation) + 1, ignore_eos=True)
        answer.request.chooser = ForcedChooser(task.continuation, steps)
        *_, last = answer
        turn = steps.turn()
        turn.decode_s -= last.report.shadow_wait_s
        turn.hits, turn.named, turn.exact = last.report.hits, last.report.named, last.report.exact
        return turn

    def close(self) -> None:
        self._cluster.close()


def make_engine(engine: Engine) -> Made:
    """Load the engine's model in this process."""
    makers: dict[str, Callable[[], Made]] = {
        EAGER: lambda: _transformers(engine),
        ACCELERATE: lambda: _transformers(engine),
        LLAMA: lambda: LlamaCpp(engine.model, engine.threads, 2 * PROMPT, **engine.settings),
        OURS: lambda: Ours(engine),
    }
    return makers[engine.kind]()


def _transformers(engine: Engine) -> Made:
    from odmoe.clusters.process import prepare_libraries, prepare_process
    from scripts.lib import peers

    prepare_process()
    prepare_libraries(engine.threads)
    if engine.store is not None:
        return Eager(peers.offloaded_model(str(engine.model), "bfloat16", engine.store))
    return Eager(peers.transformers_peer(str(engine.model), "bfloat16").model)
