"""The ollama package, /api/chat."""

import ollama
from common import KEY, MODEL, QUESTION, URL, add, tell

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
assert [one.model for one in client.list().models] == [MODEL]
assert "tools" in client.show(MODEL).capabilities
assert client.ps().models[0].context_length
named = f"{MODEL}:latest"
messages = [{"role": "user", "content": QUESTION}]


def turn():
    content, calls, pieces = "", [], 0
    for part in client.chat(model=named, messages=messages, tools=[add], stream=True, options={"num_ctx": 512}):
        content += part.message.content or ""
        pieces += bool(part.message.content)
        calls += part.message.tool_calls or []
    assert part.done
    assert part.eval_count > 0
    messages.append({"role": "assistant", "content": content, "tool_calls": [call.model_dump() for call in calls]})
    return content, calls, pieces


_, first, _ = turn()
arguments = [dict(call.function.arguments) for call in first]
messages += [{"role": "tool", "tool_name": "add", "content": add(**given)} for given in arguments]
answer, _, count = turn()
assert client.generate(model=MODEL, prompt=QUESTION, options={"num_predict": 3}).done_reason == "length"
tell(arguments, answer, count)
