"""A request of another API as one of ours, and what its answer is translated with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from odmoe.serve.api_error import ApiError
from odmoe.serve.openai.requests import ChatRequest, CompletionRequest, to_request

if TYPE_CHECKING:
    from odmoe.serve.request_fields import UnknownFields
    from odmoe.serve.writers import Translation


@dataclass(frozen=True, slots=True)
class Head:
    """What a translation says of its answer beside the answer itself."""

    record_id: str
    """Of the request."""
    model: str
    """As the client has named it."""
    prompt_tokens: int


@dataclass(slots=True)
class Translated:
    """`names`: a field's name here -> in the other API, for errors."""

    request: ChatRequest | CompletionRequest
    translate: Callable[[Head], Translation]
    model: str
    """As the client has named it."""
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def stream(self) -> bool:
        return self.request.stream

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors that are raised within it name the fields of the other API."""
        with renamed(self.names):
            yield


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raises ApiErrors with the names of the other API. `names`: a field here -> there."""
    try:
        yield
    except ApiError as error:
        theirs = names.get(error.param or "")
        if theirs is None or error.param is None:
            raise
        text = error.message
        text = theirs + text.removeprefix(error.param) if text.startswith(error.param) else text
        raise ApiError(error.status, text, error.kind, theirs, error.code) from error


def to_translated(
    kind: type[ChatRequest | CompletionRequest],
    given: Mapping[str, Any],
    fields: UnknownFields,
    translate: Callable[[Head], Translation],
    model: str,
    names: Mapping[str, str],
) -> Translated:
    """`given`: the fields of a request of ours; None counts as not given. Raises ApiError."""
    with renamed(names):
        request = to_request(kind, without_none(given), fields)
    return Translated(request, translate, model, names)


def system_messages(text: str) -> list[dict[str, Any]]:
    """What a chat begins with."""
    return [{"role": "system", "content": text}] if text else []


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
