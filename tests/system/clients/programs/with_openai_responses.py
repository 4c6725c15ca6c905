"""The openai package, /v1/responses."""

import json

import openai
from common import DESCRIPTION, KEY, MODEL, PARAMETERS, QUESTION, URL, add, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
tools = [{"type": "function", "name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}]
items = [{"role": "user", "content": QUESTION}]


def turn():
    events = []
    with client.responses.stream(
        model=MODEL, input=items, tools=tools, instructions="Be brief.", store=False
    ) as stream:
        events.extend(stream)
        found = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    items.extend(item.model_dump(exclude={"parsed_arguments"}) for item in found.output)
    return found, sum(event.type == "response.output_text.delta" for event in events)


first, _ = turn()
calls = [item for item in first.output if item.type == "function_call"]
arguments = [json.loads(call.arguments) for call in calls]
for call, given in zip(calls, arguments, strict=True):
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": add(**given)})
second, count = turn()
assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
whole = client.responses.create(model=MODEL, input=items[:-1], tools=tools, instructions="Be brief.")
assert whole.output_text == second.output_text
tell(arguments, second.output_text, count)
