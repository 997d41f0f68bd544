"""Budgets of reasoning in a chat: by an option, and between two turns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from family_templates import FAMILIES
from scripted import chatml_model, chatml_tokenizer, script

from edgemoe.chat.conversation import Conversation
from edgemoe.chat.slash_commands import run_command
from edgemoe.commands.options.sampling import SamplingOptions, chosen_sampling
from edgemoe.console.input import Turn
from edgemoe.errors import UserError
from edgemoe.models.tokenizer import load_tokenizer

PLAIN = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def budget_after(conversation: Conversation, *commands: str) -> int | None:
    chat = SimpleNamespace(conversation=conversation, say=lambda *texts: None)
    chat.engine = conversation._model.engine
    for command in commands:
        run_command(chat, Turn(command))
    return conversation.sampling.thinking_budget


def test_a_budget_changes_between_turns(tiny_store, monkeypatch):
    """The model answers after so many tokens. With off it does not reason, by its template too; on has no limit."""
    with chatml_model(tiny_store) as model:
        tokenizer = model.tokenizer

        def ids(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        thought, closing = ids("<think>the the"), ids("\n</think>\n\n")
        answer = [*thought, *([0] * len(closing)), *ids("yes")]
        prompts = script(monkeypatch, tokenizer, lambda prompt: ids("no") if "</think>" in prompt else answer)
        conversation = Conversation(model)
        conversation.set_sampling(replace(conversation.sampling, max_new_tokens=60))
        assert budget_after(conversation, f"/think {len(thought) - 1}") == len(thought) - 1
        found = conversation.ask("Oslo?", lambda piece: None)
        assert found.text == "<think>the the\n</think>\n\nyes"
        assert found.reasoning_tokens == len(thought) - 1
        conversation.clear()
        assert budget_after(conversation, "/think off") == 0
        assert conversation.ask("Oslo?", lambda piece: None).text == "no"
        assert prompts[-1].endswith("<think>\n\n</think>\n\n")
        assert budget_after(conversation, "/think on") is None
        assert budget_after(conversation, "/set thinking-budget 7", "/think") == 7
        with pytest.raises(UserError, match="a number of tokens"):
            budget_after(conversation, "/think a-lot")


def test_a_model_without_tags_takes_no_budget(tiny_store):
    """It is refused by name, and the sampling stays."""
    with chatml_model(tiny_store, PLAIN) as model:
        vocabulary = {word: n for word, n in model.tokenizer.get_added_vocab().items() if "think" not in word}
        model.tokenizer.get_added_vocab = lambda: vocabulary
        conversation = Conversation(model)
        with pytest.raises(UserError, match="a model with tags of reasoning"):
            budget_after(conversation, "/think 5")
        assert conversation.sampling.thinking_budget is None


def test_an_option_for_a_model_without_tags_is_refused_before_it_is_loaded(tiny_store):
    """The option is compared with the tokenizer alone."""
    options = SamplingOptions(thinking_budget=5)
    assert chosen_sampling(tiny_store, chatml_tokenizer(), options).thinking_budget == 5
    with pytest.raises(UserError, match="a model with tags of reasoning"):
        chosen_sampling(tiny_store, load_tokenizer(tiny_store), options)


def test_tags_of_another_spelling_are_shown_as_reasoning(tiny_store, monkeypatch):
    """As Gemma 4's: a terminal gets the tags that it knows, and later prompts the text alone."""
    with chatml_model(tiny_store, FAMILIES["gemma_4"].template) as model:
        prompts = script(monkeypatch, model.tokenizer, "<|channel>thought\nhm\n<channel|>Paris.")
        conversation, pieces = Conversation(model), list[str]()
        conversation.set_sampling(replace(conversation.sampling, max_new_tokens=60))
        found = conversation.ask("Oslo?", pieces.append)
        assert found.text == "".join(pieces) == "<think>\nhm\n</think>\n\nParis."
        conversation.ask("And?", pieces.append)
    assert "<channel|>Paris.<turn|>" in prompts[-1]
