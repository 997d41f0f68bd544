"""How the answers of each family are read: response templates of transformers."""

from __future__ import annotations

from typing import Any

_THOUGHT = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"

_CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_TEXT = {"close": ["<|im_end|>", "<|endoftext|>"]}
_JSON_IN_TAGS = {
    "open": "<tool_call>",
    "close_pattern": r"(?<=[}\]])\s*</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
    "repeats": True,
}

_CHATML_FIELDS = {"reasoning_content": _THOUGHT, "tool_calls": _JSON_IN_TAGS, "content": _TEXT}

CALLS_AS_JSON = _CHATML | {"fields": _CHATML_FIELDS}
"""Response template of ChatML with calls as JSON between <tool_call> tags: Hermes, Qwen 2.5, 3 and 3 Next."""

_RESPONSE = {"open": "<response>", "close": "</response>"}

ERNIE = _CHATML | {"fields": {**_CHATML_FIELDS, "response": _RESPONSE}}
"""Response template of ERNIE 4.5 that reasons: as the one before, with the text between tags too."""

_ARGUMENT = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
"""One argument between tags, which its own text may contain too."""

CALLS_AS_TAGS = _CHATML | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]{1,64})>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _ARGUMENT},
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": _TEXT,
    }
}
"""Response template of ChatML with a tag for each argument of a call: Qwen 3 Coder, Qwen 3.5."""

GLM = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
            "close_pattern": r"</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                r"(?=\s*(?:<arg_key>|\Z))"
            },
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<|user|>", "<|observation|>", "<|endoftext|>"]},
    },
}
"""Response template of GLM 4.5 to 4.7: a pair of tags for each argument."""

DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"

DEEPSEEK = {
    "start_anchor": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"],
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
            rf"(?:function<｜tool▁sep｜>{_NAME}\s*```json\s|{_NAME}<｜tool▁sep｜>(?=\s*\{{))",
            "close_pattern": r"\s{0,8}(?:```\s{0,8})?<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"]},
    },
}
"""Response template of DeepSeek V2.5, V3, R1 and V3.1, which writes calls without a code block."""

_TO = r"to=(?:functions\.)?" + _NAME
_MESSAGE = r"\s{0,4}(?:<\|constrain\|>)?\s{0,4}\w{0,32}\s{0,4}<\|message\|>"
"""Each pattern is searched again at every character, so that its repetitions have bounds."""

_BEGUN = r"(?:<\|start\|>assistant)?"
_ENDS = {"close": ["<|end|>", "<|return|>", "<|call|>"]}

HARMONY = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open_pattern": _BEGUN + r"<\|channel\|>analysis ?<\|message\|>", **_ENDS},
        "tool_calls": {
            "open_pattern": rf"{_BEGUN} ?{_TO} ?<\|channel\|>(?:commentary|analysis){_MESSAGE}|"
            rf"{_BEGUN}<\|channel\|>(?:commentary|analysis) {_TO}{_MESSAGE}",
            **_ENDS,
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "response": {"open_pattern": rf"{_BEGUN}<\|channel\|>(?:final|commentary){_MESSAGE}", **_ENDS},
        "content": _ENDS,
    },
}
"""Response template of gpt-oss: messages in channels. Text to the user comes in `final`, or `commentary`."""


def listed(anchor: object, mark: str, ends: list[str]) -> dict[str, Any]:
    """The response template of calls as one JSON list at the end of an answer."""
    calls = {"open": mark, "close": ends, "content": "json"}
    fields = {"reasoning_content": _THOUGHT, "tool_calls": calls, "content": {"close": ends}}
    return {"start_anchor": anchor, "fields": fields}


THINKS = {"start_anchor": "\0", "fields": {"reasoning_content": _THOUGHT, "content": {}}}
"""Response template of any model with tags of reasoning; its anchor stands in no prompt."""

MINIMAX = {
    "start_anchor": "]~b]ai\n",
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r'(?:<minimax:tool_call>\s{0,8})?<invoke name="(?P<name>[^"\n]{1,64})">',
            "close_pattern": r'(?<=</parameter>|">)\s{0,8}</invoke>',
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'
                r"(?=\s*(?:<parameter name=|\Z))"
            },
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["</minimax:tool_call>", "[e~["]},
    },
}
"""Response template of MiniMax M2: a tag for each argument, and one block for all calls."""

DEEPSEEK_TAGS = {
    "start_anchor": "<｜Assistant｜>",
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"(?:<｜DSML｜(?:function_calls|tool_calls)>\s{0,8})?"
            r'<｜DSML｜invoke name="(?P<name>[^"\n]{1,64})">',
            "close_pattern": r'(?<=</｜DSML｜parameter>|">)\s{0,8}</｜DSML｜invoke>',
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<｜DSML｜parameter name="(?P<key>[^"\n]+)"(?: string="(?:true|false)")?>'
                r"(?P<value>.*?)</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter name=|\Z))"
            },
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "<｜end▁of▁sentence｜>"]},
    },
}
"""Response template of DeepSeek V3.2 and V4: a tag for each argument, which says whether it is text or JSON."""

KIMI = {
    "start_anchor": "<|im_assistant|>assistant<|im_middle|>",
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,8})?<\|tool_call_begin\|>\s{0,8}"
            rf"(?:functions\.)?{_NAME}:\d{{1,4}}\s{{0,8}}<\|tool_call_argument_begin\|>",
            "close_pattern": r"\s{0,8}<\|tool_call_end\|>",
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<|tool_calls_section_end|>", "<|im_end|>", "[EOS]"]},
    },
}
"""Response template of Kimi K2: calls as JSON, whose ids have the name of the function and a number."""

GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": rf"<\|tool_call>\s{{0,4}}call:{_NAME}(?=\{{)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}
"""Response template of Gemma 4: JSON without quotes around names, and with a token of its own around texts."""

LFM = _CHATML | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "repeats": True},
        "content": _TEXT,
    }
}
"""Response template of LFM2: a list of calls as Python writes them (edgemoe.api.python_calls)."""

MISTRAL_ARGUMENTS = {
    "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
    "fields": {
        "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": rf"\[TOOL_CALLS\]\s{{0,4}}{_NAME}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": "</s>"},
    },
}
"""Response template of Mistral's later models: each call with a mark before its name and one before its arguments."""
