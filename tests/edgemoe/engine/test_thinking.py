"""Budgets of reasoning: which tokens come, and how many of them are counted, with a tokenizer and scripted logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scripted import END, chatml_tokenizer
from servers import GREEDY

from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler
from edgemoe.engine.thinking import Thinking
from edgemoe.grammar.lark import Reasoning, formed_answer

TAGS = Reasoning("<think>", "</think>", closing="\n</think>\n\n")
TOKENIZER = chatml_tokenizer()
VOCAB = len(TOKENIZER)
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


def ids(text: str, tokenizer=TOKENIZER) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer_of(tags: Reasoning, budget: int | None, script: list[int], tokenizer=TOKENIZER, matcher=None):
    """The tokens of an answer whose logits follow a script, then want its end; and its Thinking.

    The script waits while tokens come that the model does not choose.
    """
    prompt = ids("Oslo?", tokenizer)
    thinking = Thinking(tokenizer, tags, prompt, budget)
    request = Request(list(prompt), Sampler(replace(GREEDY, max_new_tokens=99), matcher), thinking=thinking)
    left = list(script)
    for _ in range(80):
        logits = torch.zeros(len(tokenizer))
        logits[left[0] if left else END] = 9.0
        logits[ids(".", tokenizer)[0]] = 5.0  # chosen where the script's token may not come
        forced = thinking.forced()
        token = request.next_token(logits)
        left = left[1:] if forced is None else left
        if token == END:
            break
    return request.tokens[len(prompt) : -1], thinking


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_ends_after_its_budget(budget, inside):
    """Then come the tokens that the template closes it with, and the answer. A budget of 0 opens none."""
    reasoning, answer = ids("the sunny cloudy weather the city"), ids("It is.")
    assert len(reasoning) > 7
    opened = ids("" if inside else "<think>")
    script = [*opened, *reasoning[:budget], *answer]
    got, thinking = answer_of(replace(TAGS, begun=inside), budget, script)
    closing = ids("\n</think>\n\n")
    want = [*opened, *reasoning[:budget], *closing, *answer]
    if not inside and not budget:
        want = [*ids("."), *answer]  # the tag may not come
    assert (got, thinking.tokens) == (want, budget)


def test_reasoning_within_its_budget_is_left_alone():
    """Its tokens are counted without the tags, with a budget and without."""
    script = ids("<think>the sunny weather</think>\n\nIt is.")
    for budget in (None, 100, len(ids("the sunny weather")) + 1):
        got, thinking = answer_of(TAGS, budget, script)
        assert (got, thinking.tokens) == (script, len(ids("the sunny weather")))


def test_a_line_break_is_not_doubled():
    """Where reasoning ends with what the closing text begins with, the rest of it comes."""
    script = [*ids("<think>the"), *ids("\n"), *ids("yes")]
    got, _ = answer_of(TAGS, len(ids("the")) + 1, script)
    assert TOKENIZER.decode(got) == "<think>the\n</think>\n\nyes"


def test_all_parts_of_reasoning_have_one_budget():
    """A second part is counted with the first; once the budget is spent, no part is opened."""
    two = ids("<think>the the</think>yes<think>the")
    count = len(ids("the the")) + len(ids("the"))
    got, thinking = answer_of(TAGS, count, [*two, *ids("no<think>no")])
    assert thinking.tokens == count
    assert TOKENIZER.decode(got) == "<think>the the</think>yes<think>the\n</think>\n\nno.no"


def test_tags_of_several_tokens():
    """They are found in text, half a closing tag is completed, and the tag's own tokens are not counted."""
    tags = Reasoning("[think]", "[/think]")
    assert len(ids("[/think]")) > 3
    got, thinking = answer_of(tags, 5, [*ids("[think]"), *ids("the"), *ids("[/th")[: 5 - len(ids("the"))]])
    text = TOKENIZER.decode(got)
    assert text.startswith("[think]the[/think]")
    assert thinking.tokens == len(ids("the"))
    got, thinking = answer_of(tags, 0, ids("[think]the"))
    assert "[think]" not in TOKENIZER.decode(got)
    own = ids("[think]the[/think]yes")
    assert answer_of(tags, 50, own)[0] == own


def test_channels():
    """The analysis ends, and none is opened again; another channel may be."""
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CHANNELS})
    opening, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    tags = Reasoning(opening, "<|end|>", after="<|start|>assistant", lead=final)
    tags = replace(tags, closing="<|end|><|start|>assistant")
    script = [*ids(f"{opening}the", tokenizer), *ids(f"{final}yes", tokenizer)]
    count = len(ids("the", tokenizer))
    got, thinking = answer_of(tags, count, script, tokenizer)
    assert tokenizer.decode(got) == f"{opening}the<|end|><|start|>assistant{final}yes"
    assert thinking.tokens == count
    got, thinking = answer_of(tags, 0, ids(f"{opening}the", tokenizer), tokenizer)
    assert not tokenizer.decode(got).startswith("<|channel|>a")
    assert answer_of(tags, 0, ids(f"{final}yes", tokenizer), tokenizer)[0] == ids(f"{final}yes", tokenizer)


def test_half_a_character_is_no_obstacle():
    """A budget that ends within one: the tag comes, and the answer after it is whole."""
    snow = ids("雪")
    assert len(snow) == 3
    got, thinking = answer_of(TAGS, 2, [*ids("<think>"), *snow[:2], *ids("yes")])
    assert TOKENIZER.decode(got).endswith("\n</think>\n\nyes")
    assert thinking.tokens == 2


@pytest.mark.e2e
@pytest.mark.parametrize("inside", [False, True])
def test_a_grammar_goes_on_after_the_tag(inside):
    """The answer keeps to its schema, whatever the model wants."""
    pytest.importorskip("llguidance")
    from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary

    words = Vocabulary(TOKENIZER, VOCAB, frozenset({END}))
    schema = {"type": "object", "properties": {"city": {"type": "boolean"}}, "required": ["city"]}
    tags = replace(TAGS, begun=inside)
    matcher = Matcher(Grammar(words, formed_answer(words, schema | {"additionalProperties": False}, tags)))
    script = [*ids("" if inside else "<think>"), *ids("the"), *ids('{"city": true}')]
    got, thinking = answer_of(tags, len(ids("the")), script, matcher=matcher)
    _, _, answer = TOKENIZER.decode(got).partition("</think>")
    assert json.loads(answer) == {"city": True}
    assert thinking.tokens == len(ids("the"))
    words.process.close()
