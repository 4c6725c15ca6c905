"""The anthropic package, /v1/messages."""

import anthropic
from common import DESCRIPTION, KEY, MODEL, PARAMETERS, QUESTION, URL, add, tell

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
asked = {
    "model": MODEL,
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}],
}
messages = [{"role": "user", "content": QUESTION}]


def turn():
    with client.messages.stream(**asked, messages=messages) as stream:
        pieces = sum(1 for _ in stream.text_stream)
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    return message, pieces


first, _ = turn()
assert first.stop_reason == "tool_use"
calls = [block for block in first.content if block.type == "tool_use"]
results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)} for call in calls]
messages.append({"role": "user", "content": results})
counted = client.messages.count_tokens(
    model=MODEL, messages=messages, tools=asked["tools"], system=asked["system"]
).input_tokens
second, count = turn()
assert second.stop_reason == "end_turn"
assert second.usage.input_tokens == counted
whole = client.messages.create(**asked, messages=messages[:-1])
assert [block.text for block in whole.content] == [block.text for block in second.content]
tell([call.input for call in calls], second.content[0].text, count)
