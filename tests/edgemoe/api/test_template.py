"""Chat templates: texts equal transformers', and time, memory and size are limited."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
from small_tokenizer import a_tokenizer

from edgemoe.api.template import TemplateRenderer, encode_chat, render_chat, renderer
from edgemoe.errors import ModelRefused, UserError

MESSAGES = [
    {"role": "system", "content": "be <brief> & kind"},
    {"role": "user", "content": '  what\'s "up"?\n'},
    {"role": "assistant", "content": "grüße 😀"},
    {"role": "user", "content": "so?"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "namespace": "{%- set ns = namespace(n=0, last=none) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "  {% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\n{% endfor %}\n{{ ns.n }} {{ ns.last }}",
    "controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}|{% endfor %}{{ messages[1:] | length }}",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ dict(a=1) | tojson }}"
    "{{ {'<': '&'} | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
    "{% endfor %}",
    "special": "{{ eos_token }}{{ pad_token }}{{ bos_token }}{{ tools is none }}{{ documents is defined }}"
    "{{ nothing }}",
    "macro": "{% macro turn(m) %}[{{ m.role | upper }}:{{ m.content.split()[0] }}]{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ strftime_now('%d') | length }}",
}


@pytest.fixture(scope="module")
def limited():
    """A renderer with low limits of time."""
    one = TemplateRenderer(cpu_seconds=1, wall_seconds=20)
    yield one
    one.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_equals_transformers(name):
    """Every feature that templates of known models use gives transformers' text."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    want = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, MESSAGES) == want
    assert want


def test_a_long_conversation_is_encoded_without_the_librarys_warning(monkeypatch):
    """The engine compares the length with its context; a tokenizer's own limit says nothing about that."""
    tokenizer = a_tokenizer()
    tokenizer.model_max_length = 4
    warnings = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "handle", warnings.append)
    assert len(encode_chat(tokenizer, MESSAGES)) > 4
    assert warnings == []
    tokenizer("a text of more than four tokens")
    assert len(warnings) == 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "1 s of computing",
        ),
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "characters"),
        ("{{ 'a' * 10**9 }}", "MiB of memory"),
        (
            "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
            "MiB",
        ),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[99].content.nothing }}", "no element 99"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_hostile_or_broken_template_is_refused(limited, template, message):
    """It is refused in bounded time with the fault, and the next template is rendered."""
    before = time.monotonic()
    with pytest.raises(ModelRefused, match="text from the chat template") as caught:
        limited.render(template, {"messages": MESSAGES})
    assert message in str(caught.value)
    assert time.monotonic() - before < 60
    assert limited.render("{{ 6 * 7 }}", {}) == "42"


def test_a_template_refuses_a_message(limited):
    """The error has the template's message without control characters."""
    with pytest.raises(UserError, match=r"by the template: no  \[2J system role") as caught:
        limited.render("{{ raise_exception('no \\x1b[2J system role') }}", {})
    assert not isinstance(caught.value, ModelRefused)


@pytest.mark.e2e
def test_a_stopped_process_is_replaced():
    """A process that sends no answer is killed after the wall time, and the next rendering starts another."""
    one = TemplateRenderer(cpu_seconds=100, wall_seconds=0.5)
    assert one.render("{{ 1 }}", {}) == "1"
    first = one._process.pid
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(ModelRefused, match=r"more than 0\.5 s"):
        one.render("{{ 1 }}", {})
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert one.render("{{ 2 }}", {}) == "2"
    one.close()
    one.close()


@pytest.mark.e2e
def test_ctrl_c_while_it_renders(limited, monkeypatch):
    """A late answer is not taken for the next one."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edgemoe.api.template.select.select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            limited.render("old", {})
    assert limited.render("new", {}) == "new"


def test_a_long_conversation_is_rendered():
    """The limit on size grows with the messages."""
    text = "word " * 1_000_000
    template = TEMPLATES["chatml"]
    tokenizer = SimpleNamespace(
        chat_template=template, special_tokens_map={}, get_chat_template=lambda tools: template
    )
    assert text.strip() in render_chat(tokenizer, [{"role": "user", "content": text}])
    assert renderer() is renderer()
