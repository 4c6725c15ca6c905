"""A shadow that keeps its KV caches of earlier prompts predicts what one predicts that reads each prompt anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint import prefix_cache
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from shadow_node.prompt_reading import BLOCK
from support.shadows.shadow_client import STEPS, MainAnswer, ShadowClient
from wire.messages import CloseRequest, Failed

TURNS = (BLOCK + 9, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 40)
"""Tokens of each prompt of a conversation. The last token is always read, so that no block ends with it."""
FOUND = (0, BLOCK, BLOCK, 2 * BLOCK)
_DRAWN = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 250, (max(TURNS) + STEPS,), generator=_DRAWN).tolist()


@pytest.fixture
def keeping(shadow_model: Callable[[str], ShadowModel]) -> Iterator[Callable[[int], ShadowClient]]:
    made: list[Shadow] = []

    def build(most_bytes: int) -> ShadowClient:
        model = shadow_model("int8")
        made.append(Shadow("shadow", model, "abc", "float32", kept=model.kept_prompts(most_bytes)))
        main = ShadowClient(made[-1])
        main.hello()
        return main

    yield build
    for shadow in made:
        shadow.close()


def predicted(main: ShadowClient, number: int, tokens: int) -> list[Any]:
    """Of every pass of an answer that only its tokens are told of, and where the shadow found its prompt."""
    kept = main.shadow.kept
    assert kept is not None
    before = kept.tokens_found
    main.open(number, MainAnswer(tuple(TOKENS[:tokens]), TOKENS[tokens : tokens + STEPS], []), kv=0)
    for step in range(STEPS - 1):
        main.align(number, step)
        main.settle()
    main.channel.send(CloseRequest(number))
    return [kept.tokens_found - before, *(main.routes(number, step) for step in range(STEPS - 1))]


@pytest.mark.slow
def test_predictions_of_a_warm_prompt_are_those_of_a_cold_one(keeping: Callable[[int], ShadowClient]) -> None:
    warm = keeping(1 << 30)
    for number, (tokens, found) in enumerate(zip(TURNS, FOUND, strict=True), 1):
        cold = predicted(keeping(1 << 30), 1, tokens)
        assert cold[0] == 0
        assert all(len(routes) == 8 for routes in cold[1:])
        assert predicted(warm, number, tokens) == [found, *cold[1:]]


@pytest.mark.slow
def test_what_is_kept_is_bounded_and_counts_as_memory(keeping: Callable[[int], ShadowClient]) -> None:
    whole = keeping(1 << 30)
    predicted(whole, 1, TURNS[-1])
    assert whole.shadow.kept is not None
    each = whole.shadow.kept.store.nbytes // 2
    assert whole.shadow.cache_bytes_max > 2 * each
    main = keeping(each)
    predicted(main, 1, TURNS[-1])
    assert main.shadow.kept is not None
    assert (len(main.shadow.kept.store), main.shadow.kept.store.nbytes) == (1, each)
    assert predicted(main, 2, TURNS[-1])[0] == BLOCK


def test_nothing_is_kept_unless_asked_for(shadow_model: Callable[[str], ShadowModel]) -> None:
    assert shadow_model("int8").kept_prompts(0) is None


@pytest.mark.slow
def test_kept_blocks_that_cannot_be_taken_stop_their_request_alone(
    keeping: Callable[[int], ShadowClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = keeping(1 << 30)
    wanted = predicted(main, 1, TURNS[-1])[1:]
    main.settle()
    taken, no_room = prefix_cache.cache_of, [torch.OutOfMemoryError("CUDA out of memory")]
    monkeypatch.setattr(prefix_cache, "cache_of", lambda *args: raised(no_room.pop()) if no_room else taken(*args))
    main.open(2, MainAnswer(tuple(TOKENS[: TURNS[-1]]), TOKENS[TURNS[-1] :], []), kv=0)
    main.open(3, MainAnswer(tuple(TOKENS[:9]), TOKENS[9:], []), kv=0)
    main.align(3, 0)
    main.settle()
    assert [failure.error for failure in main.of(Failed)] == ["OutOfMemoryError"]
    assert uses(main) == 0
    assert len(main.routes(3, 0)) == 8
    main.align(2, 0)
    main.settle()
    assert main.routes(2, 0) == wanted[0]


@pytest.mark.slow
def test_a_stream_that_ends_lets_go_of_a_prompt_closed_in_its_middle(
    keeping: Callable[[int], ShadowClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = keeping(1 << 30)
    session, model = main.shadow.sessions._served, main.shadow.model
    assert session is not None
    forward, errors = model.forward, [RuntimeError("the second block"), None]
    monkeypatch.setattr(
        model, "forward", lambda *args: raised(error) if (error := errors.pop()) is not None else forward(*args)
    )
    main.open(1, MainAnswer(tuple(TOKENS[: TURNS[-1]]), TOKENS[TURNS[-1] :], []), kv=0)
    main.settle()
    assert uses(main) == 1
    busy = threading.Event()
    session._thread.submit(busy.wait)
    session.dispatch(CloseRequest(1))
    threading.Timer(0.3, busy.set).start()
    session.on_close(None)
    assert uses(main) == 0


def uses(main: ShadowClient) -> int:
    """Blocks in use."""
    assert main.shadow.kept is not None
    return len(main.shadow.kept.store._uses)


def raised(error: BaseException) -> Any:
    raise error
