"""What the scripts about systems share: prompts, clusters of one worker with a budget, and what an answer cost.

Experts are read from the expert store on the disk, past the page cache (O_DIRECT) if the file system can do that,
into as many slots as the budget has room for: a miss is a read, a hit is none.
"""

from __future__ import annotations

import contextlib
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from odmoe.settings.settings import Settings, available_cores
from odmoe.start import start_cluster
from odmoe.stores import with_forms
from scheduler.errors import ConfigError
from scheduler.policies.registry import foresees, forms_of
from scripts.lib import peers
from scripts.lib.clusters import open_model
from scripts.lib.flags import common_flags, experiment_flags, parse_flags, positive
from scripts.lib.ledger import digest
from scripts.lib.paths import ROOT
from scripts.lib.prompts import mixed_prompts
from scripts.lib.simultaneous import AnsweredTogether, ask_together, figures_of
from scripts.lib.timing.calibration import Calibration
from scripts.lib.timing.idleness import Others
from scripts.lib.widened import widened_copy
from worker_node.loaders.disk import DiskLoader

MODELS = ("models/many-moe",)
BUDGETS = (10, 25, 50, 100)


@dataclass(frozen=True, slots=True)
class Answered:
    """A report, the bytes that had been loaded when its first token was there, and the processor's seconds from then to
    the last token, of all nodes together: other than a token's time, these do not grow if others use the machine."""

    report: Any
    prefill_bytes: int
    cpu_s: float

    def figures(self) -> dict[str, Any]:
        """What a cell keeps. Times in seconds."""
        count = self.report.new_tokens - 1
        return {
            **figures_of([self.report], self.prefill_bytes),
            "tpot_s": self.report.decode_s / count,
            "cpu_s_a_token": self.cpu_s / count,
        }


def ask(cluster: Any, prompt: list[int], tokens: int) -> Answered:
    """One answer of a cluster in this process; end of sequence is not heeded."""
    steps = cluster.generate(prompt, tokens, ignore_eos=True)
    first = next(steps)
    loaded = cluster.main.engine.core.stats[steps.number].bytes_loaded
    began, last = time.process_time(), first
    for step in steps:
        last = step
    return Answered(last.report, loaded, time.process_time() - began)


@dataclass
class Side:
    """Clusters of one model and budget, one a variant, all alive: each has answered the same prompts in the same order
    before it is asked the next, whether in this run or in one before it, so that what it keeps and has learned is the
    same. Each answers with as many of torch's threads as it has by itself, whichever was started last. `settings_of`: a
    variant's settings."""

    store: Any
    settings_of: Callable[[str], Settings]
    prompts: list[list[list[int]]]
    """Those of each number are answered at once."""
    tokens: int
    _open: dict[str, Any] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)

    def ask(self, variant: str, number: int, place: int = 0) -> Answered | AnsweredTogether:
        """The answer to prompt `number`, or those to the prompts that have it. `place`: of a variant that is asked the
        same several times, and that keeps nothing from one answer to the next. Raises ConfigError if a variant
        cannot be with this budget."""
        if place and self._done.get(variant) == number + 1:
            return self._ask(variant, number)
        if variant not in self._open or self._done[variant] > number:
            self._close(variant)
            settings = self.settings_of(variant)
            self._open[variant] = start_cluster(settings, self.store)
            self._threads[variant] = settings.threads_a_node
            self._done[variant] = 0
        for earlier in range(self._done[variant], number):
            self._ask(variant, earlier)
        self._done[variant] = number + 1
        return self._ask(variant, number)

    def _ask(self, variant: str, number: int) -> Answered | AnsweredTogether:
        cluster, prompts = self._open[variant], self.prompts[number]
        torch.set_num_threads(self._threads[variant])
        if len(prompts) == 1:
            return ask(cluster, prompts[0], self.tokens)
        return ask_together(cluster, prompts, self.tokens)

    def _close(self, variant: str) -> None:
        if variant in self._open:
            self._open.pop(variant).close()

    def close(self) -> None:
        for variant in list(self._open):
            self._close(variant)


@dataclass
class Bench:
    """The models of an experiment: each opened when it is first asked for; one side of one model at a time.

    `variants`: name -> settings beside model, budget and those of every cluster here.
    """

    args: Namespace
    variants: dict[str, dict[str, Any]]
    total: bool = False
    """Budgets are of the whole model, for all that the nodes hold, and not of the experts alone."""
    _models: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _calibrations: dict[str, Calibration] = field(default_factory=dict)
    _side: tuple[tuple[str, int], Side] | None = None
    _peer: tuple[tuple[str, str], peers.Peer] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._side is not None:
            self._side[1].close()
        self._side = None
        for calibration in self._calibrations.values():
            calibration.close()
        self._calibrations.clear()

    def opened(self, model: str) -> tuple[Any, Any]:
        """Its store, with every form that a variant may load, and its tokenizer."""
        if model not in self._models:
            store, tokenizer = open_model(Namespace(model=model), self.args.dtype)
            self._models[model] = with_forms(store, sorted(self._forms(model))), tokenizer
        return self._models[model]

    def _forms(self, model: str) -> set[str]:
        found: set[str] = set()
        for name in self.variants:
            with contextlib.suppress(ConfigError):  # told when it is asked for
                found |= set(forms_of(self._settings(model, name, {"device_memory": "100%"}).system_config))
        return found

    @property
    def batch(self) -> int:
        """How many prompts are answered at once."""
        return int(getattr(self.args, "batch", 1))

    def identity(self, model: str) -> dict[str, Any]:
        """What decides every figure of a model: its name and its weights, what budgets are of, and the batch."""
        of: dict[str, Any] = {"budget_of": "everything"} if self.total else {}
        of |= {"batch": self.batch} if self.batch > 1 else {}
        return {"model": Path(model).name, "weights": self.opened(model)[0].manifest.fingerprint, **of}

    def conditions(self, model: str) -> dict[str, Any]:
        """What decides every cell of a model."""
        args = self.args
        flags = {name: getattr(args, name) for name in ("dtype", "tokens", "seed", "history", "prompts")}
        return {**self.identity(model), "path": model, **flags}

    def prompts(self, model: str) -> list[list[list[int]]]:
        """Those that each cluster answers before anything is measured, one by one; then those that are measured, in
        batches."""
        history, batch = self.args.history, self.batch
        drawn = mixed_prompts(history + self.args.prompts * batch, self.args.seed)
        tokenizer = self.opened(model)[1]
        found = [tokenizer(text)["input_ids"] for _, text in drawn]
        measured = found[history:]
        starts = range(0, len(measured), batch)
        return [[one] for one in found[:history]] + [measured[start : start + batch] for start in starts]

    def settings(self, model: str, variant: str, budget: int) -> Settings:
        """`budget`: % of the bytes of all experts, or of the whole model, if budgets are for everything: KV caches
        and activations then have room for the longest prompt and its answer."""
        if not self.total:
            return self._settings(model, variant, {"device_memory": f"{budget}%"})
        longest = max(len(prompt) for prompts in self.prompts(model) for prompt in prompts) + self.args.tokens
        return self._settings(model, variant, {"memory": f"{budget}%", "parallel": self.batch, "ctx_size": longest})

    def _settings(self, model: str, variant: str, room: dict[str, Any]) -> Settings:
        common_to_all = {"workers": 1, "loader": "disk", "cluster": "embedded", **room}
        found = Settings(model=model, dtype=self.args.dtype, **(common_to_all | self.variants[variant]))
        # As published: papers compare systems with what they name, not with what pays here.
        system = found.system_config
        named = {"smaller_forms": any(forms_of(system)), "predictions": foresees(system)}
        return found.replace(**{field: "always" for field, is_read in named.items() if is_read})

    def answer(self, model: str, variant: str, budget: int, number: int, place: int = 0) -> dict[str, Any]:
        """Figures of prompt `number` of those that are measured; `refused`: why it cannot be, if it cannot.
        `place`: see `Side.ask`."""
        if self._side is None or self._side[0] != (model, budget):
            self.close()
            store = self.opened(model)[0]
            side = Side(store, lambda name: self.settings(model, name, budget), self.prompts(model), self.args.tokens)
            self._side = (model, budget), side
        speeds = self.speeds(model)
        try:
            with Others() as others:
                figures = self._side[1].ask(variant, self.args.history + number, place).figures()
            return {**figures, **speeds, "others_cores": others.cores, "at": time.time()}
        except ConfigError as error:
            return {"refused": str(error)}

    def speeds(self, model: str) -> dict[str, float]:
        """How fast the processor and the disk are now: see `Calibration.speeds`."""
        if model not in self._calibrations:
            self._calibrations[model] = Calibration(self.opened(model)[0], self.args.seed)
        return self._calibrations[model].speeds()

    def peer(
        self, model: str, name: str = peers.TRANSFORMERS, make_folder: Callable[[], Path] | None = None
    ) -> peers.Peer:
        """One of `peers.NAMES`; another model's or another one is closed first. `make_folder`: for experts on disk."""
        if self._peer is None or self._peer[0] != (model, name):
            self.close()
            self._peer = None
            self._peer = (model, name), peers.make_peer(name, model, self.args.dtype, make_folder)
        return self._peer[1]

    def reference(self, model: str, number: int) -> dict[str, Any]:
        """What Transformers answers, greedily, one prompt after the other, with every core."""
        torch.set_num_threads(available_cores())
        prompts, speeds = self.prompts(model)[self.args.history + number], self.speeds(model)
        answers = [self.peer(model).answer(prompt, self.args.tokens) for prompt in prompts]
        return {
            "token_ids": [token for timed in answers for token in timed.token_ids],
            "ttft_s": fmean(timed.ttft_s for timed in answers),
            "tpot_s": fmean(timed.decode_s / (len(timed.token_ids) - 1) for timed in answers),
            **speeds,
        }

    def reads(self, model: str) -> str:
        """How the disk is read here, in words."""
        loader = DiskLoader(self.opened(model)[0])
        direct = loader.direct
        loader.close()
        return "read with O_DIRECT" if direct else "read through the page cache: this file system has no O_DIRECT"


def in_drawn_order(names: list[str], *what: Any) -> list[str]:
    """The names in an order that is drawn anew for each `what`, and is the same in every run."""
    found = list(names)
    random.Random(digest([str(one) for one in what])).shuffle(found)
    return found


def models(args: Any) -> None:
    """Sets `args.models` to paths that exist and `args.model` to their names. Raises SystemExit."""
    found = [one if Path(one).exists() else str(ROOT / one) for one in args.models]
    missing = [one for one in found if not Path(one).exists()]
    if missing:
        raise SystemExit(f"--models: {', '.join(missing)} is not there")
    args.models, args.model = found, ", ".join(Path(one).name for one in found)


def model_flags(about: str, prompts: tuple[int, int], tokens: tuple[int, int], default: Sequence[str]) -> Any:
    """As `experiment_flags`, for several models."""
    parser = experiment_flags(about, prompts=prompts, tokens=tokens, model=None)
    parser.add_argument("--models", nargs="+", default=list(default), help="%(default)s unless said")
    return parser


def parse_model_flags(parser: Any) -> Any:
    """With paths of models, and the folder of what is written. Raises SystemExit."""
    args = parse_flags(parser)
    models(args)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def system_flags(
    about: str, prompts: tuple[int, int], tokens: tuple[int, int], budgets: tuple[int, ...] = BUDGETS
) -> Any:
    """As `experiment_flags`, for several models and budgets."""
    parser = model_flags(about, prompts, tokens, MODELS)
    parser.add_argument(
        "--budgets",
        type=positive,
        nargs="+",
        default=list(budgets),
        metavar="%",
        help="device memory, %% of all experts; %(default)s unless said",
    )
    parser.add_argument(
        "--widen", type=positive, default=1, metavar="N", help="experts N times as large (scripts.models.widen)"
    )
    common_flags(parser, "dtype")
    parser.add_argument("--history", type=int, default=2, help="prompts before what is measured; %(default)s")
    return parser


def batch_flag(parser: Any) -> None:
    parser.add_argument(
        "--batch", type=positive, default=1, help="prompts that are answered at once; %(default)s unless said"
    )


def batch_suffix(batch: int) -> str:
    """Of the name of an experiment."""
    return f"-batch{batch}" if batch > 1 else ""


def parse_system_flags(parser: Any) -> Any:
    args = parse_flags(parser)
    models(args)
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: a token is timed from the one before it")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.widen > 1:
        args.models = [str(widened_copy(Path(one), args.widen, args.out / "models")) for one in args.models]
        args.model = ", ".join(Path(one).name for one in args.models)
    return args
