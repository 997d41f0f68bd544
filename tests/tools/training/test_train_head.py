"""tools/training/train_head.py: transformers and edgemoe read the head that was trained, and the model stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from edgemoe.families.head import head_family
from edgemoe.families.table import family_of
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.config import bounded_config
from tools.training import head_checkpoint, train_head
from tools.training.batches import Batch, as_batch
from tools.training.head_model import DEPTH, TrainedHead, agreement, head_loss
from tools.training.model import Balance, Size, build
from tools.training.tasks import training_tasks
from tools.training.tokenizer import train_tokenizer
from tools.training.train_demo import save_checkpoint

TINY = Size(
    vocabulary=400, hidden=64, layers=2, experts=8, inner=32, top_k=2, heads=4, kv_heads=2, head_dim=16
)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 4, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Restores torch's number of threads, which the trainer changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as train_demo writes it, with random weights."""
    texts = [turn.question for task in islice(training_tasks(1), 300) for turn in task.turns]
    directory = tmp_path_factory.mktemp("source")
    tokenizer = train_tokenizer(texts, TINY.vocabulary, 2048)
    save_checkpoint(directory, tokenizer, build(TINY, seed=0, special=SPECIAL))
    return directory


def carried_model(source: Path, directory: Path) -> tuple[Any, TrainedHead]:
    """The model in the form that has a head, and a head that was changed at random as training does."""
    config = head_checkpoint.carried(json.loads((source / "config.json").read_text()))
    head_checkpoint.write_start(source, config, directory)
    model = train_head.load_model(directory)
    trained = TrainedHead(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, trained


def a_batch() -> Batch:
    tokens = torch.randint(5, TINY.vocabulary, (2, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return as_batch([[(row, [True] * 12)] for row in tokens], 12, apart=False)


def test_a_checkpoint_has_the_head_that_transformers_reads(source, tmp_path):
    """Guesses in a row of transformers' own head of the checkpoint are the ones of the head that was trained."""
    model, trained = carried_model(source, tmp_path / "model")
    family = head_checkpoint.head_of(json.loads((tmp_path / "model/config.json").read_text()), tmp_path)
    head_checkpoint.save_head(tmp_path / "model", family, trained)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16().float())
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = MtpModel.from_pretrained(whole).float()
    batch = a_batch()
    states = model.model(batch.tokens).last_hidden_state
    for depth, results in enumerate(trained.results(batch, states), 1):
        tokens, cache = batch.tokens[:, depth:-1], MtpCache(config=theirs.config)
        at = torch.arange(depth, 11)[None]
        states = theirs.forward_layer(0, states[:, : tokens.shape[1]], at, cache, input_ids=tokens)
        torch.testing.assert_close(results, states, rtol=1e-3, atol=1e-4)
    assert depth == DEPTH
    convert_checkpoint(tmp_path / "model", tmp_path / "store", max_level=8, layout="auto", dense_bits=8)
    head = StoreModel.open(tmp_path / "store").head
    assert head is not None
    assert head.family.layer == TINY.layers


def test_a_loss_changes_the_head_alone(source, tmp_path):
    """Every weight of the head has a gradient, and none of the model's; uncounted tokens do not matter."""
    model, trained = carried_model(source, tmp_path / "model")
    batch = a_batch()
    balance = Balance(trained)
    trained.train()
    loss = head_loss(trained, batch)
    assert all(gradient.abs().max() > 0 for gradient in torch.autograd.grad(loss, list(trained.parameters())))
    assert balance.take()[1].sum().item() == TINY.top_k * 2 * (10 + 9)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    few = Batch(batch.tokens, batch.positions, batch.counted.clone())
    few.counted[:, 3:] = False
    first = next(trained.results(few, trained.states(few)))[:, 0]
    logits = torch.nn.functional.log_softmax(trained.logits(first), dim=-1)
    expected = -logits.gather(1, few.tokens[:, 2:3]).sum() / DEPTH
    torch.testing.assert_close(head_loss(trained, few), expected)


def test_agreement_counts_guesses(source, tmp_path, monkeypatch):
    """A head whose results are the model's states a token later guesses what the model does, and nothing else."""
    model, trained = carried_model(source, tmp_path / "model")
    batch = a_batch()
    states = trained.states(batch)
    likeliest = model.lm_head(states).argmax(-1)
    batch.tokens[0, 2:] = likeliest[0, 1:-1]
    monkeypatch.setattr(trained, "states", lambda _: states)
    monkeypatch.setattr(trained, "results", lambda *_: iter((states[:, 1:-1], states[:, 3:] * 0)))
    found = agreement(trained, [batch])
    assert found["model_1"] == 1
    assert found["text_1"] >= 0.5
    assert found["model_2"] < 0.5


def test_names_of_every_form_come_back():
    """Tensors of a DeepSeek-V3 have a number of one more layer; names of a checkpoint and of modules change into one
    another.
    """
    small = Size(vocabulary=400, hidden=64, layers=2, experts=8, inner=32, top_k=2, heads=4, head_dim=16)
    config = build(small, seed=0, special=SPECIAL, family="deepseek_v2").config.to_dict()
    config |= {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    bounded = bounded_config(config | {"num_key_value_heads": 4, "rope_interleave": True})
    family = head_family(family_of(bounded), bounded)
    assert family
    names = {
        "enorm.weight": "model.layers.2.enorm.weight",
        "model.norm.weight": "model.layers.2.shared_head.norm.weight",
        "model.layers.0.self_attn.o_proj.weight": "model.layers.2.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate.weight": "model.layers.2.mlp.gate.weight",
    }
    for own, published in names.items():
        assert family.in_checkpoint(own) == published
        assert family.in_modules(published) == own


def test_a_run_trains_resumes_and_keeps_the_model(source, tmp_path, monkeypatch, capsys):
    """Two steps and two more: the model's tensors are as before, the log has guesses; other starts are refused."""
    books = tmp_path / "books"
    (books / "library").mkdir(parents=True)
    for i in range(3):
        lines = [f"Nothing happened on day {i}{j}. The rain fell all day. We stayed." for j in range(400)]
        (books / f"{i}.txt").write_text("\n".join(lines))
        functions = [f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(400)]
        (books / "library" / f"m{i}.py").write_text("\n".join(functions))
    monkeypatch.setattr(
        "tools.training.corpus.sysconfig.get_paths", lambda: {"stdlib": str(books / "library")}
    )
    small = ["--chat-tokens", "256", "--text-tokens", "512", "--dtype", "float32"]
    given = ["--corpus", str(books), "--out", str(tmp_path / "out"), *small]
    assert train_head.main([*given, "--model", str(source), "--resume"]) == 2
    assert "leave out --resume" in capsys.readouterr().err
    assert train_head.main([*given, "--model", str(source), "--steps", "1"]) == 0
    before = load_file(tmp_path / "out/model/model.safetensors")
    assert train_head.main([*given, "--steps", "2", "--resume"]) == 0
    after, own = load_file(tmp_path / "out/model/model.safetensors"), load_file(source / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], own[name]) for name in own)
    head = {name for name in after if name.startswith("mtp.")}
    assert after.keys() == own.keys() | head
    assert not any(torch.equal(after[name], before[name]) for name in head if "proj" in name)
    lines = [json.loads(line) for line in (tmp_path / "out/run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert set(lines[-1]["held_out"]["prose"]) == {"model_1", "text_1", "model_2", "text_2"}
    assert train_head.main([*given, "--model", str(source)]) == 2
    assert "give --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"), [({"use_sliding_window": True}, "without windows"), ({}, "mixtral")]
)
def test_a_model_without_a_form_of_heads_is_refused(source, tmp_path, capsys, change, message):
    """Nothing is written where edgemoe would read no head."""
    config = json.loads((source / "config.json").read_text()) | change
    if not change:
        config |= {"model_type": "mixtral", "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--corpus", str(tmp_path), "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    assert train_head.main(given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
