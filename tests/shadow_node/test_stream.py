"""The shadow's stream: the handshake, streams that end in the midst of a pass, usage."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from scheduler.errors import LinkError
from support.shadows.shadow_client import PROMPT_TOKENS, WAIT_S, MainAnswer, ShadowClient
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    AskUsage,
    CloseRequest,
    Failed,
    Hello,
    Load,
    Message,
    OpenRequest,
    Prediction,
    ShadowReady,
    ShadowUsage,
    Tensor,
)

pytestmark = pytest.mark.timeout(90)
both = pytest.mark.parametrize("scheme", ["fp16", "nf4"])


# --- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "protocol version"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_refuses_what_does_not_belong(changes: dict[str, Any], named: str, shadow_of: Any) -> None:
    main = ShadowClient(shadow_of())
    main.hello(**changes)
    (failure,) = main.got
    assert isinstance(failure, Failed)
    assert failure.error == ("VersionError" if "version" in changes else "ModelMismatchError")
    assert named in failure.message


def test_out_of_turn_is_named_and_forgiven(shadow_of: Any, answers: list[MainAnswer]) -> None:
    main = ShadowClient(shadow_of())
    main.open(1, answers[0])
    main.hello()
    main.channel.send(Load(1, 0, 0, 0))
    kinds = [type(m) for m in main.got]
    assert kinds == [Failed, ShadowReady, Failed]
    assert [f.error for f in main.of(Failed)] == ["ProtocolError"] * 2
    ready = main.got[1]
    model = main.shadow.model
    assert isinstance(ready, ShadowReady)
    assert (ready.scheme, ready.device_bytes) == ("fp16", model.device_bytes)


@pytest.mark.parametrize(("prompt", "first"), [((), 0), ((5, 6), 2), ((5, 6), 3)])
def test_a_request_without_a_prompt_is_refused(prompt: tuple[int, ...], first: int, main_of: Any) -> None:
    main = main_of()
    main.channel.send(OpenRequest(1, prompt, first, 4, 1, 1, 2, True))
    assert [f.error for f in main.of(Failed)] == ["ProtocolError"]
    main.settle()


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2, 7])
def test_closing_within_a_pass_ends_it(layer: int, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()

    def close(message: Prediction) -> None:
        if (message.request, message.layer) == (1, layer):
            main.channel.send(CloseRequest(1))

    main.on_prediction = close
    main.open(1, answers[0], token=0, kv=0)
    main.settle()
    assert [m.layer for m in main.of(Prediction) if m.request == 1] == list(range(layer + 1))
    main.align(1, 0)  # on its way when the request was closed
    main.open(2, answers[1])
    main.align(2, 0)
    assert main.passes(2) == [0]
    assert main.of(Failed) == []


def test_a_new_stream_takes_over(shadow_of: Any, answers: list[MainAnswer]) -> None:
    shadow = shadow_of()
    first, second = ShadowClient(shadow), ShadowClient(shadow)
    second.hello()
    second.open(1, answers[0])
    second.align(1, 0)
    assert second.passes(1) == [0]
    assert first.got == []
    third = ShadowClient(shadow)
    third.hello()
    assert [m.error for m in second.of(Failed)] == ["LinkError"]


def test_an_error_that_cannot_be_told_does_not_end_the_thread(shadow_of: Any, answers: list[MainAnswer]) -> None:
    """The thread of the passes outlives a report that fails."""
    told, predicted = threading.Event(), threading.Event()

    class Reply:
        def send(self, *messages: Message) -> None:
            for message in messages:
                if isinstance(message, Failed):
                    told.set()
                    raise LinkError("the queue is full")
                if isinstance(message, Prediction) and message.layer == 7:
                    predicted.set()

        def close(self) -> None: ...

    session = shadow_of().accept(Reply())
    session.on_message(Hello(PROTOCOL_VERSION, "abc", "float32", "main"))
    session.on_message(OpenRequest(1, answers[0].prompt, 0, 4, 0, 1, 2, True))
    session.on_message(Align(1, 0, None, 0, (Tensor("float32", (3,), bytes(12)),)))  # does not fit its cache
    assert told.wait(WAIT_S)
    session.on_message(OpenRequest(2, answers[0].prompt, 0, 4, 0, 0, 2, True))
    assert predicted.wait(WAIT_S)


# --- usage ------------------------------------------------------------------------------------------------------------


def test_usage_is_measured(main_of: Any, answers: list[MainAnswer]) -> None:
    """Weights and the caches of all open requests: the most at once."""
    main = main_of()

    def held() -> int:
        main.channel.send(AskUsage())
        return main.of(ShadowUsage)[-1].device_bytes_max - main.shadow.model.device_bytes

    assert held() == 0
    main.open(1, answers[0])
    main.align(1, 0)
    assert main.passes(1) == [0]
    row = 8 * 2 * 2 * 32 * main.cache(1)[0].element_size()  # layers, keys and values, heads, D
    one = held()
    assert one == row * (PROMPT_TOKENS + 1)
    main.align(1, 1)
    assert main.passes(1) == [0, 1]
    assert held() == one + row
    main.open(2, answers[1])
    main.align(2, 0)
    assert main.passes(2) == [0]
    before = held()
    assert before == row * (2 * PROMPT_TOKENS + 3)
    main.channel.send(CloseRequest(1))
    main.settle()
    assert held() == before
