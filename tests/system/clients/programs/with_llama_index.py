"""llama-index, /v1/chat/completions."""

from common import KEY, MODEL, QUESTION, URL, add, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
)
tools = [FunctionTool.from_defaults(add)]
messages = [ChatMessage(role="user", content=QUESTION)]


def turn():
    pieces, part = 0, None
    for part in model.stream_chat_with_tools(tools, chat_history=messages):
        pieces += bool(part.delta)
    messages.append(part.message)
    return part, pieces


first, _ = turn()
calls = model.get_tool_calls_from_response(first)
for call in calls:
    results = add(**call.tool_kwargs)
    messages.append(ChatMessage(role="tool", content=results, additional_kwargs={"tool_call_id": call.tool_id}))
second, count = turn()
tell([call.tool_kwargs for call in calls], second.message.content, count)
