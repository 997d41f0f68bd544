"""Prompts of a benchmark: the given number of tokens, the same every time, from the source that the report names."""

from __future__ import annotations

from itertools import pairwise

import pytest
from resealed_store import without_tokenizer

from edgemoe.bench.prompts import CONVERSATIONS, RANDOM, make_prompts
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.models.tokenizer import load_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog while another one thinks about it. " * 4


@pytest.fixture
def store(tiny_store) -> StoreModel:
    return StoreModel.open(tiny_store)


def test_a_file_is_cut_into_consecutive_parts(store, tmp_path):
    """The prompts' texts, one after another, are the beginning of the file."""
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    (prompts,) = make_prompts(store, "text", path, 9, 3, 0)
    ids = [prompt() for prompt in prompts.prompts]
    assert prompts.source == "prompt.txt"
    assert [len(piece) for piece in ids] == [9] * 3
    assert TEXT.startswith(load_tokenizer(store.directory).decode([*ids[0], *ids[1], *ids[2]]))


@pytest.mark.parametrize("content", [None, b"too short", b"\xff\xfe\xff"])
def test_an_unusable_prompt_file(store, tmp_path, content):
    """Missing, too short or not UTF-8: a user error that names the file."""
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"prompt\.txt"):
        make_prompts(store, "text", path, 100, 2, 0)


def test_conversations_end_where_an_answer_begins(store):
    """Without a file, prompts are turns in the chat template, all of one length, different in every run."""
    (prompts,) = make_prompts(store, "text", None, 200, 3, 0)
    tokenizer = load_tokenizer(store.directory)
    ids = [prompt() for prompt in prompts.prompts]
    assert prompts.source == CONVERSATIONS
    assert [len(piece) for piece in ids] == [200] * 3
    for piece in ids:
        text = tokenizer.decode(piece)
        assert text.endswith("<|im_start|>assistant\n")
        assert "<|im_start|>user\n" in text
    assert all(before != after for before, after in pairwise(ids))


def test_the_same_seed_gives_the_same_prompts(store):
    """Prompts made and encoded twice are equal; another seed gives others."""

    def made(seed: int):
        return [[p() for p in prompts.prompts] for prompts in make_prompts(store, "both", None, 30, 2, seed)]

    assert made(1) == made(1)
    assert all(one != other for one, other in zip(made(1), made(2), strict=True))


def test_random_tokens_are_labelled(store):
    """random: they are the only set; both: the second one. All are tokens of the model."""
    (alone,) = make_prompts(store, "random", None, 50, 2, 0)
    text, second = make_prompts(store, "both", None, 50, 2, 0)
    assert (alone.source, text.source, second.source) == (RANDOM, CONVERSATIONS, RANDOM)
    ids = alone.prompts[0]()
    assert len(ids) == 50
    assert len(set(ids)) > 25
    assert all(0 <= token < store.shape.vocab for token in ids)


def test_without_a_tokenizer_tokens_are_random(damageable, tmp_path):
    """A store without a tokenizer falls back to random tokens; with a prompt file that is an error."""
    without_tokenizer(damageable)
    store = StoreModel.open(damageable)
    (prompts,) = make_prompts(store, "text", None, 5, 1, 0)
    assert prompts.source == RANDOM
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    with pytest.raises(UserError, match="tokenizer"):
        make_prompts(store, "text", path, 5, 1, 0)


def test_contradictory_or_unknown_choices(store, tmp_path):
    """Random tokens with a file, and an unknown choice, are user errors."""
    with pytest.raises(UserError, match="--prompt-file"):
        make_prompts(store, "random", tmp_path / "prompt.txt", 5, 1, 0)
    with pytest.raises(UserError, match="both"):
        make_prompts(store, "poems", None, 5, 1, 0)
