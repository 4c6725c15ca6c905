"""What a client notes of an answer: right ones, wrong ones, and every way to get none."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from scripts.service.clients import (
    LEFT,
    LEFT_EARLY,
    Crowd,
    Question,
    Seen,
    arrivals,
    arriving,
    at_once,
    body_of,
    questions,
)
from scripts.service.cost import last_token
from scripts.service.faults import all_streaming

LIMIT_S = 60.0


def asked(url: str, prompt: str, deadline_s: float = LIMIT_S) -> Seen:
    async def ask() -> Seen:
        async with Crowd(url, "demo-moe", deadline_s) as crowd:
            return await crowd.ask(Question(prompt, 2))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "kind", "sameness"),
    [
        ("right", "whole", "all the same"),
        ("wrong", "wrong", "others"),
        ("short", "wrong", "all the same"),
        ("cut", "cut: no end", "the same so far"),
        ("error", "error event: main_node_lost", "the same so far"),
        ("full", "429 queue_full", "none"),
        ("stopping", "503 stopping", "none"),
        ("bare", "502 without an error object", "none"),
    ],
)
def test_what_a_client_sees(url: str, prompt: str, kind: str, sameness: str) -> None:
    seen = asked(url, prompt)
    assert (seen.kind("to be"), seen.sameness("to be")) == (kind, sameness)


def test_the_event_that_ends_an_answer_is_no_token(url: str) -> None:
    seen = asked(url, "right")
    assert (len(seen.times), seen.tokens, seen.done) == (2, 2, True)


def test_a_refusal_says_when_to_come_again(url: str) -> None:
    assert asked(url, "full").retry_after == "1"


def test_silence_is_a_stuck_answer(url: str) -> None:
    assert asked(url, "silent", 0.2).kind("to be") == "stuck"


def test_nobody_listens() -> None:
    assert asked("http://127.0.0.1:1", "right").kind("to be") == "cut: ConnectError"


@pytest.mark.parametrize(
    ("prompt", "after", "kind"),
    [("endless", 1, LEFT), ("silent", 0, LEFT_EARLY), ("right", 1, "whole"), ("full", 1, "429 queue_full")],
)
def test_only_who_hangs_up_on_an_open_answer_has_left(
    url: str, gone: threading.Semaphore, prompt: str, after: int, kind: str
) -> None:
    async def ask() -> tuple[Seen, int]:
        async with Crowd(url, "demo-moe", LIMIT_S) as crowd:
            then_s = 0.0 if prompt in ("endless", "silent") else LIMIT_S
            return await crowd.ask_and_leave(Question(prompt, 2), after, then_s), crowd.open

    seen, still_open = asyncio.run(ask())
    assert (seen.kind("to be"), still_open) == (kind, 0)
    if prompt == "endless":
        assert gone.acquire(timeout=LIMIT_S), "the connection was not closed"


def test_clients_that_come_by_a_rate_and_in_a_closed_loop(url: str) -> None:
    async def ask() -> tuple[list[Seen], list[Seen], int]:
        question = Question("right", 2)
        async with Crowd(url, "demo-moe", LIMIT_S) as crowd:
            came = await arriving(crowd, [question], 50.0, 0.2, random.Random(0))
            looped = await at_once(3, lambda number: crowd.ask(question), 7)
            return came, looped, crowd.open

    came, looped, left = asyncio.run(ask())
    assert (len(came), len(looped), left) == (len(arrivals(50.0, 0.2, random.Random(0))), 7, 0)
    assert {one.kind("to be") for one in came + looped} == {"whole"}


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrivals(10.0, 1000.0, random.Random(0))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times == sorted(times)
    assert times[-1] <= 1000.0
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # as of an exponential distribution, and no other like it
    assert arrivals(1e-9, 1.0, random.Random(0)) == []


def test_questions_are_greedy_and_drawn_in_turns() -> None:
    asked = questions()
    assert len(set(asked)) == len(asked)
    assert body_of("m", asked[0])["temperature"] == 0
    assert "seed" not in body_of("m", asked[0])
    assert (body_of("m", asked[1])["temperature"], body_of("m", asked[1])["seed"]) == (0.8, 1)


def test_the_client_that_does_little_waits_for_the_whole_answer(url: str) -> None:
    assert asyncio.run(last_token(url, "demo-moe", Question("right", 2))) > 0
    with pytest.raises(RuntimeError, match=r"not whole.*main_node_lost"):
        asyncio.run(last_token(url, "demo-moe", Question("error", 2)))


@pytest.mark.parametrize(("prompts", "counts"), [(["endless", "endless"], {2}), (["endless", "full"], {0, 1})])
def test_a_fault_comes_when_all_clients_stream_or_one_has_ended(url: str, prompts: list[str], counts: set[int]) -> None:
    async def ask() -> tuple[int, int]:
        async with Crowd(url, "demo-moe", LIMIT_S) as crowd, asyncio.timeout(LIMIT_S):
            tasks, count = await all_streaming(crowd, [Question(prompt, 2) for prompt in prompts])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return count, len(tasks)

    count, tasks = asyncio.run(ask())
    assert tasks == len(prompts)
    assert count in counts
