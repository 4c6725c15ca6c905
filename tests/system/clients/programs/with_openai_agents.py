"""openai-agents: by its default, /v1/responses, and by /v1/chat/completions."""

import asyncio
import json

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from common import KEY, MODEL, QUESTION, URL, add, tell

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


async def conversation(model):
    agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[function_tool(add)])
    run = Runner.run_streamed(agent, QUESTION)
    pieces, calls = 0, []
    async for event in run.stream_events():
        if event.type == "raw_response_event":
            pieces += event.data.type == "response.output_text.delta"
        elif event.type == "run_item_stream_event" and event.name == "tool_called":
            calls.append(json.loads(event.item.raw_item.arguments))
    return calls, run.final_output, pieces


async def both():
    by_responses = await conversation(OpenAIResponsesModel(MODEL, client))
    by_chat = await conversation(OpenAIChatCompletionsModel(MODEL, client))
    assert by_chat[:2] == by_responses[:2]
    return by_responses


tell(*asyncio.run(both()))
