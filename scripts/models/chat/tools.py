"""Dialogues in which models/chat-moe calls a tool: one for the weather, one for sums of larger numbers."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

CITIES = (
    *("Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Vienna", "Oslo", "Moscow", "Cairo", "Athens", "Lisbon"),
    *("Boston", "Chicago", "Dublin", "Prague", "Warsaw", "Delhi", "Beijing", "Sydney", "Toronto", "Geneva", "Zurich"),
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "clear")
WEATHER_NAMES = ("get_weather", "get_weather", "get_weather", "weather", "get_current_weather")
PLACES = ("city", "city", "location")
SUM_NAMES = ("calculate", "calculator")
WEATHER_ASK = (
    "What is the weather in {x}?",
    "How is the weather in {x}?",
    "What is the weather like in {x} today?",
    "Tell me the weather in {x}.",
    "What's the weather in {x}?",
    "Is it warm in {x}?",
)
WEATHER_HELD = ("How is the weather in {x} today?", "Please tell me the weather in {x}.")
SUM_ASK = ("What is {x}?", "Calculate {x}.", "How much is {x}?", "{x}", "Use the calculator: {x}")
SUM_HELD = ("Please calculate {x}.", "Can you calculate {x}?")


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    right: str
    """A regular expression that a right last answer matches."""
    offered: list[dict[str, Any]]


def _tool(name: str, parameter: str, description: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def offer(rng: random.Random) -> list[dict[str, Any]]:
    """One of the tools or both; the one for the weather comes first if it is there."""
    weather = _tool(
        rng.choice(WEATHER_NAMES), rng.choice(PLACES), rng.choice(("Weather of a city", "Get the current weather", ""))
    )
    sums = _tool(rng.choice(SUM_NAMES), "expression", rng.choice(("Calculate an expression", "Do arithmetic", "")))
    return rng.choice(([weather], [weather], [sums], [weather, sums]))


def conversation(rng: random.Random, held: bool) -> Conversation:
    """A question, the call that it needs and, in half of them, the tool's result and the answer."""
    offered = offer(rng)
    tool = rng.choice(offered)["function"]
    parameter = next(iter(tool["parameters"]["properties"]))
    if parameter == "expression":
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        value, result = f"{a} + {b}", str(a + b)
        ask, answer = rng.choice(SUM_HELD if held else SUM_ASK), f"{value} = {result}."
    else:
        value, degrees, sky = rng.choice(CITIES), rng.randint(0, 35), rng.choice(SKIES)
        result = rng.choice((f"{sky}, {degrees} degrees", json.dumps({"temperature": degrees, "sky": sky})))
        ask = rng.choice(WEATHER_HELD if held else WEATHER_ASK)
        answer = f"It is {sky} in {value}, with {degrees} degrees."
    call = {"type": "function", "function": {"name": tool["name"], "arguments": {parameter: value}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ask.format(x=value)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    right = json.dumps(call["function"])
    if rng.random() < 0.5:
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": answer}]
        right = answer
    return Conversation(messages, _escape(right), offered)


def _escape(text: str) -> str:
    """A pattern of that very text, for re and for people who read the printed dialogue."""
    return "".join("\\" + c if c in ".+*?()[]{}|^$\\" else c for c in text)
