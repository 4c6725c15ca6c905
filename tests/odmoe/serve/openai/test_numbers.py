"""Every number of a request, at its extremes: answered, or refused by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from odmoe.serve.openai.requests import ChatRequest, CompletionRequest
from support.machines.http_service import WAIT_S

if TYPE_CHECKING:
    from support.machines.http_service import Served

NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "best_of",
    "logprobs",
    "max_tokens",
)
EXTREMES = (
    *("NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e400", "1e-300", "5e-324", "-0.0", "0", "-1", "1", "0.5"),
    *("1e-4", "9.9e-5", "1e4", "10001", "1e6", "3.4e38", "1e39", "2147483648", "9223372036854775807"),
    *("18446744073709551616", "1" + "0" * 400, "1" + "0" * 999, "1" + "0" * 5000, "true", '"1"', "[]"),
)
number = st.sampled_from(EXTREMES) | st.floats(width=64).map(str).map(lambda text: text.replace("inf", "Infinity"))
fields = st.dictionaries(st.sampled_from(NUMBERS), number, min_size=1, max_size=4)


def ask(served: Served, body: str) -> httpx2.Response:
    return httpx2.post(f"{served.url}/v1/completions", content=body, timeout=WAIT_S)


def check(served: Served, given_fields: dict[str, str]) -> None:
    usual = {"model": '"demo-moe"', "prompt": '"Natalia"', "max_tokens": "2", "seed": "1"}
    body = ", ".join(f'"{name}": {value}' for name, value in (usual | given_fields).items())
    found = ask(served, "{" + body + "}")
    assert found.status_code in (200, 400), found.text
    if found.status_code == 400:
        error = found.json()["error"]
        assert error["param"] in (*given_fields, None)
        assert error["param"] is not None or error["code"] == "invalid_json"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example({"temperature": "1.5", "repetition_penalty": "1e-300"})
@example({"temperature": "1e-4", "repetition_penalty": "1e-4"})
@example({"temperature": "1e6", "repetition_penalty": "1e4", "top_p": "5e-324"})
@given(fields)
def test_numbers_together(served: Served, given_fields: dict[str, str]) -> None:
    if len(given_fields.get("max_tokens", "")) > 3:  # an answer to the end of the context takes a while
        given_fields = given_fields | {"max_tokens": "2"}
    if given_fields.get("n") not in (None, "1", "0", "-1"):
        given_fields = given_fields | {"n": "2"}
    check(served, given_fields)


@pytest.mark.slow
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_in_objects(served: Served, value: str, bias: bool) -> None:
    field = '"logit_bias": {"5": %s}' if bias else '"stream_options": {"include_usage": %s}, "stream": true'
    body = f'{{"model": "demo-moe", "prompt": "Natalia", "max_tokens": 1, {field % value}}}'
    assert ask(served, body).status_code in (200, 400)


@pytest.mark.parametrize("value", [-1, 2**63, 10**300])
def test_token_ids(served: Served, value: int) -> None:
    found = ask(served, f'{{"model": "demo-moe", "prompt": [{value}], "max_tokens": 1}}')
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")


def test_every_number_is_tried() -> None:
    found = {
        name
        for kind in (CompletionRequest, ChatRequest)
        for name, field in kind.model_fields.items()
        if "int" in str(field.annotation) or "float" in str(field.annotation)
    }
    assert found - {"prompt", "logit_bias", "top_logprobs", "max_completion_tokens", "stop_token_ids"} == set(NUMBERS)
