"""langchain-openai, /v1/chat/completions."""

from common import KEY, MODEL, QUESTION, URL, add, tell
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_retries=0, stream_usage=True)
with_tools = model.bind_tools([tool(add)])
messages = [HumanMessage(QUESTION)]


def turn():
    whole, pieces = None, 0
    for part in with_tools.stream(messages):
        whole = part if whole is None else whole + part
        pieces += bool(part.content)
    messages.append(whole)
    return whole, pieces


first, _ = turn()
messages += [ToolMessage(add(**call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
second, count = turn()
assert second.usage_metadata["output_tokens"] > 0
tell([call["args"] for call in first.tool_calls], second.content, count)
