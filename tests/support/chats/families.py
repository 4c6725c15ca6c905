"""Chat templates of families, cut down to how they write answers, each as published, and answers in their forms."""

# ruff: noqa: RUF001 - DeepSeek's tokens have wide bars

from __future__ import annotations

from typing import Any, NamedTuple

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


class Family(NamedTuple):
    """`template` writes a chat of messages. `prompt`: ends where the answer begins."""

    template: str
    end: str
    """With which an answer ends: the end-of-sequence token."""
    thinks: bool = True


_QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {
    # Qwen/Qwen3-30B-A3B, chat_template of tokenizer_config.json
    "Qwen3": Family(
        _QWEN.replace(
            "CALL",
            '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
            "{{ c.function.arguments | tojson }}}\n</tool_call>",
        ),
        "<|im_end|>",
    ),
    # Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja
    "Qwen3-Coder": Family(
        _QWEN.replace(
            "CALL",
            "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
            "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
            "</function>\n</tool_call>",
        ),
        "<|im_end|>",
    ),
    # zai-org/GLM-4.5-Air, chat_template.jinja
    "GLM-4.5": Family(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}\n<think>{{ m.reasoning_content }}</think>"
        "{% endif %}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|user|>",
    ),
    # MiniMaxAI/MiniMax-M2, chat_template.jinja: it begins the reasoning
    "MiniMax-M2": Family(
        "{% for m in messages %}]~b]{{ m.role | replace('assistant', 'ai') }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n"
        '{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
        '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
        "{% endif %}[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
        "[e~[",
    ),
    # deepseek-ai/DeepSeek-R1-0528, tokenizer_config.json: it puts texts and arguments together
    "DeepSeek-R1": Family(
        "{% for m in messages %}<｜{{ m.role | capitalize }}｜>{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% if m.tool_calls %}"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + "
        "c['function']['name'] + '\n' + '```json' + '\n' + c['function']['arguments'] + '\n' + '```' + "
        "'<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "<｜end▁of▁sentence｜>",
    ),
    # deepseek-ai/DeepSeek-V3.1, chat_template.jinja
    "DeepSeek-V3.1": Family(
        "{% for m in messages %}<｜{{ m.role | capitalize }}｜>{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
        "<｜end▁of▁sentence｜>{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "<｜end▁of▁sentence｜>",
    ),
    # moonshotai/Kimi-K2-Thinking, chat_template.jinja
    "Kimi-K2": Family(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
        "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
        "<|im_end|>",
    ),
    # mistralai/Magistral-Small-2509, chat_template.jinja
    "Mistral": Family(
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}"
        "{% endfor %}",
        "</s>",
    ),
    # mistralai/Mixtral-8x22B-Instruct-v0.1, tokenizer_config.json
    "Mixtral": Family(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content }}"
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last else '' }}{% endfor %}]{% endif %}</s>{% endif %}{% endfor %}",
        "</s>",
        thinks=False,
    ),
    # openai/gpt-oss-20b, chat_template.jinja
    "gpt-oss": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% if m.content and m.tool_calls %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
        "{% elif m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary "
        "json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>",
    ),
    # google/gemma-4-26B-A4B-it, chat_template.jinja: values that are no texts or numbers are left out here
    "Gemma-4": Family(
        "{% for m in messages %}<|turn>{{ m.role | replace('assistant', 'model') }}\n"
        "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}:"
        '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        "{{ ',' if not loop.last else '' }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% endif %}",
        "<turn|>",
    ),
    # ibm-granite/granite-3.1-3b-a800m-instruct, tokenizer_config.json
    "Granite-3": Family(
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{{ ', ' if not loop.last else '' }}{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "<|end_of_text|>",
        thinks=False,
    ),
    # MiniMaxAI/MiniMax-M1-80k, chat_template.jinja
    "MiniMax-M1": Family(
        "{% for m in messages %}<beginning_of_sentence>{{ m.role | replace('assistant', 'ai name=MiniMax') }}\n"
        "{{ m.content }}{% if m.tool_calls %}\n"
        "<tool_calls>\n{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "{% endfor %}</tool_calls>{% endif %}<end_of_sentence>\n{% endfor %}"
        "{% if add_generation_prompt %}<beginning_of_sentence>ai name=MiniMax\n{% endif %}",
        "<end_of_sentence>",
        thinks=False,
    ),
}
