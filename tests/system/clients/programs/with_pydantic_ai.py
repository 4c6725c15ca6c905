"""pydantic-ai, /v1/chat/completions."""

import asyncio

from common import KEY, MODEL, QUESTION, URL, add, tell
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

called = []


def noted(a: int, b: int) -> str:
    """Adds two integers."""
    called.append({"a": a, "b": b})
    return add(a, b)


noted.__name__ = "add"
agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)), tools=[noted])


async def conversation():
    async with agent.run_stream(QUESTION) as run:
        texts = [text async for text in run.stream_text(delta=True, debounce_by=None)]
    return "".join(texts), len(texts)


answer, count = asyncio.run(conversation())
tell(called, answer, count)
