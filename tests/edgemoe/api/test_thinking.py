"""The text that closes reasoning, as templates write it, and budgets of a program that generates by itself."""

from __future__ import annotations

import pytest
from scripted import chatml_model, chatml_tokenizer, script

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.thinking import ReasoningTags
from edgemoe.errors import UserError

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n@{% endfor %}"

MESSAGES = [{"role": "user", "content": "Oslo?"}]


@pytest.mark.parametrize(
    ("written", "closing"),
    [
        ("<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}", "\n</think>\n\n"),
        ("<think>{{ m.reasoning_content }}</think>\n{{ m.content }}", "</think>\n"),
        ("<think>{{ m.thinking }}</think>{{ m.content }}", "</think>"),
        ("<think>{{ m.reasoning_content }}</think>Answer: {{ m.content }}", "</think>"),
        ("<think></think>{{ m.content }}", "</think>"),
        ("{{ m.content.split('</think>')[-1] }}", "</think>"),
        ("{{ raise_exception('no answers') }}</think>", "</think>"),
        (
            "{% if enable_thinking %}<think>{{ m.reasoning_content }} </think>{% endif %}{{ m.content }}",
            " </think>",
        ),
    ],
)
def test_reasoning_is_closed_as_the_template_closes_it(written, closing):
    """With its spaces around the tag; by the tag alone where it writes no reasoning, or other text with it."""
    tokenizer = chatml_tokenizer(TURN.replace("@", written))
    found = ReasoningTags.of(tokenizer).after("<|im_start|>assistant\n<think>\n")
    assert (found.open, found.close, found.closing, found.begun) == ("<think>", "</think>", closing, True)


def test_channels_are_closed_with_the_begin_of_the_next_one():
    """Whatever the template writes between an analysis and an answer: the answer may begin with a call."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    found = ReasoningTags.of(chatml_tokenizer(template)).after("<|start|>assistant")
    assert (found.closing, found.lead) == ("<|end|><|start|>assistant", "<|channel|>final<|message|>")


def test_a_model_without_tags_has_no_budget():
    """It is refused by name; a broken form counts as none."""
    tokenizer = chatml_tokenizer()
    assert ReasoningTags(tokenizer, None).after("x") is None
    with pytest.raises(UserError, match="a model with tags of reasoning"):
        ReasoningTags(tokenizer, None).require()
    assert ReasoningTags(tokenizer, AnswerForm.of(tokenizer)).known


def test_budgets_of_a_program(tiny_store, monkeypatch):
    """By every method, and without one reasoning is text as any other."""
    with chatml_model(tiny_store, context=256) as model:
        tokenizer = model.tokenizer

        def ids(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        thought, closing = ids("<think>the the"), ids("\n</think>\n\n")
        script(monkeypatch, tokenizer, lambda prompt: [*thought, *([0] * len(closing)), *ids("yes")])
        settings = {"thinking_budget": len(thought) - 1, "max_new_tokens": 60}
        want = "<think>the the\n</think>\n\nyes"
        for answer in (model.generate(MESSAGES, **settings), model.submit(MESSAGES, **settings).result()):
            assert (answer.text, answer.reasoning_tokens) == (want, len(thought) - 1)
        assert "".join(model.stream(MESSAGES, **settings)) == want
        plain = model.generate(MESSAGES, max_new_tokens=60)
        assert plain.reasoning_tokens is None
        with pytest.raises(UserError, match="thinking_budget of 0 or more"):
            model.generate(MESSAGES, thinking_budget=-1)
        prompts = script(monkeypatch, tokenizer, "yes")
        assert model.generate(MESSAGES, thinking_budget=0, max_new_tokens=60).text == "yes"
        assert prompts[0].endswith("<think>\n\n</think>\n\n")
