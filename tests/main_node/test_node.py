"""Answers of the main node: where they end, what they report, and what is left behind. Real nodes, one process."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from main_node.answer import Step
from main_node.engine.engine import Engine
from main_node.node import MainNode
from main_node.report import Report
from main_node.shadow_start import ShadowStart
from main_node.shape import model_shape
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import ConfigError, HandshakeError, LaunchError, PromptError, RequestFailedError
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from wire import inprocess
from wire import messages as w
from wire.base import Channel, Handler, Node
from worker_node.loaders.memory import MemoryLoader
from worker_node.node import Worker

pytestmark = pytest.mark.timeout(90)

WORKERS, TOKENS, WAIT_S = 4, 8, 20.0
CACHE_ROW = 8 * 2 * 2 * 32 * 4  # layers, keys and values, heads, D, bytes of float32


class Tap:
    """A stream that keeps what passes, both ways."""

    def __init__(self, node: Node) -> None:
        self.sent: list[w.Message] = []
        self.heard: list[w.Message] = []
        self._node = node

    def connect(self, handler: Handler) -> Channel:
        self._handler = handler
        self._channel = inprocess.connect(self._node, self)
        return self

    def send(self, message: w.Message) -> None:
        self.sent.append(message)
        self._channel.send(message)

    def on_message(self, message: w.Message) -> None:
        self.heard.append(message)
        self._handler.on_message(message)

    def on_close(self, error: Any) -> None:
        self._handler.on_close(error)

    def close(self) -> None:
        self._channel.close()


class House:
    """A main node, its workers and perhaps its shadow, all that they say on tap."""

    def __init__(self, store: Any, slots: int = 1, shadow: ShadowStart | None = None) -> None:
        self.store = store
        self.core = Core(model_shape(store), RoundRobin(2), Alignment(), 4096)
        manifest = store.manifest
        self.engine = Engine(self.core, w.Hello(w.PROTOCOL_VERSION, manifest.fingerprint, manifest.dtype, "main"))
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self.nodes: list[Node] = []
        self.taps: list[Tap] = []
        self.shadow_tap: Tap | None = None
        self.gates: dict[t.Visit, set[int]] = {}
        for number in range(WORKERS):
            worker = Worker(f"worker {number}", store, arithmetic, MemoryLoader(store), slots)
            self.nodes.append(worker)
            self.taps.append(Tap(worker))
            self.engine.add_worker(number, self.taps[-1].connect, WAIT_S)
        experts = self.engine.experts

        def noted(visit: t.Visit, hidden: Any, index: torch.Tensor, weights: Any) -> torch.Tensor:
            self.gates[visit] = set(torch.unique(index).tolist())
            return experts(visit, hidden, index, weights)

        self.engine.experts = noted  # type: ignore[method-assign]
        self.main = MainNode(store, self.engine, torch.float32, shadow)

    def join_shadow(self, model: ShadowModel) -> Tap:
        shadow = Shadow("shadow", model, self.store.manifest.fingerprint, self.store.manifest.dtype)
        self.nodes.append(shadow)
        self.shadow_tap = Tap(shadow)
        self.engine.add_shadow(self.shadow_tap.connect, WAIT_S)
        return self.shadow_tap

    def answer(self, prompt: list[int], count: int = TOKENS, **settings: Any) -> tuple[list[int], Report]:
        """All tokens, and the report, which only the last may carry."""
        steps = list(self.main.generate(prompt, count, **settings))
        assert [step.report is None for step in steps[:-1]] == [True] * (len(steps) - 1)
        assert steps[-1].report is not None
        return [step.token_id for step in steps], steps[-1].report

    def loads(self) -> int:
        return sum(isinstance(m, w.Load) for tap in self.taps for m in tap.sent)

    def nothing_left(self) -> None:
        """No request, visit, need, load or call anywhere in the scheduler or the engine."""
        core, engine = self.core, self.engine
        assert core.idle()
        assert core.snapshot().loads == ()
        assert core.stats == {}
        assert (engine._requests, engine._layers, len(engine._owed), engine._failed) == ({}, {}, 0, {})
        assert self.main._open == {}

    def close(self) -> None:
        self.main.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def house_of(demo_store: Callable[[str], Any]) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def build(**settings: Any) -> House:
        made.append(House(demo_store("float32"), **settings))
        return made[-1]

    yield build
    for house in made:
        house.close()


@pytest.fixture
def house(house_of: Callable[..., House]) -> House:
    return house_of()


@pytest.fixture(scope="module")
def nf4(demo_store: Callable[[str], Any]) -> ShadowModel:
    return ShadowModel(demo_store("float32"), "nf4")


@pytest.fixture(scope="module")
def expected(reference: Any) -> Any:
    return reference("float32", 0, TOKENS)


# --- what cannot be answered ------------------------------------------------------------------------------------


def test_prompts_that_cannot_be(house: House) -> None:
    for prompt, named in (
        ([], "empty"), ([5] * 1024, "1024 tokens, the model's context is 1024"), ([5] * 3000, "3000 tokens"),
        ([5, 2048, 6], "token 2048; allowed: 0 to 2047"), ([-1], "token -1"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=named):
            next(house.main.generate(prompt, 4))
    for count in (0, -1):
        with pytest.raises(ConfigError, match=f"max-new-tokens is {count}; allowed: 1, 2"):
            next(house.main.generate([5], count))
    house.nothing_left()
    assert house.loads() == 0


def test_workers_lost_within_an_answer(house: House, expected: Any) -> None:
    steps = house.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    got = [next(steps).token_id, next(steps).token_id]
    for tap in house.taps[1:]:
        tap.close()
    got.append(next(steps).token_id)
    assert got == expected.tokens[:3]
    house.taps[0].close()
    with pytest.raises(RequestFailedError, match="the last worker is gone: it closed its stream"):
        next(steps)
    house.nothing_left()


# --- where answers end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 5])
def test_an_answer_ends_where_the_context_is_full(room: int, house: House, expected: Any) -> None:
    house.main.shape = dataclasses.replace(house.main.shape, context=len(expected.prompt) + room)
    tokens, report = house.answer(expected.prompt, 10_000, ignore_eos=True)
    assert tokens == expected.tokens[:room]
    assert report.new_tokens == room


def test_the_real_context_can_be_filled(house: House, expected: Any) -> None:
    prompt = (expected.prompt * 20)[:1021]
    tokens, report = house.answer(prompt, 50, ignore_eos=True)
    assert len(tokens) == report.new_tokens == 3
    assert report.prompt_tokens + report.new_tokens == 1024


def test_any_end_of_sequence_token_ends_the_answer(house: House, expected: Any) -> None:
    first_new = next(i for i in range(2, TOKENS) if expected.tokens[i] not in expected.tokens[:i])
    last = expected.tokens[first_new]
    ends = house.main.model.generation_config
    for ids in (last, [2047, last], [last]):
        ends.eos_token_id = ids
        tokens, report = house.answer(expected.prompt)
        assert tokens == report.token_ids == expected.tokens[: first_new + 1]
    assert house.answer(expected.prompt, ignore_eos=True)[0] == expected.tokens
    ends.eos_token_id = None
    assert house.answer(expected.prompt)[0] == expected.tokens
    ends.eos_token_id = expected.tokens[0]
    tokens, report = house.answer(expected.prompt)
    assert tokens == expected.tokens[:1]
    assert report.decode_tokens_per_s is None
    house.nothing_left()


# --- what is reported -------------------------------------------------------------------------------------------


def test_the_report_of_one_token(house: House, expected: Any) -> None:
    tokens, report = house.answer(expected.prompt, 1)
    assert tokens == report.token_ids == expected.tokens[:1]
    assert (report.recall, report.recall_by_token, report.decode_tokens_per_s) == (None, [], None)
    assert report.loads == report.prefill_loads == house.loads()
    assert (report.reloads, report.stall_s) == (0, 0)
    assert report.memory_bytes["shadow"] == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_the_report_is_what_happened(slots: int, house_of: Any, nf4: ShadowModel, expected: Any) -> None:
    house = house_of(slots=slots)
    told = house.join_shadow(nf4)
    steps = house.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    got = [next(steps)]
    prefill_loads = house.loads()
    got += steps
    report = got[-1].report
    assert report is not None
    assert [step.token_id for step in got] == report.token_ids == expected.tokens
    assert (report.prompt_tokens, report.new_tokens) == (len(expected.prompt), TOKENS)
    # Times.
    assert report.decode_tokens_per_s == pytest.approx((TOKENS - 1) / report.decode_s)
    assert report.tokens_per_s == pytest.approx(TOKENS / (report.ttft_s + report.decode_s))
    assert 0 <= report.stall_s <= report.decode_s
    assert 0 <= report.prefill_stall_s <= report.ttft_s
    # Loads, as they were sent.
    assert report.loads == house.loads()
    assert report.prefill_loads == prefill_loads
    assert 0 <= report.reloads <= report.loads - report.prefill_loads
    decode = {visit: named for visit, named in house.gates.items() if visit.position}
    assert len(decode) == 8 * (TOKENS - 1)
    assert report.loads - prefill_loads >= sum(map(len, decode.values()))
    # Bytes: of loads that ended and were not given up meanwhile.
    blob = house.store.manifest.blob_bytes
    moved = sum(m.nbytes for tap in house.taps for m in tap.heard if isinstance(m, w.Loaded))
    assert report.bytes_loaded % blob == 0
    assert 0.5 * moved <= report.bytes_loaded <= moved <= report.loads * blob
    # Memory.
    assert len(report.resident_experts_max) == WORKERS
    assert set(report.resident_experts_max) <= set(range(1, slots + 1))
    assert report.memory_bytes["main"] == house.main.device_bytes
    assert report.memory_bytes["workers"] == [blob * slots] * WORKERS
    # The last pass's row is measured once all its layers have been predicted: about now.
    length, row = len(expected.prompt) + TOKENS - 1, nf4_row(told)
    assert report.memory_bytes["shadow"] - nf4.device_bytes in (row * (length - 1), row * length)
    # Recall, from what the shadow said and what the gates named.
    predicted = {
        (m.position, m.layer): set(m.experts) for m in told.heard if isinstance(m, w.Prediction) and m.request == 1
    }
    assert predicted.keys() == {(visit.position, visit.layer) for visit in decode}
    by_token = [
        sum(len(predicted[v.position, v.layer] & named) for v, named in decode.items() if v.position == position) / 16
        for position in range(len(expected.prompt), len(expected.prompt) + TOKENS - 1)
    ]
    assert report.recall_by_token == pytest.approx(by_token)
    assert report.recall == pytest.approx(sum(by_token) / len(by_token))
    assert 0.5 < report.recall <= 1
    house.nothing_left()


def nf4_row(told: Tap) -> int:
    """Bytes of one cache row of the shadow."""
    session = told._node.sessions._served  # type: ignore[attr-defined]
    return int(8 * 2 * 2 * 32 * session._shadow.model.dense.dtype.itemsize)


def test_caches_of_open_requests_add_up(house: House, expected: Any) -> None:
    weights = house.main.device_bytes
    first = house.main.generate(expected.prompt, 4, ignore_eos=True)
    next(first)
    assert house.main.device_bytes == weights + CACHE_ROW * len(expected.prompt)
    second = house.main.generate(expected.prompt[:20], 4, ignore_eos=True)
    next(second)
    assert house.main.device_bytes == weights + CACHE_ROW * (len(expected.prompt) + 20)
    first.close()
    next(second)
    assert house.main.device_bytes == weights + CACHE_ROW * (len(expected.prompt) + 20)
    second.close()
    house.nothing_left()


# --- giving up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_early_leaves_nothing(taken: int, house: House, nf4: ShadowModel, expected: Any) -> None:
    told = house.join_shadow(nf4)
    steps = house.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    for _ in range(taken):
        next(steps)
    steps.close()
    house.nothing_left()
    opened, closed = (sum(isinstance(m, kind) for m in told.sent) for kind in (w.OpenRequest, w.CloseRequest))
    assert opened == closed == (taken > 0)
    cache = weakref.ref(steps.sequence.cache)
    del steps
    gc.collect()
    assert cache() is None, "nobody keeps the cache of an answer that is over"
    assert house.answer(expected.prompt, 3, ignore_eos=True)[0] == expected.tokens[:3]


def test_an_interrupt_within_a_layer_leaves_the_cluster_well(house: House, expected: Any, monkeypatch: Any) -> None:
    """Ctrl-C while a layer waits: its workers still answer, the next request is served."""
    wait, engine = house.engine._wait, house.engine
    waited = 0

    def interrupted(visit: t.Visit, layer: Any) -> None:
        nonlocal waited
        waited += 1
        if waited == 11:
            raise KeyboardInterrupt
        wait(visit, layer)

    monkeypatch.setattr(engine, "_wait", interrupted)
    steps = house.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    house.nothing_left()
    assert house.answer(expected.prompt, 3, ignore_eos=True)[0] == expected.tokens[:3]
    assert len(engine.workers) == WORKERS


# --- the shadow's start -----------------------------------------------------------------------------------------


def test_a_shadow_that_does_not_come_up_is_named(house_of: Any, expected: Any) -> None:
    cause = HandshakeError("shadow has dtype float16")

    def join() -> None:
        raise cause

    house = house_of(shadow=ShadowStart(join))
    for _ in range(2):
        steps = house.main.generate(expected.prompt[:20], TOKENS, ignore_eos=True)
        next(steps)
        with pytest.raises(LaunchError, match="the shadow did not come up: shadow has dtype float16") as raised:
            next(steps)
        assert raised.value.__cause__ is cause
        house.nothing_left()
    assert len(house.answer(expected.prompt[:20], 1)[0]) == 1  # that needs no predictions


def test_a_shadow_that_takes_too_long_is_named(house_of: Any, expected: Any) -> None:
    release = threading.Event()
    house = house_of(shadow=ShadowStart(lambda: release.wait(WAIT_S) and None))
    house.main.launch_s = 0.05
    steps = house.main.generate(expected.prompt[:20], TOKENS, ignore_eos=True)
    next(steps)
    with pytest.raises(LaunchError, match=r"not ready within 0\.05 s; try --shadow none"):
        next(steps)
    house.nothing_left()
    release.set()
    house.main.launch_s = WAIT_S
    assert len(house.answer(expected.prompt[:20], 2, ignore_eos=True)[0]) == 2


def test_the_shadow_joins_after_the_first_token(house_of: Any, nf4: ShadowModel, expected: Any) -> None:
    house: House
    start = ShadowStart(lambda: house.join_shadow(nf4) and None)
    house = house_of(shadow=start)
    steps: Iterator[Step] = house.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    assert next(steps).token_id == expected.tokens[0]
    rest = list(steps)
    assert [step.token_id for step in rest] == expected.tokens[1:]
    report = rest[-1].report
    assert report is not None
    assert report.recall is not None
    assert len(report.recall_by_token) == TOKENS - 1
    assert None not in report.recall_by_token


def test_the_shadow_is_started_once() -> None:
    begun: list[int] = []
    start, barrier = ShadowStart(lambda: begun.append(1)), threading.Barrier(8)

    def begin() -> None:
        barrier.wait(WAIT_S)
        start.wait(WAIT_S)

    threads = [threading.Thread(target=begin, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert begun == [1]


def test_the_report_says_why_the_answer_ended(demo_store: Any) -> None:
    """Of its length, or because the context is full; and which of the model's settings were not heeded."""
    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings

    cluster = EmbeddedCluster(Settings(model="demo", shadow="none", threads=1), demo_store("bfloat16"))
    try:
        *_, last = cluster.generate([5, 6, 7], 4, ignore_eos=True)
        assert (last.report.finish, last.report.lost, last.report.exact) == ("length", [], True)
        *_, last = cluster.generate([5] * 1020, 50, ignore_eos=True)
        assert (last.report.finish, last.report.new_tokens) == ("context", 4)
        cluster.main.model.generation_config.num_beams = 4
        *_, last = cluster.generate([5, 6, 7], 2, ignore_eos=True)
        assert (last.report.exact, last.report.ignored) == (False, ["num_beams=4"])
    finally:
        cluster.close()
