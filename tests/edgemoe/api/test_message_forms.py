"""Messages in the form that a chat template can read; where it can read them as they are, transformers' text."""

from __future__ import annotations

import json

import pytest
from small_tokenizer import a_tokenizer

from edgemoe.api.message_forms import forms_of
from edgemoe.api.template import render_chat

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
HISTORY = [
    {"role": "user", "content": "None of it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
EACH = "{% for m in messages %}[{{ m.role }}]"
CALLS = (
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
)
END = "{% endfor %}"

AS_GIVEN = {
    "a text that is none": EACH
    + "{% if m.content is none %}none{% else %}{{ m.content }}{% endif %}"
    + CALLS
    + END,
    "a text that is not defined": EACH + "{{ m.content if 'content' in m else '-' }}" + CALLS + END,
    "arguments of a mapping": EACH
    + "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    + "{% endfor %}{{ m.content or '' }}"
    + END,
}


@pytest.mark.parametrize("name", AS_GIVEN)
def test_null_and_objects_come_first(name):
    """Messages are written in transformers' order."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = AS_GIVEN[name]
    want = tokenizer.apply_chat_template(HISTORY, tokenize=False, add_generation_prompt=True)
    assert render_chat(tokenizer, HISTORY) == want


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            EACH + "{{ m.content }}" + CALLS + END,
            '[user]None of it?[assistant]<weather {"city": "Zürich"}>[tool]sunny',
        ),
        (
            EACH + "{{ m.content + '' }}" + CALLS + END,
            '[user]None of it?[assistant]<weather {"city": "Zürich"}>[tool]sunny',
        ),
        (
            EACH
            + "{% if m.content is none %}{{ '<｜tool▁calls▁begin｜>' + m.tool_calls[0].function.arguments }}"
            + "{% else %}{{ m.content }}{% endif %}"
            + END,
            '[user]None of it?[assistant]<｜tool▁calls▁begin｜>{"city": "Zürich"}[tool]sunny',
        ),
    ],
    ids=["null is no word", "null is no text", "arguments are text"],
)
def test_other_forms_where_the_template_needs_them(template, text):
    """Null that cannot be joined is an empty text, and arguments are JSON text; DeepSeek's have calls with null."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = template
    assert render_chat(tokenizer, HISTORY) == text
    empty = [message | {"content": message["content"] or ""} for message in HISTORY]
    assert render_chat(tokenizer, empty) == text  # as clients of other protocols than OpenAI's have it


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "read", ["m.reasoning_content", "m['reasoning']", "m.thinking", "m.reasoning if 'reasoning' in m else ''"]
)
def test_reasoning_under_the_name_that_the_template_reads(name, read):
    """Whatever name the client has for it."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = EACH + "{{ " + read + " }}" + END
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
    assert render_chat(tokenizer, messages) == "[user][assistant]hm"


def test_a_place_for_reasoning_and_text_before_a_call():
    """gpt-oss's template refuses both; a template that reads neither name gets none added."""
    answer = {"role": "assistant", "content": "See:", "reasoning_content": "hm", "tool_calls": [CALL]}
    ((given,), _) = forms_of([answer], "{{ message.thinking }}")
    assert (given["thinking"], given["content"]) == ("hm\nSee:", "")
    form = forms_of([answer], "{% if enable_thinking %}{{ message.reasoning_content }}{% endif %}")
    assert form[0] == [answer]


def test_ids_of_nine_characters():
    """Where the template refuses others, a call and its result keep the same id."""
    template = "{% if id|length != 9 %}{{ raise_exception('no') }}{% endif %}"
    form = forms_of(HISTORY, template)[0]
    name = form[1]["tool_calls"][0]["id"]
    assert name == form[2]["tool_call_id"] == forms_of(HISTORY, template)[0][2]["tool_call_id"]
    assert len(name) == 9
    assert name.isalnum()
    own = json.loads(json.dumps(HISTORY).replace("call_1", "a1B2c3D4e"))
    assert forms_of(own, template)[0][2]["tool_call_id"] == "a1B2c3D4e"


def test_a_template_with_one_system_message_gets_later_ones_as_the_users():
    """They are a part of the message before them, and after an answer of the user's next one."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
    )
    roles = ("system", "system", "user", "system", "assistant", "system", "user")
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    assert render_chat(tokenizer, messages, {}) == "[system]0\n\n1[user]2\n\n3[assistant]4[user]5\n\n6"
    messages[2]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(tokenizer, messages, {}) == "[system]0\n\n1[user]a;b;3;[assistant]4[user]5\n\n6"
