"""The same answers for asyncio: a cancelled task gives its answer up, and no thread stays."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import odmoe
from odmoe.api.async_stream import AHEAD, AsyncStream
from odmoe.api.completion import Chunk, Stream
from scheduler.errors import PromptError, RequestCancelledError, RequestError

PROMPT = "HAMLET: To be, or not"
LIMIT_S = 60.0


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "odmoe-async-answer"]


class EndlessAnswer:
    """Stands for a TextAnswer: a token each time that `more` is released, until it is cancelled."""

    report = None

    def __init__(self) -> None:
        self.more = threading.Semaphore(0)
        self.cancelled = threading.Event()

    def __next__(self) -> Any:
        assert self.more.acquire(timeout=LIMIT_S)
        if self.cancelled.is_set():
            raise RequestCancelledError("cancelled")
        return "x", SimpleNamespace(token_id=5, logprobs=None, prompt_logprobs=None)

    def cancel(self) -> None:
        self.cancelled.set()
        self.more.release()

    def close(self) -> None:
        self.cancelled.set()


class Endless(Stream):
    """Gives chunks as `more` is released, and ends when it is cancelled."""

    def __init__(self) -> None:
        answer: Any = EndlessAnswer()
        super().__init__(answer, str)
        self.more, self.cancelled = answer.more, answer.cancelled


def test_the_same_answers(model: odmoe.Model, expected: Callable[..., Any]) -> None:
    async def ask() -> None:
        ids, text = expected(PROMPT, 8)
        found = await asyncio.gather(*(model.agenerate(PROMPT, max_new_tokens=8) for _ in range(3)))
        assert [one.token_ids for one in found] == [ids] * 3
        stream = model.astream(PROMPT, max_new_tokens=8)
        assert "".join([chunk.text async for chunk in stream]) == text == stream.completion.text
        assert stream.completion.report is not None
        assert readers() == []

    asyncio.run(ask())


@pytest.mark.slow
def test_chats(chats: odmoe.Model) -> None:
    messages = [{"role": "user", "content": "Who is Romeo?"}]

    async def ask() -> tuple[str, str]:
        stream = chats.astream_chat(messages, max_new_tokens=4)
        return (await chats.achat(messages, max_new_tokens=4)).text, "".join([str(chunk) async for chunk in stream])

    text = chats.chat(messages, max_new_tokens=4).text
    assert asyncio.run(ask()) == (text, text)


def test_errors_reach_who_awaits(model: odmoe.Model) -> None:
    async def ask() -> None:
        with pytest.raises(PromptError, match="the prompt is empty"):
            await model.agenerate("")
        stream = model.astream(PROMPT)
        with pytest.raises(RequestError, match="has not ended"):
            _ = stream.completion
        await stream.aclose()
        assert readers() == []

    asyncio.run(ask())


@pytest.mark.slow
def test_a_cancelled_task_gives_its_answer_up(model: odmoe.Model) -> None:
    async def ask() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in model.astream(PROMPT, max_new_tokens=900, ignore_eos=True):
                begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0)  # where the loop closes generators that were dropped

    asyncio.run(ask())
    assert readers() == []
    assert model.cluster.main.admission.counts() == (0, 0)  # type: ignore[attr-defined]


def test_one_that_waits_for_its_first_token_is_cancelled_too() -> None:
    streams: list[Endless] = []

    def begin() -> Stream:
        streams.append(Endless())
        return streams[-1]

    async def ask() -> None:
        task = asyncio.create_task(AsyncStream(begin).read())
        while not streams:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert streams[0].cancelled.is_set()
        assert readers() == []

    asyncio.run(ask())


def test_cancelled_while_it_begins() -> None:
    """The stream is made after the cancellation, and gets it all the same."""
    began, go, stream = threading.Event(), threading.Event(), Endless()

    def begin() -> Stream:
        began.set()
        assert go.wait(LIMIT_S)
        return stream

    async def ask() -> None:
        task = asyncio.create_task(AsyncStream(begin).read())
        while not began.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.cancelled.is_set()
        assert readers() == []

    asyncio.run(ask())


def test_a_dropped_stream_is_given_up() -> None:
    stream = Endless()

    async def ask() -> None:
        stream.more.release()
        async for _ in AsyncStream(lambda: stream):
            break
        gc.collect()
        while readers():
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
    assert stream.cancelled.is_set()


def test_the_end_of_a_block_gives_it_up() -> None:
    stream = Endless()

    async def ask() -> None:
        stream.more.release()
        async with AsyncStream(lambda: stream) as answer:
            assert (await anext(answer)).text == "x"
        assert stream.cancelled.is_set()
        assert readers() == []

    asyncio.run(ask())


async def awaiting_one(answer: AsyncStream) -> asyncio.Task[Chunk]:
    """A task that awaits a chunk of a stream whose first one has come."""
    task = asyncio.create_task(answer.__anext__())
    while not answer._awaited:
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("by", ["aclose", "cancel", "a thread"])
def test_an_answer_is_given_up_from_elsewhere(by: str) -> None:
    """The task that awaits a chunk hears of it; then the answer is over."""
    stream = Endless()

    async def ask() -> None:
        stream.more.release()
        answer = AsyncStream(lambda: stream)
        assert (await anext(answer)).text == "x"
        task = await awaiting_one(answer)
        if by == "aclose":
            await answer.aclose()
        elif by == "cancel":
            answer.cancel()
        else:
            await asyncio.to_thread(answer.cancel)
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(task, LIMIT_S)
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        await answer.aclose()
        assert readers() == []

    asyncio.run(ask())
    assert stream.cancelled.is_set()


def test_one_given_up_before_it_began() -> None:
    async def ask() -> None:
        answer = AsyncStream(lambda: pytest.fail("it began"))
        answer.cancel()
        with pytest.raises(RequestCancelledError):
            await anext(answer)
        closed = AsyncStream(lambda: pytest.fail("it began"))
        await closed.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(closed)
        assert readers() == []

    asyncio.run(ask())


class Counted(Endless):
    """Gives chunks at once; `asked` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.full = threading.Event()

    def _next(self) -> Chunk:
        self.asked += 1
        if self.asked == AHEAD + 2:  # one was awaited, and one is in the thread's hand
            self.full.set()
        if self.cancelled.is_set():
            raise RequestCancelledError("cancelled")
        return Chunk(str(self.asked), self.asked)


def test_a_slow_reader_stops_the_answer() -> None:
    """What is computed and not awaited yet is bounded, and nothing of it is lost."""
    stream = Counted()

    async def ask() -> None:
        async with AsyncStream(lambda: stream) as answer:
            assert (await anext(answer)).text == "1"
            assert await asyncio.to_thread(stream.full.wait, LIMIT_S)
            held = answer._reader._inbox.qsize
            while held() < AHEAD:  # the last of them is on its way to the loop
                await asyncio.sleep(0)
            assert (stream.asked, held()) == (AHEAD + 2, AHEAD)
            texts = [(await anext(answer)).text for _ in range(3 * AHEAD)]
            assert texts == [str(number) for number in range(2, 2 + 3 * AHEAD)]
        assert readers() == []

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))


def test_a_thread_that_waits_for_its_reader_ends_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odmoe.api.async_stream.LOOK_S", 0.01)
    stream = Counted()
    loop = asyncio.new_event_loop()
    answer = AsyncStream(lambda: stream)
    loop.run_until_complete(answer.__anext__())
    assert stream.full.wait(LIMIT_S)
    thread = answer._reader._thread
    assert thread is not None
    loop.close()  # without the end of its generators
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert stream.cancelled.is_set()
