"""Tokens that end an answer, and a model's own sampling, from all files that name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizer import a_tokenizer

from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.errors import ModelRefused
from edgemoe.models.ends import ends_of
from edgemoe.models.runnable import generation_config

TOKENIZER = a_tokenizer()
OWN = {0, 2}
"""<|endoftext|> and <|im_end|>, by their names; the latter is the tokenizer's end of sequence too."""


def directory_of(path: Path, config: dict[str, object], generation: dict[str, object] | None) -> Path:
    (path / "config.json").write_text(json.dumps({"vocab_size": 310} | config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("config", "generation", "more"),
    [
        ({}, None, set()),
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": [7, 8]}, None, {7, 8}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}),
        ({"eos_token_id": None}, {"eos_token_id": [9, 2]}, {9}),
        ({"eos_token_id": [True, -1, "x", 310]}, None, set()),
    ],
)
def test_all_files_name_ends(tmp_path, config, generation, more):
    """A number or a list each; ids that the model does not have count for nothing."""
    assert ends_of(directory_of(tmp_path, config, generation), TOKENIZER) == OWN | more


@pytest.mark.parametrize(
    ("names", "ends"), [(("<|end|>",), {300}), (("<|end|>", "<|return|>"), {301}), (("<|eot_id|>",), {300})]
)
def test_well_known_names_end_a_turn(tmp_path, names, ends):
    """`<|end|>` ends a message alone where `<|return|>` ends the turn."""
    tokenizer = a_tokenizer()
    tokenizer.add_tokens(list(names), special_tokens=True)
    assert ends_of(directory_of(tmp_path, {}, None), tokenizer) == OWN | ends


def own(path: Path, values: dict[str, object]) -> Sampling:
    config = generation_config(directory_of(path, {}, values))
    return Sampling.of_model(config, frozenset(), temperature=None, top_p=None, seed=0, max_new_tokens=1)


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"top_p": 0.0}, "top_p", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 20}, "top_k", 20),
        ({"min_p": 0.9}, "min_p", 0.9),
        ({}, "temperature", 1.0),
        ({"temperature": None}, "temperature", 1.0),
    ],
)
def test_zero_is_a_value(tmp_path, values, field, value):
    """A value of generation_config.json holds, 0 too; only an absent one has a default."""
    assert getattr(own(tmp_path, {"do_sample": True} | values), field) == value


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}])
def test_one_token_is_left(tmp_path, values):
    """One of two equal logits is always chosen."""
    import torch

    sampler = Sampler(own(tmp_path, {"do_sample": True} | values))
    assert {sampler.next([1], torch.tensor([0.0, 2.0, 2.0])) for _ in range(20)} == {1}


def test_without_sampling_its_values_do_not_hold(tmp_path):
    """As in transformers, which is greedy then."""
    assert own(tmp_path, {"temperature": 0.7, "top_p": 0.5, "min_p": 0.9}) == own(tmp_path, {})


@pytest.mark.parametrize("values", [{"top_k": -2}, {"min_p": 1.5}])
def test_values_out_of_range_are_refused(tmp_path, values):
    with pytest.raises(ModelRefused, match=next(iter(values))):
        own(tmp_path, {"do_sample": True} | values)
