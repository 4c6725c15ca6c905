"""What an answer's report says, beside what was said on the streams."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from main_node.answer import collect
from shadow_node.model import ShadowModel
from support.cases import slow_except
from support.nodes.tapped_cluster import WORKERS, TappedCluster
from wire import messages as w

pytestmark = pytest.mark.timeout(90)
TOKENS = 8


CACHE_ROW = 8 * 2 * 2 * 32 * 4  # layers, keys and values, heads, D, bytes of float32


def test_the_report_of_one_token(cluster: TappedCluster, expected: Any) -> None:
    tokens, report = cluster.answer(expected.prompt, 1)
    assert tokens == report.token_ids == expected.tokens[:1]
    assert (report.recall, report.recall_by_token, report.decode_tokens_per_s) == (None, [], None)
    assert report.loads == report.prefill_loads == cluster.loads()
    assert (report.reloads, report.stall_s) == (0, 0)
    assert report.memory_bytes["shadow"] == 0


@pytest.mark.parametrize("slots", slow_except([2], [1, 2]))
def test_the_report_is_what_happened(slots: int, cluster_of: Any, nf4: ShadowModel, expected: Any) -> None:
    cluster = cluster_of(slots=slots)
    told = cluster.join_shadow(nf4)
    steps = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    first = next(steps)
    prefill_loads = cluster.loads()
    rest, report = collect(steps)
    assert [first.token_id, *rest] == report.token_ids == expected.tokens
    assert (report.prompt_tokens, report.new_tokens) == (len(expected.prompt), TOKENS)
    # Times.
    assert report.decode_tokens_per_s == pytest.approx((TOKENS - 1) / report.decode_s)
    assert report.tokens_per_s == pytest.approx(TOKENS / (report.ttft_s + report.decode_s))
    assert 0 <= report.stall_s <= report.decode_s
    assert 0 <= report.prefill_stall_s <= report.ttft_s
    # Loads, as they were sent.
    assert report.loads == cluster.loads()
    assert report.prefill_loads == prefill_loads
    assert 0 <= report.reloads <= report.loads - report.prefill_loads
    decode = {visit: named for visit, named in cluster.gates.items() if visit.position}
    assert len(decode) == 8 * (TOKENS - 1)
    assert report.loads - prefill_loads >= sum(map(len, decode.values()))
    # Bytes: of loads that ended and were not given up meanwhile.
    blob = cluster.store.manifest.blob_bytes
    moved = sum(m.nbytes for tap in cluster.taps for m in tap.heard if isinstance(m, w.Loaded))
    assert report.bytes_loaded % blob == 0
    assert 0.5 * moved <= report.bytes_loaded <= moved <= report.loads * blob
    # Memory.
    assert len(report.resident_experts_max) == WORKERS
    assert set(report.resident_experts_max) <= set(range(1, slots + 1))
    assert report.memory_bytes["main"] == cluster.main.device_bytes
    assert report.memory_bytes["workers"] == [blob * slots] * WORKERS
    # The last pass's row is measured once all its layers have been predicted: about now.
    length, row = len(expected.prompt) + TOKENS - 1, 8 * 2 * 2 * 32 * nf4.dense.dtype.itemsize
    cache = report.memory_bytes["shadow"] - nf4.device_bytes
    assert row * (length - 1) <= cache <= 2 * row * length  # a pass that is repeated keeps its first cache meanwhile
    # Recall, from what the shadow said and what the gates named. A pass that is repeated predicts its rows again, and
    # which of the two came before the gate is up to the machine.
    predicted: dict[tuple[int, int], list[set[int]]] = defaultdict(list)
    for m in told.heard:
        if isinstance(m, w.Prediction) and m.request == 1:
            predicted[m.position, m.layer].append(set(m.experts))
    assert predicted.keys() == {(visit.position, visit.layer) for visit in decode}
    by_token = report.recall_by_token
    assert len(by_token) == TOKENS - 1
    for position, recall in enumerate(by_token, len(expected.prompt)):
        right = [
            [len(one & named) for one in predicted[position, visit.layer]]
            for visit, named in decode.items()
            if visit.position == position
        ]
        assert recall is not None
        assert sum(map(min, right)) <= recall * 16 <= sum(map(max, right))
    assert report.recall == pytest.approx(sum(by_token) / len(by_token))
    assert 0.5 < report.recall <= 1
    assert report.recall_complete
    cluster.nothing_left()


def test_caches_of_open_requests_add_up(cluster: TappedCluster, expected: Any) -> None:
    weights = cluster.main.device_bytes
    first = cluster.main.generate(expected.prompt, 4, ignore_eos=True)
    next(first)
    assert cluster.main.device_bytes == weights + CACHE_ROW * len(expected.prompt)
    second = cluster.main.generate(expected.prompt[:20], 4, ignore_eos=True)
    next(second)
    assert cluster.main.device_bytes == weights + CACHE_ROW * (len(expected.prompt) + 20)
    first.close()
    next(second)
    assert cluster.main.device_bytes == weights + CACHE_ROW * (len(expected.prompt) + 20)
    second.close()
    cluster.nothing_left()


@pytest.mark.slow
def test_the_report_says_why_the_answer_ended(demo_store: Any) -> None:
    """Of its length, or because the context is full; and which of the model's settings were not heeded."""
    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings

    cluster = EmbeddedCluster(Settings(model="demo", shadow="none", threads=1), demo_store("bfloat16"))
    try:
        *_, last = cluster.generate([5, 6, 7], 4, ignore_eos=True)
        assert (last.report.finish, last.report.cluster.lost, last.report.exact) == ("length", [], True)
        *_, last = cluster.generate([5] * 1020, 50, ignore_eos=True)
        assert (last.report.finish, last.report.new_tokens) == ("context", 4)
        cluster.main.model.generation_config.num_beams = 4
        *_, last = cluster.generate([5, 6, 7], 2, ignore_eos=True)
        assert (last.report.exact, last.report.ignored) == (False, ["num_beams=4"])
    finally:
        cluster.close()
