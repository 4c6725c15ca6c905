"""The openai package, /v1/chat/completions."""

import json

import openai
from common import DESCRIPTION, KEY, MODEL, PARAMETERS, QUESTION, URL, add, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
tools = [{"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}}]
messages = [{"role": "user", "content": QUESTION}]


def turn():
    pieces = 0
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        for event in stream:
            pieces += event.type == "content.delta"
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump())
    return message, pieces


first, _ = turn()
arguments = [json.loads(call.function.arguments) for call in first.tool_calls]
for call, given in zip(first.tool_calls, arguments, strict=True):
    messages.append({"role": "tool", "tool_call_id": call.id, "content": add(**given)})
second, count = turn()
tell(arguments, second.content, count)
