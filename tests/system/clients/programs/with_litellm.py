"""litellm, /v1/chat/completions and /v1/messages."""

import json

import litellm
from common import DESCRIPTION, KEY, MODEL, PARAMETERS, QUESTION, URL, add, tell

tools = [{"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}}]
WAYS = {f"openai/{MODEL}": f"{URL}/v1", f"anthropic/{MODEL}": URL}


def conversation(model, base):
    messages = [{"role": "user", "content": QUESTION}]

    def turn():
        parts = list(
            litellm.completion(
                model=model, api_base=base, api_key=KEY, messages=messages, tools=tools, stream=True, max_tokens=200
            )
        )
        message = litellm.stream_chunk_builder(parts).choices[0].message
        messages.append(message.model_dump())
        return message, sum(bool(part.choices[0].delta.content) for part in parts)

    first, _ = turn()
    arguments = [json.loads(call.function.arguments) for call in first.tool_calls]
    for call, given in zip(first.tool_calls, arguments, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(**given)})
    second, pieces = turn()
    return arguments, second.content, pieces


ours, others = (conversation(model, base) for model, base in WAYS.items())
assert ours[:2] == others[:2]
tell(*ours)
