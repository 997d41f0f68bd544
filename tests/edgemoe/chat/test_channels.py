"""A chat with a model that answers in channels: reasoning between tags, and the text alone in later prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted import chatml_model, script

from edgemoe.chat.conversation import Conversation

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
ANSWER = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris."


@pytest.mark.parametrize(
    ("answer", "text", "content"),
    [
        (ANSWER, "<think>\nhm\n</think>\n\nParis.", "Paris."),
        ("<|channel|>final<|message|>Paris.", "Paris.", "Paris."),
        ("Paris.", "Paris.", "Paris."),
    ],
)
def test_channels_at_a_terminal(tiny_store, monkeypatch, answer, text, content):
    """Names of channels are no text, and what was streamed is the whole answer."""
    with chatml_model(tiny_store, TEMPLATE) as model:
        model.tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        prompts, pieces = script(monkeypatch, model.tokenizer, answer), []
        conversation = Conversation(model)
        conversation.set_sampling(replace(conversation.sampling, max_new_tokens=100))
        found = conversation.ask("Oslo?", pieces.append)
        assert found.text == "".join(pieces) == text
        conversation.ask("And?", pieces.append)
    assert f"<|start|>assistant<|channel|>final<|message|>{content}<|end|>" in prompts[-1]
