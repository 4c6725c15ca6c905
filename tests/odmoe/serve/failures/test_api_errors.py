"""What clients learn of errors: nothing of paths, hosts and addresses, and where the rest is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from odmoe.serve.api_error import cause_of, to_api_error
from scheduler import errors
from scheduler.errors import ODMoEError
from support.machines.http_service import is_idle, serving, until

if TYPE_CHECKING:
    from odmoe.api.model import Model

SECRET = "/home/somebody/store on host-7 (10.0.0.7:7200)\n\x1b[31m"
FOR_CLIENTS = (errors.PromptError, errors.PromptTooLongError, errors.ConfigError, errors.QueueFullError)
"""Whose text is about the request."""


def tree(kind: type[ODMoEError]) -> Iterator[type[ODMoEError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


KINDS: list[type[Exception]] = [*tree(ODMoEError), OSError, RuntimeError, MemoryError]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error(kind: type[Exception]) -> None:
    answer = to_api_error(kind(SECRET), "the-id")
    if kind in FOR_CLIENTS:
        assert 400 <= answer.status < 500
        assert "store on host-7" in answer.message
        return
    assert answer.status >= 500
    assert not any(part in answer.message for part in ("somebody", "host-7", "10.0.0.7"))
    assert "the-id" in answer.message
    cause = cause_of(kind(SECRET))
    assert cause is not None
    assert "host-7" in cause
    if issubclass(kind, ODMoEError):
        assert cause.startswith(f"{kind.__name__}: /home")
        assert "\n" not in cause
        assert "\x1b" not in cause


@pytest.mark.slow
@pytest.mark.parametrize("kind", [errors.CorruptStoreError, errors.LinkError, errors.RequestFailedError, OSError])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_the_rest(
    model: Model, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], after: int, stream: bool
) -> None:
    from odmoe.api.text_answer import TextAnswer

    whole, lines = TextAnswer._read, list[str]()

    def failing(self: Any, *given: Any) -> Iterator[Any]:
        for number, piece in enumerate(whole(self, *given)):
            if number == after:
                raise kind(SECRET)
            yield piece

    with monkeypatch.context() as patch, serving(model) as served:
        patch.setattr(TextAnswer, "_read", failing)
        served.service.log_cause = lines.append
        with pytest.raises(openai.APIError) as found:
            list(served.client().completions.create(model="demo-moe", prompt="Natalia", max_tokens=9, stream=stream))
        until(lambda: is_idle(served) and bool(served.lines))
        number = served.lines[0].split()[1]
        assert "host-7" not in str(found.value.body)
        assert number in found.value.message
        assert len(lines) == 1
        assert lines[0].startswith(f"{number} ")
        assert "host-7" in lines[0]
