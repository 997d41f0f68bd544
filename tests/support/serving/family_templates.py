"""Small chat templates in the spelling of each family, written by hand after descriptions of their formats.

Each writes a question, an answer with reasoning, text and calls, results of calls, and the begin of the next answer.
All but LFM2's have the tools in the prompt, one per line.
"""

from __future__ import annotations

from dataclasses import dataclass

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


@dataclass(frozen=True)
class Family:
    """A family's chat template, and what is known of it.

    Args:
        template: jinja2 source.
        closing: the text that closes reasoning where its budget is spent; None: the family has none.
        end: the text that ends an answer.
        enforced: whether calls can be enforced: their arguments are JSON.
        special: special tokens that the tokenizer has.
        several: an answer may have several calls.
    """

    template: str
    closing: str | None
    end: str
    enforced: bool
    special: tuple[str, ...] = ()
    several: bool = True


def turns(answer: str, begin: str, end: str, user: str = "user", result: str = "{{ m.content }}") -> str:
    """A template of turns, each with its role after `begin` and `end` at its end."""
    return (
        f"{TOOLS}{{% for m in messages %}}{begin}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% elif m.role == 'tool' %}}{user}\n{result}"
        f"{{% else %}}{{{{ m.role }}}}\n{{{{ m.content }}}}{{% endif %}}{end}{{% endfor %}}"
    )


def calls(body: str, between: str = "") -> str:
    """The calls of an answer, each as `body` writes the function f."""
    separator = f"{{% if not loop.first %}}{between}{{% endif %}}" if between else ""
    return (
        f"{{% for call in m.tool_calls or [] %}}{{% set f = call.function %}}{separator}{body}{{% endfor %}}"
    )


def arguments(body: str) -> str:
    """The arguments of a call, each as `body` writes its name and its value v."""
    value = "{% set v = value if value is string else value | tojson %}"
    return f"{{% for name, value in f.arguments.items() %}}{value}{body}{{% endfor %}}"


IF_CALLS, END = "{% if m.tool_calls %}", "{% endif %}"
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}"
JSON = "{{ f.arguments | tojson }}"

XML = calls(
    "\n<tool_call>\n<function={{ f.name }}>\n"
    + arguments("<parameter={{ name }}>\n{{ v }}\n</parameter>\n")
    + "</function>\n</tool_call>"
)

CHATML = ("<|im_start|>", "<|im_end|>\n")

FAMILIES = {
    "qwen3_coder": Family(
        turns(f"assistant\n{THOUGHT}{XML}", *CHATML) + "<|im_start|>assistant\n",
        "\n</think>\n\n",
        "<|im_end|>",
        enforced=False,
    ),
    "nemotron_3": Family(
        turns(f"assistant\n<think>{{{{ m.reasoning_content }}}}</think>\n{{{{ m.content }}}}{XML}", *CHATML)
        + "<|im_start|>assistant\n<think>",
        "</think>\n",
        "<|im_end|>",
        enforced=False,
    ),
    "nemotron_2": Family(
        turns(
            f"Assistant\n{THOUGHT}{IF_CALLS}<TOOLCALL>["
            + calls('{"name": "{{ f.name }}", "arguments": ' + JSON + "}", ", ")
            + f"]</TOOLCALL>{END}\n<SPECIAL_12>\n",
            "<SPECIAL_11>",
            "",
            "User",
        )
        + "<SPECIAL_11>Assistant\n<think>\n",
        "\n</think>\n\n",
        "<SPECIAL_12>",
        enforced=True,
    ),
    "gpt_oss": Family(
        TOOLS + "{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.role == 'assistant' %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        + calls("<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>" + JSON)
        + "{% else %}<|message|>{{ m.content }}{% endif %}<|call|>{% endfor %}<|start|>assistant",
        "<|end|><|start|>assistant",
        "<|call|>",
        enforced=True,
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
        several=False,
    ),
    "glm4_moe": Family(
        TOOLS + "[gMASK]<sop>{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content }}</think>\n{{ m.content }}"
        + calls(
            "\n<tool_call>{{ f.name }}\n"
            + arguments("<arg_key>{{ name }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n")
            + "</tool_call>"
        )
        + "<|user|>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}<|assistant|>",
        "</think>\n",
        "<|user|>",
        enforced=False,
    ),
    "minimax_m2": Family(
        turns(
            f"ai\n{THOUGHT}{IF_CALLS}\n<minimax:tool_call>\n"
            + calls(
                '<invoke name="{{ f.name }}">\n'
                + arguments('<parameter name="{{ name }}">{{ v }}</parameter>\n')
                + "</invoke>\n"
            )
            + f"</minimax:tool_call>{END}",
            "]~b]",
            "[e~[\n",
        )
        + "]~b]ai\n<think>\n",
        "\n</think>\n\n",
        "[e~[",
        enforced=False,
    ),
    "deepseek_v3_1": Family(
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
        "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
        + f"{IF_CALLS}<｜tool▁calls▁begin｜>"
        + calls("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>")
        + f"<｜tool▁calls▁end｜>{END}<｜end▁of▁sentence｜>"
        "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}<｜Assistant｜><think>",
        "</think>",
        "<｜end▁of▁sentence｜>",
        enforced=True,
    ),
    "deepseek_v3_2": Family(
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
        "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
        + f"{IF_CALLS}\n\n<｜DSML｜function_calls>\n"
        + calls(
            '<｜DSML｜invoke name="{{ f.name }}">\n'
            + arguments(
                "<｜DSML｜parameter name=\"{{ name }}\" string=\"{{ 'true' if value is string else 'false' }}\">"
                "{{ v }}</｜DSML｜parameter>\n"
            )
            + "</｜DSML｜invoke>\n"
        )
        + f"</｜DSML｜function_calls>{END}<｜end▁of▁sentence｜>"
        "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}<｜Assistant｜><think>",
        "</think>",
        "<｜end▁of▁sentence｜>",
        enforced=False,
    ),
    "kimi_k2": Family(
        TOOLS + "{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
        "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
        + f"{IF_CALLS}<|tool_calls_section_begin|>"
        + calls("<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>")
        + f"<|tool_calls_section_end|>{END}"
        "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
        "{% else %}<|im_user|>user<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "<|im_assistant|>assistant<|im_middle|>",
        "</think>",
        "<|im_end|>",
        enforced=True,
    ),
    "gemma_4": Family(
        TOOLS + '{% macro written(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
        "{% for name, each in v.items() %}{{ ',' if not loop.first }}{{ name }}:{{ written(each) }}{% endfor %}"
        "{{ '}' }}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|turn>model\n"
        "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{{ m.content }}"
        + calls("<|tool_call>call:{{ f.name }}{{ written(f.arguments) }}<tool_call|>")
        + "{% else %}<|turn>user\n{{ m.content }}{% endif %}<turn|>\n{% endfor %}<|turn>model\n",
        "\n<channel|>",
        "<turn|>",
        enforced=False,
    ),
    "lfm2": Family(
        "<|tool_list_start|>" + turns("assistant\n{{ m.content }}", *CHATML) + "<|im_start|>assistant\n",
        "</think>",
        "<|im_end|>",
        enforced=False,
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "mistral": Family(
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}"
        "[THINK]{{ m.reasoning_content }}[/THINK]{{ m.content }}"
        + calls("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON)
        + "</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
        "[/THINK]",
        "</s>",
        enforced=True,
    ),
    "mistral_call_ids": Family(
        TOOLS
        + "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
        + calls(
            "{{ '' if call.id | length != 9 }}[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]" + JSON
        )
        + "</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
        None,
        "</s>",
        enforced=False,
    ),
}
