"""Embedding and head of 6 bits: their bytes, logits, and codes with error feedback; refusals."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared_fixtures import a_tokenizer
from transformers import AutoModelForCausalLM

from edgemoe.calibrate.windows import spread_windows
from edgemoe.commands.dense_bits import head_bits_of
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import ModelRefused, UserError
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.recode import dense
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.run import recode
from edgemoe.storage.export.dense import DenseTensors
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import DENSE_NAME
from edgemoe.storage.store.verify import verify

pytestmark = pytest.mark.e2e

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request, tiny_model, tmp_path_factory) -> Path:
    """The tiny model with a vocabulary of whole blocks, and one table for both or two. Read-only."""
    directory = tmp_path_factory.mktemp("head") / "model"
    model = copy.deepcopy(tiny_model)
    model.resize_token_embeddings(320)
    if request.param:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(directory)
    a_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def store(source, tmp_path_factory) -> Path:
    """Its store. Read-only."""
    directory = tmp_path_factory.mktemp("head") / "store"
    convert_checkpoint(source, directory, max_level=8, layout="auto", dense_bits=8, head_bits=6)
    return directory


def logits_of(store: Path, tokens: list[int]) -> torch.Tensor:
    """Logits after a prompt, and after each of three more tokens, float32 [4, vocab]."""
    opened, settings = StoreModel.open(store), RunSettings.uniform(8)
    plan = opened.plan(vram_limit=None, settings=settings, context=64)
    with Engine(opened, plan, settings) as engine:
        sequence = engine.sequences.new()
        prompt = engine.all_logits(sequence, tokens[:-3], decode=False)[-1:]
        return torch.cat(
            [prompt, *(engine.all_logits(sequence, [each], decode=True) for each in tokens[-3:])]
        )


def test_logits_are_those_of_the_decoded_tables(source, store):
    """transformers with the tables' weights of 6 bits gives the logits, in a prompt and token by token."""
    assert not verify(store, lambda done, total: None).damage
    assert describe(store)["head_bits"] == 6
    tensors, tokens = load_file(store / DENSE_NAME), [5, 17, 40, 201, 8, 299, 31, 64]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    exported = DenseTensors(store / DENSE_NAME, lambda name: name, own_head=True)
    assert (exported.bits(EMBEDDING), exported.shape(HEAD)) == (6, (320, 64))
    with torch.no_grad():
        for name, table in ((EMBEDDING, model.model.embed_tokens), (HEAD, model.lm_head)):
            if name in tensors:
                assert tensors[name].nbytes == 320 * 64 * 6.5 / 8
                table.weight.copy_(dense_groups.decoded(tensors[name]))
        expected = model(torch.tensor([tokens])).logits[0, -4:]
    found = logits_of(store, tokens)
    assert (found - expected).norm() / expected.norm() < 0.03


def test_error_feedback_makes_the_heads_products_better(source, store, foxes_text, tmp_path, monkeypatch):
    """The head's products with states of other tokens lose less, coded in parts of rows; an own embedding stays."""
    made = shutil.copytree(store, tmp_path / "store")
    monkeypatch.setattr(dense, "PIECE", 96 * 64)
    manifest = recode(StoreModel.open(made), source, RecodeRequest(foxes_text, 1024, "low"))
    assert describe(made)["dense_codes"] == str(manifest.codes)
    before, after = load_file(store / DENSE_NAME), load_file(made / manifest.dense_name)
    name = HEAD if HEAD in before else EMBEDDING
    weight = load_file(source / "model.safetensors")[name].double()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor([spread_windows(load_tokenizer(store), foxes_text, 1536, 512)[1]])
    with torch.no_grad():
        states = model.model(ids).last_hidden_state[0].double()
    lost = [
        float((states @ (dense_groups.decoded(each[name]) - weight).t()).norm()) for each in (before, after)
    ]
    assert lost[1] < 0.9 * lost[0]
    if HEAD in before:
        assert torch.equal(before[EMBEDDING], after[EMBEDDING])


def test_a_head_of_six_bits_is_refused_where_it_cannot_be(checkpoint, tmp_path):
    """A vocabulary of 300 rows has no whole blocks, which is said before anything is written."""
    with pytest.raises(ModelRefused, match=r"multiples of 32 .* \[300, 64\] in lm_head\.weight"):
        convert_checkpoint(checkpoint, tmp_path / "s", max_level=8, layout="auto", dense_bits=8, head_bits=6)
    assert not (tmp_path / "s").exists()
    for given, bits, auto in ((6, 16, False), (6, 8, True), (5, 8, False)):
        with pytest.raises(UserError, match="head-bits"):
            head_bits_of(given, tmp_path, bits, auto=auto)
    assert head_bits_of(None, tmp_path, 16, auto=False) == 8
