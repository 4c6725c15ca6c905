"""The bodies of requests: what is read of them, and what is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from odmoe.serve.api_error import ApiError
from odmoe.serve.bounds.json_size import check_json_size
from odmoe.serve.openai.neutral import plain_fields, plain_messages
from odmoe.serve.request_fields import FEW_STRANGERS, MOST_NAME, UnknownFields
from odmoe.settings.bounds import LEAST_PENALTY, MOST_PENALTY, check_temperature
from scheduler.unknown_names import nearest

MOST_LOGPROBS = 20
"""Most probable tokens whose log-probabilities one may ask for, as in OpenAI's chat API."""
MOST_ANSWERS = 4096
"""Of one request: prompts times `n`."""
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024
"""Stop texts of a request, and characters of each: every token is compared with them."""
MOST_BIASES = 4096
MOST_SCHEMA = 256 << 10
"""Characters of a JSON schema: for each answer a parser is made of it."""
MOST_STOP_TOKENS = 4096


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("give a text of at least one character, or a list of such")
    if len(texts) > MOST_STOPS or any(len(text) > MOST_STOP_CHARACTERS for text in texts):
        raise ValueError(f"allowed: {MOST_STOPS} texts of {MOST_STOP_CHARACTERS} characters")
    return tuple(texts)


def _prompt(given: Any) -> str | list[str] | list[int] | list[list[int]]:
    """Its first item says what it is a list of. pydantic would try every kind, and note an error for each item."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given:
        if all(isinstance(one, str) for one in given) or _are_tokens(given):
            return given
        if all(isinstance(one, list) and one and _are_tokens(one) for one in given):
            return given
    raise ValueError("give a text, its token ids, or a list of either; none of them empty")


def _are_tokens(given: list[Any]) -> bool:
    return all(type(one) is int and one >= 0 for one in given)


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"it has {len(given)} tokens; allowed: {MOST_BIASES}")
    return given


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(given):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not _is_name(function.get("name")):
            raise ValueError(f"item {number} is not a function with a name; others are not supported")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"the parameters of item {number} are no object, as a JSON schema is; others are refused")
    return given


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and bool(given)


Stops = Annotated[tuple[str, ...], PlainValidator(_stop)]
Prompt = Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Objects = Annotated[list[dict[str, Any]], FailFast()]
Model = TypeVar("Model", bound="AnswerRequest")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_few_strangers(cls, given: Any) -> Any:
        """pydantic notes an error for each field that it does not know; a few are enough."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown_names = (name for name in given if name not in known)
        kept = known.union(itertools.islice(unknown_names, FEW_STRANGERS))
        return {name: given[name] for name in given if name in kept}


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if len(self.text or "") > MOST_SCHEMA:
            raise ValueError(f"the schema has {len(self.text or '')} characters; allowed: {MOST_SCHEMA}")
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and only to it")
        return self

    @property
    def text(self) -> str | None:
        """The schema as JSON. None: any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return json.dumps({"type": "object"}) if self.type == "json_object" else None


class AnswerRequest(Strict):
    """What both APIs have. None: not given."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stops = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    temperature: Annotated[float, AfterValidator(check_temperature)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few)] = Field(default_factory=dict)
    n: Annotated[int, Field(ge=1, le=128)] = 1
    response_format: ResponseFormat | None = None
    # Not OpenAI's own: as the settings of these names.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=MOST_PENALTY)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=MOST_STOP_TOKENS)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _streams(self) -> AnswerRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; leave it out, or give stream true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(AnswerRequest):
    prompt: Prompt
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of}, and answers are not ranked; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 without echo, which asks for nothing; allowed: 1, 2, ...")
        if len(self.prompts) * self.n > MOST_ANSWERS:
            count = len(self.prompts)
            raise ValueError(f"n is {self.n} with {count} prompts; allowed: {MOST_ANSWERS} answers a request")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatRequest(AnswerRequest):
    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[Objects, AfterValidator(_tools)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Not OpenAI's own, but of several servers: more variables of the model's chat template.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # As vLLM has them: the answer goes on with the last message, or no message is begun for it.
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _is_possible(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; give logprobs true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt are both true (the latter by default); give "
                "add_generation_prompt false with continue_final_message"
            )
        self._check_tool_choice()
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens are both given; give one of them")
        return self

    def _check_tool_choice(self) -> None:
        if self.tool_choice in ("auto", "none"):
            return
        if self.tool_choice != "required" and self._chosen_name() is None:
            raise ValueError(
                'tool_choice is not auto, none, required, nor {"type": "function", "function": {"name": ...}}'
            )
        if not self.forced_tools:
            named = f"the function {self._chosen_name()!r}" if self._chosen_name() else "a call"
            raise ValueError(f"tool_choice demands {named}, and tools does not have it; add it to tools")

    def _chosen_name(self) -> str | None:
        """The tool that must be called."""
        function = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if _is_name(name) else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return self.tools if self.tool_choice != "none" else []

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the model must call one. Empty: it may answer without."""
        if self.tool_choice in ("auto", "none"):
            return []
        name = self._chosen_name()
        return self.tools if name is None else [tool for tool in self.tools if tool["function"]["name"] == name]


def read_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError."""
    check_json_size(body)
    try:
        given = json.loads(str(body, "utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of its encoding too
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        text = f"the body is a JSON {type(given).__name__}; an object is expected"
        raise ApiError(400, text, code="invalid_json")
    return given


def to_request(kind: type[Model], given: dict[str, Any], fields: UnknownFields) -> Model:
    """The request that an object is. Raises ApiError."""
    known = {field.alias or name for name, field in kind.model_fields.items()}
    given = plain_fields(given, known, fields.strict)
    if "messages" in known and isinstance(given.get("messages"), list):
        given["messages"] = plain_messages(given["messages"], fields)
    try:
        found = kind.model_validate(given, extra="forbid" if fields.strict else "allow")
    except ValidationError as error:
        raise _explain(error, kind) from error
    for name in _strangers(found):
        fields.on_unknown(name, kind.model_fields)
    return found


def _strangers(found: BaseModel, place: str = "") -> Iterator[str]:
    """The paths of unknown fields, of which it is rid afterwards."""
    for name in list(found.model_extra or ()):
        yield f"{place}{name}"
    if found.model_extra:
        found.model_extra.clear()
    for name in type(found).model_fields:
        inner = getattr(found, name)
        if isinstance(inner, BaseModel):
            yield from _strangers(inner, f"{place}{name.rstrip('_')}.")


def _explain(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first fault, in a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part)[:MOST_NAME] for part in first["loc"]) or None
    name = str(first["loc"][0])[:MOST_NAME] if first["loc"] else None
    if first["type"] == "extra_forbidden":
        near = nearest(place, kind.model_fields) if len(first["loc"]) == 1 else ""
        text = f"{place} is not a parameter that is known here{near}{' Or' if near else ';'} leave it out"
        return ApiError(400, text, param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place} is missing", param=place, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    text = f"{name}: {message}" if name else message
    begins = message.split(maxsplit=1)[0]  # of fields that do not go together: the one to change
    return ApiError(400, text, param=name or (begins if begins in kind.model_fields else None), code="invalid_value")
