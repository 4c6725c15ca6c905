"""instructor, /v1/chat/completions: it forces a call, whose arguments it reads while they come."""

import instructor
import openai
from common import DESCRIPTION, KEY, MODEL, QUESTION, URL, add, tell
from pydantic import BaseModel, create_model

client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))
Sum = create_model("add", __base__=BaseModel, __doc__=DESCRIPTION, a=(int, ...), b=(int, ...))
messages = [{"role": "user", "content": QUESTION}]

parts = list(client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=Sum, max_retries=0))
whole = client.chat.completions.create(model=MODEL, messages=messages, response_model=Sum, max_retries=0)
assert parts[-1].model_dump() == whole.model_dump()
call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": whole.model_dump_json()}}
messages += [
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": add(**whole.model_dump())},
]
stream = client.chat.completions.create(model=MODEL, messages=messages, response_model=None, stream=True)
pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
tell([whole.model_dump()], "".join(pieces), len(pieces))
