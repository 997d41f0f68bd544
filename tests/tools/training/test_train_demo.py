"""tools/training/train_demo.py: the model equals transformers', and a killed run resumes."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgemoe.errors import UserError
from edgemoe.evaluate.tasks import Turn, held_out_tasks
from edgemoe.storage.files.header import read_header
from tools.training import description, train_demo
from tools.training.batches import CHAT_WINDOW, TEXT_WINDOW, Batch, Chats, Mixture, as_batch, pack, windows
from tools.training.corpus import encode, read_books, read_stdlib
from tools.training.loop import PAUSE_S, Recipe, Run, total_loss
from tools.training.model import Balance, Size, build
from tools.training.report import accuracy, answers
from tools.training.tasks import training_tasks
from tools.training.tokenizer import train_tokenizer

TINY = Size(
    vocabulary=400, hidden=32, layers=2, experts=8, inner=16, top_k=2, heads=2, kv_heads=1, head_dim=16
)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 4, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Restores torch's number of threads, which the trainer changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = [
        text
        for task in islice(training_tasks(1), 300)
        for turn in task.turns
        for text in turn.__dict__.values()
    ]
    return train_tokenizer(
        [*texts, "def f(x):\n    if x:\n        return 1\n\n\n# end"], TINY.vocabulary, 2048
    )


@pytest.fixture
def model() -> Any:
    return build(TINY, seed=0, special=SPECIAL)


@pytest.fixture
def mixture(tokenizer: Any) -> Mixture:
    text = np.random.default_rng(0).integers(5, TINY.vocabulary, 4000).astype(np.uint16)
    paragraph = "It was late. The lamp was low. All was quiet. The door stood open."
    return Mixture(
        tokenizer, prose=text, python=text, paragraphs=[paragraph], seed=7, chat_tokens=512, text_tokens=512
    )


def run_in(directory: Path, model: Any, mixture: Mixture, seconds: float = 1e6, **options: Any) -> Run:
    recipe = Recipe(seconds=seconds, warmup=2, checkpoint_s=options.pop("checkpoint_s", 1e6), report_s=1e6)
    return Run(model, mixture, recipe, directory, report=lambda _: {}, save=lambda _: None, **options)


def test_experts_equal_transformers(model: Any) -> None:
    """Outputs and every gradient equal transformers' loop over experts, in float64."""
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                # With the initial 0.02 the experts' part would vanish in the tolerance.
                parameter.mul_(10)
    tokens = torch.randint(5, 400, (3, 20), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("edgemoe-training", "eager"):
        model.set_experts_implementation(name)
        logits = model(tokens).logits
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        found[name] = [logits, *gradients]
    for ours, theirs in zip(*found.values(), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_olmoe_keeps_the_routers_probabilities() -> None:
    """The second family's gate weights are the softmax's own, below 1 in sum; it has the demo's size and trains."""
    model = build(TINY, seed=0, special=SPECIAL, family="olmoe")
    assert (model.config.model_type, model.config.norm_topk_prob) == ("olmoe", False)
    _, gates, _ = model.model.layers[0].mlp.gate(
        torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    )
    assert (gates.sum(-1) < 0.6).all()
    loss = model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, list(model.model.layers[1].parameters())))
    balance = Balance(model)
    model.train()
    model(torch.arange(10)[None])
    assert balance.take()[1].sum().item() == 2 * 10 * 2


def test_granitemoe_trains_and_its_checkpoint_fuses_experts(tmp_path: Path) -> None:
    """Its routers are counted, every matrix has a gradient, and the written checkpoint has two tensors per layer."""
    model = build(TINY, seed=0, special=SPECIAL, family="granitemoe")
    balance = Balance(model)
    model.train()
    tokens = torch.arange(10)[None]
    loss = model(tokens, labels=tokens).loss
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, list(model.model.layers[1].parameters())))
    evenness, counts = balance.take()
    assert counts.sum(1).tolist() == [10 * 2] * 2
    assert evenness.item() == pytest.approx(1.0, abs=0.1)
    model.save_pretrained(tmp_path)
    tensors = read_header(tmp_path / "model.safetensors").tensors
    names = [f"model.layers.1.block_sparse_moe.{name}_linear.weight" for name in ("input", "output")]
    found = {name for name in tensors if "layers.1.block_sparse_moe" in name and "router" not in name}
    assert found == set(names)
    assert [tensors[name].shape[0] for name in names] == [TINY.experts] * 2


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v2"])
def test_models_with_other_attention_train(family: str) -> None:
    """Gated delta nets and latent attention: every parameter has a gradient, and each router's choices are counted."""
    model = build(replace(TINY, layers=4), seed=0, special=SPECIAL, family=family)
    layers = {"qwen3_5_moe_text": 4, "deepseek_v2": 3}[family]
    balance = Balance(model)
    model.train()
    tokens = torch.arange(10)[None]
    loss = model(tokens, labels=tokens).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    assert balance.take()[1].sum(1).tolist() == [10 * 2] * layers


def test_experts_without_tokens_get_no_gradient(model: Any) -> None:
    """With one token most experts are idle: their gradients are zero, the chosen experts' are not."""
    experts = model.model.layers[0].mlp.experts
    index, weights = torch.tensor([[5, 2]]), torch.tensor([[0.6, 0.4]])
    out = experts(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)), index, weights)
    out.sum().backward()
    used = {e for e in range(8) if experts.down_proj.grad[e].abs().sum() > 0}
    assert used == {2, 5}


def test_bfloat16_products_are_close(model: Any, mixture: Mixture) -> None:
    """Under autocast the loss differs by bf16's rounding, and gradients stay float32."""
    batch = mixture.batches(0)[0]
    exact = total_loss(model, batch) / batch.targets()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = total_loss(model, batch) / batch.targets()
    gradients = torch.autograd.grad(rounded, list(model.parameters()))
    assert rounded.item() == pytest.approx(exact.item(), rel=5e-3)
    assert rounded.item() != exact.item()
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_balance_loss_is_one_when_even(model: Any) -> None:
    """E · sum f·p is 1 for equal probabilities, and E where f and p are concentrated on one expert."""
    balance = Balance(model, decay=0.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    tokens = torch.randint(5, 400, (2, 16))
    model.train()
    model.model(tokens)
    even, counts = balance.take()
    assert even.item() == pytest.approx(1.0)
    assert counts.shape == (2, 8)
    assert counts.sum(1).tolist() == [2 * 16 * 2] * 2
    # The whole load on expert 3, and only the first router certain of it.
    balance.update(torch.eye(8, dtype=torch.int64)[3].expand(2, 8))
    gates = [layer.mlp.gate for layer in model.model.layers]
    with torch.no_grad():
        gates[0].weight[3] = 1e4
    for gate in gates:
        gate(torch.ones(4, 32))
    skewed, _ = balance.take()
    assert skewed.item() == pytest.approx((8.0 + 1.0) / 2)


def test_chats_equal_the_template(tokenizer: Any) -> None:
    """A conversation's tokens equal the chat template's, and exactly answers and their end tokens count."""
    turns = (Turn("What is 2 + 3?", "2 + 3 = 5"), Turn("Spell cat.", "c-a-t"))
    tokens, counted = Chats(tokenizer).encode(turns)
    messages = []
    for turn in turns:
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokens == tokenizer.apply_chat_template(messages)["input_ids"]
    scored = tokenizer.decode([t for t, c in zip(tokens, counted, strict=True) if c])
    assert scored == "2 + 3 = 5<|end|>c-a-t<|end|>"


def test_tokenizer_separates_digits_and_round_trips(tokenizer: Any) -> None:
    """Every digit is one token, and decoding returns the text."""
    text = "1234 + 98,\n\n    return x10  # ünïcode 日本 \t end"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text
    pieces = [tokenizer.decode([token]) for token in tokens]
    assert all(len(piece.strip()) == 1 for piece in pieces if any(c.isdigit() for c in piece))
    assert all(len(p) == 1 for p in pieces if p.strip().isdigit())


@pytest.mark.e2e
def test_conversations_in_a_row_are_independent(model: Any, tokenizer: Any) -> None:
    """A conversation's loss is the same alone and packed with others."""
    chats = [
        Chats(tokenizer).encode(t.turns) for kind in ("spelling", "python") for t in held_out_tasks(kind, 2)
    ]
    together = as_batch([chats], 2 * CHAT_WINDOW, apart=True)
    alone = [as_batch([[chat]], 2 * CHAT_WINDOW, apart=True) for chat in chats]
    expected = sum(total_loss(model, batch).item() for batch in alone)
    assert total_loss(model, together).item() == pytest.approx(expected, rel=1e-5)
    assert together.targets() == sum(batch.targets() for batch in alone)


def test_packing_keeps_conversations_whole(tokenizer: Any) -> None:
    """Rows contain whole conversations within their window, and few free tokens remain."""
    chats = Chats(tokenizer)
    conversations = [chats.encode(task.turns) for task in islice(training_tasks(5), 400)]
    rows = pack(iter(conversations), 6, CHAT_WINDOW)
    lengths = [sum(len(tokens) for tokens, _ in row) for row in rows]
    assert max(lengths) <= CHAT_WINDOW
    assert sum(lengths) > 0.85 * 6 * CHAT_WINDOW
    whole = [tokens for tokens, _ in conversations]
    assert all(tokens in whole for row in rows for tokens, _ in row if len(tokens) < CHAT_WINDOW)


def test_batches_depend_on_seed_and_step_only(mixture: Mixture) -> None:
    """A step's batches do not depend on earlier draws, differ between steps, and have the given sizes."""
    first = mixture.batches(3)
    mixture.batches(4)
    for a, b in zip(first, mixture.batches(3), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.counted, b.counted)
    assert not torch.equal(first[0].tokens, mixture.batches(4)[0].tokens)
    assert [tuple(batch.tokens.shape) for batch in first] == [
        (512 // CHAT_WINDOW, CHAT_WINDOW),
        (1, TEXT_WINDOW),
    ]


@pytest.mark.e2e
@pytest.mark.folders
def test_threads_split_a_step(mixture: Mixture, tmp_path: Path) -> None:
    """Two threads, and more threads than rows, take the same step as one, up to rounding."""
    trained = []
    for threads in (1, 2, 3):
        model = build(TINY, seed=0, special=SPECIAL)
        run_in(tmp_path / str(threads), model, mixture, threads=threads).train(last_step=2)
        trained.append(model.state_dict())
    for several in trained[1:]:
        for name, value in trained[0].items():
            torch.testing.assert_close(several[name], value, rtol=0, atol=5e-4)
    start = build(TINY, seed=0, special=SPECIAL).state_dict()
    assert any((start[name] - value).abs().max() > 1e-3 for name, value in trained[0].items())


@pytest.mark.e2e
@pytest.mark.folders
def test_killed_run_resumes_to_the_same_weights(mixture: Mixture, tmp_path: Path) -> None:
    """A run killed after its checkpoint and resumed has the weights and the log of an uninterrupted run."""
    whole = build(TINY, seed=0, special=SPECIAL)
    run_in(tmp_path / "whole", whole, mixture).train(last_step=5)

    killed = run_in(tmp_path / "torn", build(TINY, seed=0, special=SPECIAL), mixture)
    killed.train(last_step=3)
    killed.mixture = _InterruptedAt(mixture, 4)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        killed.train(last_step=5)
    with killed.log_file.open("a") as file:
        file.write('{"step": 4}\n')

    again = build(TINY, seed=99, special=SPECIAL)
    resumed = run_in(tmp_path / "torn", again, mixture)
    assert resumed.resume()
    assert resumed.progress.step == 3
    resumed.train(last_step=5)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert [line["step"] for line in resumed.log()] == [3, 5]


class _InterruptedAt:
    """A mixture that raises KeyboardInterrupt at a step."""

    def __init__(self, mixture: Mixture, step: int) -> None:
        self._mixture, self._step = mixture, step

    def batches(self, step: int) -> list[Batch]:
        if step == self._step:
            raise KeyboardInterrupt
        return self._mixture.batches(step)


def test_stopped_time_does_not_count(model: Any, mixture: Mixture, tmp_path: Path) -> None:
    """A step of an hour counts PAUSE_S; the run lasts its seconds of running time."""
    ticks = iter([0.0, 1.0, 1.0, 3601.0, *(float(t) for t in range(3601, 3700))])
    run = run_in(tmp_path, model, mixture, seconds=1.0 + PAUSE_S + 1.5, clock=lambda: next(ticks))
    run.train()
    # One second; an hour, counted as PAUSE_S; and two steps of a second each, the second of which ends the run.
    assert run.progress.elapsed == pytest.approx(1.0 + PAUSE_S + 2.0)
    assert run.progress.step == 4


def test_rate_warms_up_and_falls() -> None:
    """The rate rises by steps to its peak, is half of it at half time, and ends at its floor."""
    recipe = Recipe(seconds=100.0, rate=1.0, warmup=10, floor=0.0)
    assert recipe.rate_at(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate_at(9, 0.0) == pytest.approx(1.0)
    assert recipe.rate_at(500, 50.0) == pytest.approx(0.5)
    assert recipe.rate_at(500, 250.0) == pytest.approx(0.0)


def test_corpus_is_split_by_whole_files(tmp_path: Path) -> None:
    """A directory and a tar of the same books give the same split, and no file is on both sides."""
    books = tmp_path / "books"
    (books / "deep").mkdir(parents=True)
    for i in range(30):
        (books / "deep" / f"{i}.txt").write_text(f"book {i}\n")
    (books / "notes.md").write_text("no book")
    with tarfile.open(tmp_path / "books.tar.xz", "w:xz") as archive:
        archive.add(books, "anything")
    domain = read_books(books)
    assert read_books(tmp_path / "books.tar.xz") == domain
    assert len(domain.held_out) == 1
    assert {*domain.training, *domain.held_out} == {f"book {i}\n" for i in range(30)}
    assert len(domain.training) == 29


@pytest.mark.parametrize("name", ["missing", "empty", "file.bin"])
def test_corpus_without_books_is_refused(tmp_path: Path, name: str) -> None:
    """A missing directory, an empty one and a file that is no tar raise UserError."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="two or more"):
        read_books(tmp_path / name)


@pytest.mark.e2e
@pytest.mark.folders
def test_standard_library_is_read_without_its_tests() -> None:
    """Known modules are read, test packages and installed packages are not."""
    texts = [*(domain := read_stdlib()).training, *domain.held_out]
    assert any("class OrderedDict(dict)" in text for text in texts)
    assert not any("class AbstractMemoryTests" in text for text in texts)
    assert not set(domain.training) & set(domain.held_out) - {""}


def test_texts_are_encoded_in_a_row(tokenizer: Any) -> None:
    """Each text starts with the end-of-text token and decodes to itself."""
    tokens = encode(tokenizer, ("one 1", "two 22"))
    starts = np.flatnonzero(tokens == tokenizer.bos_token_id).tolist()
    assert tokens.dtype == np.uint16
    assert len(starts) == 2
    assert tokenizer.decode(tokens[1 : starts[1]]) == "one 1"
    assert tokenizer.decode(tokens[starts[1] + 1 :]) == "two 22"


def test_held_out_windows_cover_a_text_evenly() -> None:
    """The windows have the requested number, do not overlap in a long text, and end within it."""
    tokens = np.arange(10_000, dtype=np.uint16)
    starts = [int(row[0]) for batch in windows(tokens, 6, 512) for row in batch.tokens]
    assert len(starts) == 6
    assert starts[0] == 0
    assert 10_000 - 512 - 6 <= starts[-1] <= 10_000 - 512
    assert all(b - a >= 512 for a, b in pairwise(starts))


class _ModelDouble:
    """A model with given answers; `prompts` records its prompts."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.device, self._tokenizer, self._texts = torch.device("cpu"), tokenizer, texts
        self.prompts: list[str] = []

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        self.prompts += self._tokenizer.batch_decode(input_ids)
        new = [[*self._tokenizer(text)["input_ids"], 4][:max_new_tokens] for text in self._texts]
        width = max(map(len, new))
        filled = torch.tensor([row + [0] * (width - len(row)) for row in new])
        return torch.cat([input_ids, filled], 1)


def test_accuracy_counts_exact_answers(tokenizer: Any) -> None:
    """Three right answers of four are 75 %, and prompts end where the last answer starts."""
    tasks = held_out_tasks("conversation", 4)
    texts = [task.turns[-1].answer for task in tasks[:3]] + ["no idea"]
    double = _ModelDouble(tokenizer, texts)
    assert accuracy(double, tokenizer, 4, kinds=["conversation"]) == {"conversation": 0.75}
    for task, prompt in zip(tasks, double.prompts, strict=True):
        assert prompt.endswith(f"<|user|>{task.turns[-1].question}<|end|><|assistant|>")
        assert task.turns[0].answer in prompt
    assert answers(_ModelDouble(tokenizer, texts), tokenizer, tasks)[:3] == texts[:3]


def test_shipped_size_is_below_40_mb() -> None:
    """The default size has 6 layers, 32 experts, top-4, and less than 40 MB in bf16."""
    size = Size()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(size, seed=0, special=SPECIAL).parameters())
    assert 2 * parameters < 39.5e6
    assert (size.layers, size.experts, size.top_k) == (6, 32, 4)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the tool: four steps of a tiny model, with a small library instead of Python's."""
    root = tmp_path_factory.mktemp("demo")
    (root / "books").mkdir()
    (root / "library").mkdir()
    for i in range(3):
        sentences = [
            f"Nothing happened on day {i}{j}. The rain fell all day. We stayed inside." for j in range(300)
        ]
        (root / "books" / f"{i}.txt").write_text(
            "\n".join(" ".join(sentences[j : j + 3]) for j in range(300))
        )
        functions = [f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(300)]
        (root / "library" / f"m{i}.py").write_text("\n".join(functions))
    patch = pytest.MonkeyPatch()
    patch.setattr("tools.training.corpus.sysconfig.get_paths", lambda: {"stdlib": str(root / "library")})
    patch.setattr("tools.training.data.TOKENIZER_TASKS", 2000)
    assert train(root, "--steps", "2") == 0
    assert train(root, "--steps", "4", "--resume") == 0
    yield root
    patch.undo()


def train(root: Path, *options: str) -> int:
    small = ["--chat-tokens", "256", "--text-tokens", "512", "--count", "1"]
    where = ["--corpus", str(root / "books"), "--out", str(root / "out")]
    return train_demo.main([*where, *small, *options], TINY)


@pytest.mark.e2e
@pytest.mark.folders
def test_transformers_loads_the_checkpoint(demo: Path) -> None:
    """The written model is bf16, one tensor an expert's matrix, and computes the trained weights' logits."""
    shipped = AutoModelForCausalLM.from_pretrained(demo / "out" / "model")
    assert shipped.dtype == torch.bfloat16
    assert shipped.config.model_type == "qwen3_moe"
    assert shipped.config.norm_topk_prob is True
    tokenizer = AutoTokenizer.from_pretrained(demo / "out" / "model")
    assert shipped.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")

    trained = build(TINY, seed=1, special=SPECIAL)
    state = torch.load(demo / "out" / "run" / "state.pt", weights_only=True)["model"]
    trained.load_state_dict({name: value.bfloat16().float() for name, value in state.items()})
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1 + 1?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            shipped.float()(prompt).logits, trained(prompt).logits, rtol=1e-4, atol=1e-5
        )


@pytest.mark.e2e
@pytest.mark.folders
def test_run_is_documented(demo: Path) -> None:
    """The log has every domain's losses, run.json the commands and the seed, and the curve is a PNG."""
    run = demo / "out" / "run"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[-1]["tokens"] == 4 * (256 + 512)
    for loss in (*lines[-1]["held_out"]["loss"].values(), lines[-1]["training"]["chat"]):
        assert loss == pytest.approx(math.log(400), rel=0.1)
    assert set(lines[-1]["held_out"]["loss"]) == {"prose", "python", "tasks"}
    described = json.loads((run / "run.json").read_text())
    assert described["seed"] == 0
    assert described["files"]["prose"] == {"training": 2, "held_out": 1}
    first, second = described["commands"]
    assert first.startswith("python -m tools.training.train_demo --corpus BOOKS --out DIR")
    assert second == first.replace("--steps 2", "--steps 4 --resume")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.folders
def test_run_is_not_overwritten_and_needs_one_to_resume(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting where a run exists and resuming where none exists exit 2 with the option to change."""
    assert train(demo) == 2
    assert "--resume" in capsys.readouterr().err
    assert train_demo.main(["--corpus", str(demo / "books"), "--out", str(tmp_path), "--resume"], TINY) == 2
    assert "leave out --resume" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change", [("--seed", "1"), ("--chat-tokens", "128"), ("--text-tokens", "1024"), ("--corpus", "more")]
)
@pytest.mark.folders
def test_run_resumes_with_its_own_data(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    """An option that would change the data of later steps is refused, and run.json stays."""
    option, value = change
    if option == "--corpus":
        shutil.copytree(demo / "books", tmp_path / "books")
        (tmp_path / "books" / "3.txt").write_text("One more.")
        value = str(tmp_path / "books")
    described = (demo / "out" / "run" / "run.json").read_text()
    assert train(demo, "--resume", "--steps", "4", option, value) == 2
    assert option in capsys.readouterr().err
    assert (demo / "out" / "run" / "run.json").read_text() == described


@pytest.fixture
def trained(demo: Path, tmp_path: Path) -> Path:
    """The model of a finished run, with the figures that the model card writes next to it."""
    model = tmp_path / "model"
    shutil.copytree(demo / "out" / "model", model)
    run = json.loads((demo / "out" / "run" / "run.json").read_text())
    last = {"step": 4, "tokens": 3072, "elapsed_s": 8.5}
    (model / "figures.json").write_text(json.dumps({"run": run, "last": last}))
    return model


def train_from(demo: Path, model: Path, out: Path, *options: str, size: Size = TINY) -> int:
    small = ["--chat-tokens", "256", "--text-tokens", "512", "--count", "1", "--steps", "0"]
    where = ["--corpus", str(demo / "books"), "--out", str(out), "--from", str(model)]
    return train_demo.main([*where, *small, *options], size)


@pytest.mark.e2e
@pytest.mark.folders
def test_a_run_starts_from_a_trained_model(demo: Path, trained: Path, tmp_path: Path) -> None:
    """With --from and no step, weights and tokenizer are the given model's; run.json adds up all runs before."""
    out = tmp_path / "out"
    assert train_from(demo, trained, out) == 0
    given = AutoModelForCausalLM.from_pretrained(trained).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in given.items())
    assert (out / "model" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    described = json.loads((out / "run" / "run.json").read_text())
    assert described["commands"][0].startswith(
        "python -m tools.training.train_demo --corpus BOOKS --out DIR --from MODEL"
    )
    assert described["earlier"]["step"] == 4
    assert len(described["earlier"]["commands"]) == 2

    (out / "model" / "figures.json").write_text(
        json.dumps({"run": described, "last": {"step": 6, "tokens": 10, "elapsed_s": 1.5}})
    )
    third = description.earlier_run(out / "model")
    assert (third["step"], third["tokens"], third["elapsed_s"]) == (10, 3082, 10.0)
    assert len(third["commands"]) == 3


@pytest.mark.e2e
@pytest.mark.folders
def test_another_family_starts_from_the_words_of_a_model(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --words tokenizer and embeddings are the given model's; other sizes, and --from besides it, are refused."""
    given = demo / "out" / "model"
    common = ["--corpus", str(demo / "books"), "--chat-tokens", "0", "--text-tokens", "512", "--count", "0"]
    options = [*common, "--steps", "0", "--family", "deepseek_v2", "--words", str(given)]
    out = tmp_path / "out"
    assert train_demo.main([*options, "--out", str(out)], TINY) == 0
    ours = AutoModelForCausalLM.from_pretrained(out / "model")
    words = AutoModelForCausalLM.from_pretrained(given).get_input_embeddings().weight
    assert ours.config.model_type == "deepseek_v2"
    assert torch.equal(ours.get_input_embeddings().weight, words)
    assert (out / "model" / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    assert "--words MODEL" in json.loads((out / "run" / "run.json").read_text())["commands"][0]
    assert json.loads((out / "run" / "log.jsonl").read_text())["held_out"]["accuracy"] == {}

    assert train_demo.main([*options, "--out", str(tmp_path / "wide")], replace(TINY, hidden=64)) == 2
    assert "leave out --words" in capsys.readouterr().err
    assert train_demo.main([*options, "--out", str(tmp_path / "two"), "--from", str(given)], TINY) == 2
    assert "--from or --words" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.folders
def test_a_model_to_start_from_must_fit(
    demo: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of other sizes, one without figures and --from on a resumed run exit 2 with what to do."""
    assert train_from(demo, trained, tmp_path / "wider", size=replace(TINY, inner=24)) == 2
    assert "another one" in capsys.readouterr().err
    assert train(demo, "--resume", "--from", str(trained)) == 2
    assert "leave out --from" in capsys.readouterr().err
    (trained / "figures.json").unlink()
    assert train_from(demo, trained, tmp_path / "bare") == 2
    assert "tools.model_card" in capsys.readouterr().err
