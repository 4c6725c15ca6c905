"""Drafts of a model's own multi-token-prediction head: they are those of the paper's equations, read again from the
start for every block, and the answers are Transformers' without drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import kv
from checkpoint.mtp_head import MtpHead
from checkpoint.sharding.source import open_source
from main_node.drafting import Drafts
from main_node.mtp_drafts import MtpDrafts
from odmoe.clusters.device_choice import role_bytes
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.clusters.memory.budget import memory_budget
from odmoe.settings.settings import Settings
from scheduler.errors import RequestCancelledError
from support.cases import slow_except
from support.models import families, mtp, published
from support.models.published import aligned
from support.models.store_making import shard
from support.nodes.engine_world import becomes_idle
from support.nodes.exact import answer_of, answers, answers_together

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
OTHER = [7, 7, 30, 90, 4, 61, 18]
TOKENS, DRAFTS = 16, 3
PLAIN: dict[str, Any] = {"shadow": "none", "workers": 2, "threads": 1, "mini_batch": 4096}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """family -> a checkpoint with a head, its store, and Transformers' model without the head."""

    @cache
    def make(family: str, publish: Any = None) -> Any:
        path = tmp_path_factory.mktemp(family)
        head = mtp.publish(family, path / "model", right=True)
        store = shard(open_source(head.path), path / "store")
        auto = families.auto_class(family)
        return head, store, aligned(auto.from_pretrained(head.path, experts_implementation="eager").eval())

    return make


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The drafts of each block."""
    found: list[tuple[int, ...]] = []
    take = Drafts.take

    def spy(drafts: Drafts, most: int) -> tuple[int, ...]:
        found.append(take(drafts, most))
        return found[-1]

    monkeypatch.setattr(Drafts, "take", spy)
    return found


def settings_of(family: str, **others: Any) -> Settings:
    return Settings(model=family, **(PLAIN | {"draft": DRAFTS, "draft_from": "mtp"} | others))


@pytest.mark.parametrize("family", slow_except(["deepseek_v3"], mtp.PUBLISHED))
def test_drafts_follow_the_paper(family: str, made: Any, taken: list[tuple[int, ...]]) -> None:
    head, store, model = made(family)
    tokens, logits = answer_of(model, PROMPT, TOKENS)
    cluster = EmbeddedCluster(settings_of(family), store)
    try:
        report, found = answers(cluster, PROMPT, TOKENS)
        assert becomes_idle(cluster.main.engine)
    finally:
        cluster.close()
    assert report.token_ids == tokens
    assert all(torch.equal(mine.flatten(), one) for mine, one in zip(found, logits, strict=True))
    assert 0 < report.accepted < report.drafted
    known, right = 1, 0
    for drafts in taken:
        wanted = head.drafts([*PROMPT, *tokens[:known]], len(drafts))
        assert list(drafts) == wanted
        block = 0
        while block < len(drafts) and drafts[block] == tokens[known + block]:
            block += 1
        known, right = known + 1 + block, right + block
    assert (known, right) == (TOKENS, report.accepted)
    inner = head.longer.base_model
    own = torch.nn.ModuleList([*head.modules, inner.layers[-1], inner.rotary_emb])
    held = sum(value.nbytes for value in (*own.parameters(), *own.buffers()))
    assert report.memory_shares["predictor"] == held
    budget = memory_budget("100%", settings_of(family, ctx_size=len(PROMPT) + TOKENS, parallel=1), store, 0).shares
    assert budget["predictor"] == pytest.approx(held, rel=0.001)
    assert role_bytes(store, "main", "none") == pytest.approx(report.memory_shares["dense"], rel=0.02)


def test_a_prompt_is_read_as_it_comes(made: Any) -> None:
    """While no drafts are wanted, too: the step that first drafts would else read all of it, and cost accordingly. What
    is decoded meanwhile is read a few rows at a time."""
    head, store, model = made("deepseek_v3")
    prompt, answer = [*PROMPT, *OTHER] * 3, [int(token) for token in range(1, 41)]
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *answer]])
        states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        drafts = MtpDrafts(MtpHead(store, model, torch.float32), prompt, 100, 0, lambda: None)
        drafts.on_read(0, [states[:, : len(prompt)]], (answer[0],))
        cached = kv.cache_bytes(drafts._cache)
        assert drafts.nbytes == cached > 0
        most = 0
        for at in range(len(prompt), len(prompt) + 38):
            drafts.on_read(at, [states[:, at : at + 1]], (answer[at - len(prompt) + 1],))
            most = max(most, drafts.nbytes - kv.cache_bytes(drafts._cache))
        assert 0 < most <= 16 * states[:, 0].nbytes
        drafts.on_wanted(DRAFTS)
        drafts.on_read(at + 1, [states[:, at + 1 : at + 2]], (answer[39],))
    assert list(drafts.following(DRAFTS)) == head.drafts([*prompt, *answer], DRAFTS)


def test_a_cancelled_prompt_is_read_no_further(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, store, model = made("deepseek_v3")
    monkeypatch.setattr("checkpoint.mtp_head._ROWS", 8)
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RequestCancelledError("it was cancelled")

    drafts = MtpDrafts(MtpHead(store, model, torch.float32), [1] * 100, 100, 0, check)
    with pytest.raises(RequestCancelledError), torch.inference_mode():
        drafts.on_read(0, [torch.zeros(1, 50, model.config.hidden_size)], ())
    assert drafts._cache.get_seq_length() == 8


@pytest.mark.parametrize(("count", "drafted"), [(1, 0), (2, 0), (4, 2)])
def test_no_draft_is_made_that_no_pass_can_use(
    count: int, drafted: int, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, model = made("deepseek_v3")
    chosen: list[torch.Tensor] = []
    choose = MtpHead.choose

    def spy(head: MtpHead, state: torch.Tensor) -> int:
        chosen.append(state)
        return choose(head, state)

    monkeypatch.setattr(MtpHead, "choose", spy)
    cluster = EmbeddedCluster(settings_of("deepseek_v3"), store)
    try:
        report, _ = answers(cluster, PROMPT, count)
    finally:
        cluster.close()
    assert report.token_ids == answer_of(model, PROMPT, count)[0]
    assert len(chosen) == report.drafted == drafted


def test_the_cache_of_the_head_is_counted(made: Any) -> None:
    """Of an answer that is too short for drafts of `auto`, with what waits for the head."""
    _, store, model = made("deepseek_v3")
    held = []
    for settings in (Settings(model="deepseek_v3", **PLAIN), settings_of("deepseek_v3", draft="auto")):
        cluster = EmbeddedCluster(settings, store)
        try:
            report, _ = answers(cluster, PROMPT * 2, 4)
        finally:
            cluster.close()
        held.append(report.memory_shares["kv"])
    config, read, decoded = model.config, 2 * len(PROMPT), 3
    row = held[0] // (config.num_hidden_layers * (read + decoded))
    assert held[1] - held[0] == row * read + decoded * config.hidden_size * torch.float32.itemsize


def test_a_head_that_fails_ends_the_drafts_alone(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, store, model = made("deepseek_v3")
    calls: list[int] = []
    read = MtpHead._read

    def fail(head: MtpHead, states: torch.Tensor, tokens: list[int], position: int, cache: Any) -> torch.Tensor:
        calls.append(position)
        if len(calls) > DRAFTS:  # it drafts once, for the first request
            raise torch.OutOfMemoryError("there is none left")
        return read(head, states, tokens, position, cache)

    monkeypatch.setattr(MtpHead, "_read", fail)
    cluster = EmbeddedCluster(settings_of("deepseek_v3"), store)
    try:
        found = [answers(cluster, prompt, 8)[0] for prompt in (PROMPT, OTHER)]
    finally:
        cluster.close()
    assert [one.token_ids for one in found] == [answer_of(model, prompt, 8)[0] for prompt in (PROMPT, OTHER)]
    assert [one.drafted for one in found] == [DRAFTS, 0]
    assert [one.getMessage() for one in caplog.records if one.name == "main_node.drafting"] == [
        "--draft-from mtp: the head failed, the answer goes on without it: there is none left"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", [{"batch_dense": True}, {"prefill_chunk": 4}, {"kv_memory": 1 << 20, "prefill_chunk": 4}], ids=str
)
def test_drafts_beside_others(others: dict[str, Any], made: Any) -> None:
    """Requests that share steps, prompts in chunks, and prompts that were kept: the head reads what there is."""
    _, store, model = made("deepseek_v3")
    expected = [answer_of(model, prompt, TOKENS)[0] for prompt in (PROMPT, OTHER)]
    cluster = EmbeddedCluster(settings_of("deepseek_v3", parallel=2, **others), store)
    try:
        for cached in ([0, 0], [8, 4] if "kv_memory" in others else [0, 0]):
            got = answers_together(cluster.main, [PROMPT, OTHER], [TOKENS, TOKENS])
            assert [one.tokens for one in got] == expected
            assert [one.report.cached_tokens for one in got] == cached
            assert all(one.report.accepted for one in got)
    finally:
        cluster.close()


def test_auto_drafts_once_it_knows_a_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until drafts were measured, a row is taken to cost little. How long this machine takes must not put them off."""
    monkeypatch.setattr("scheduler.drafts.trial._LOST", float("inf"))
    _, store, model = made("deepseek_v3")
    cluster = EmbeddedCluster(settings_of("deepseek_v3", draft="auto"), store)
    try:
        report, _ = answers(cluster, PROMPT, TOKENS)
    finally:
        cluster.close()
    assert report.token_ids == answer_of(model, PROMPT, TOKENS)[0]
    assert report.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "kept"), [(None, {"experts": "int8", "dense": "int8"}), (published.publish_fp8, {})], ids=["int8", "fp8"]
)
def test_a_store_in_few_bits(save: Any, kept: dict[str, Any], tmp_path: Path) -> None:
    """In int8 the output layer, which the head shares, is restored in memory that others share, too."""
    head = mtp.publish("deepseek_v3", tmp_path / "model", right=True, save=save)
    store = shard(open_source(head.path), tmp_path / "store", "bfloat16", **kept)
    assert (bool(store.manifest.encoding), bool(store.manifest.dense_weights)) == (True, bool(kept))
    found = []
    plain_settings = Settings(model="deepseek_v3", parallel=2, **PLAIN)
    for settings in (plain_settings, settings_of("deepseek_v3", parallel=2)):
        cluster = EmbeddedCluster(settings, store)
        try:
            found.append(answers_together(cluster.main, [PROMPT, OTHER], [TOKENS, TOKENS]))
        finally:
            cluster.close()
    plain, drafted = found
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.report.accepted for one in drafted)
