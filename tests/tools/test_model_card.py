"""tools/model_card.py: the card and its measurements, trigram perplexity and routing."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import model_card
from tools.training import data, train_demo
from tools.training.batches import as_batch
from tools.training.model import Size, build
from tools.training.routing import hot_experts, hot_load, loads, overlap
from tools.training.trigram import DISCOUNT, Trigram

TINY = Size(
    vocabulary=400, hidden=32, layers=2, experts=8, inner=16, top_k=2, heads=2, kv_heads=1, head_dim=16
)


def reference_probability(
    texts: list[list[int]], vocabulary: int, history: tuple[int, ...], word: int
) -> float:
    """Interpolated absolute discounting over dictionaries, as in textbooks."""
    padded = [[vocabulary, vocabulary, *text] for text in texts]
    if not history:
        single = Counter(token for text in texts for token in text)
        return (single[word] + 1) / (single.total() + vocabulary + 1)
    n = len(history)
    followers = Counter(
        text[i] for text in padded for i in range(2, len(text)) if tuple(text[i - n : i]) == history
    )
    shorter = reference_probability(texts, vocabulary, history[1:], word)
    if not followers:
        return shorter
    own = max(followers[word] - DISCOUNT, 0) / followers.total()
    return own + DISCOUNT * len(followers) / followers.total() * shorter


def test_trigram_probabilities_equal_the_reference() -> None:
    """Probabilities of seen and unseen contexts equal a plain count over dictionaries and sum to one."""
    texts = [[0, 1, 2, 0, 1, 3, 0, 1, 2], [2, 2, 1, 0], [3]]
    trigram = Trigram([np.array(text) for text in texts], 5)
    for first in range(6):
        for second in range(6):
            words = np.arange(6)
            found = trigram.probabilities(np.full(6, first), np.full(6, second), words)
            expected = [reference_probability(texts, 5, (first, second), int(word)) for word in words]
            np.testing.assert_allclose(found, expected)
            assert found.sum() == pytest.approx(1.0)


def test_trigram_loss_stays_within_a_conversation() -> None:
    """The loss is the mean of the reference's negative logarithms with contexts within each conversation."""
    texts = [[0, 1, 2, 0, 1, 3, 0, 1, 2], [2, 2, 1, 0]]
    trigram = Trigram([np.array(text) for text in texts], 5)
    batch = as_batch([[([0, 1, 3], [False, True, True]), ([2, 2], [False, True])]], 8, apart=True)
    histories = [((5, 0), 1), ((0, 1), 3), ((5, 2), 2)]
    expected = [-math.log(reference_probability(texts, 5, history, word)) for history, word in histories]
    assert trigram.loss([batch]) == pytest.approx(sum(expected) / 3)


def test_loads_count_the_routers_choices() -> None:
    """Each layer's loads are the fractions of its routers' choices over real tokens, by domain."""
    special = {"bos_token_id": 0, "eos_token_id": 4, "pad_token_id": 0}
    model = build(TINY, seed=0, special=special).eval()
    text = as_batch([[([5, 6, 7], [True] * 3)]], 8, apart=False)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
    found = loads(model, {"prose": [text]})["prose"]
    for layer, index in enumerate(chosen):
        counts = Counter(index[:3].flatten().tolist())
        assert found[layer].tolist() == pytest.approx([counts[e] / 6 for e in range(8)])


def test_hot_experts_and_their_overlap() -> None:
    """Two of eight experts are hot; their load and overlap equal counts by hand."""
    a = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]])
    b = torch.tensor([[0.1, 0.4, 0.3, 0.1, 0.1, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert hot_experts(a) == [{0, 1}, {0, 7}]
    assert hot_load(a) == pytest.approx([0.7, 1.0])
    assert overlap(a, b) == [0.5, 0.0]
    assert overlap(a, a) == [1.0, 1.0]


@pytest.fixture(scope="module")
def carded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model directory with the card of a tiny model trained for two steps."""
    root = tmp_path_factory.mktemp("card")
    for i in range(3):
        (root / f"{i}.txt").write_text(f"Once upon a time {i} things happened, and then more did.\n" * 200)
        (root / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n\n\n" * 200)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.training.corpus.sysconfig.get_paths", lambda: {"stdlib": str(root)})
        patch.setattr(model_card, "TRIGRAM_TASKS", 200)
        patch.setattr(data, "TOKENIZER_TASKS", 2000)
        small = ["--chat-tokens", "256", "--text-tokens", "512", "--count", "1", "--steps", "2"]
        assert train_demo.main(["--corpus", str(root), "--out", str(root / "out"), *small], TINY) == 0
        assert model_card.main([str(root / "out"), "--rows", "2", "--count", "2"]) == 0
    torch.set_num_threads(threads)
    return root / "out" / "model"


@pytest.mark.e2e
@pytest.mark.folders
def test_card_contains_the_figures(carded: Path) -> None:
    """The card contains every figure of figures.json that a reader needs."""
    figures = json.loads((carded / "figures.json").read_text())
    text = (carded / "README.md").read_text()
    for name, value in figures["perplexity"].items():
        assert f"| {name} | {value:.2f} | {figures['trigram'][name]:.2f} |" in text
    for kind, share in figures["accuracy"].items():
        assert f"| {kind} | {100 * share:.0f} % |" in text
    assert set(figures["repeated"]) == {"prose", "python"}
    for name, fraction in figures["repeated"].items():
        assert f"{name} {100 * fraction:.1f} %" in text
    assert "2 steps, 1,536 tokens" in text
    assert figures["run"]["commands"][0] in text
    assert figures["weight_bytes"] == (carded / "model.safetensors").stat().st_size
    assert set(figures["overlap"]) == {"prose / python", "prose / tasks", "python / tasks"}
    assert figures["hot_load"].keys() == figures["perplexity"].keys() == {"prose", "python", "tasks"}
    assert figures["last"]["step"] == 2


@pytest.mark.e2e
@pytest.mark.folders
def test_card_names_the_runs_before(carded: Path) -> None:
    """A run that started from a trained model has the commands, steps and tokens of the runs before on its card."""
    figures = json.loads((carded / "figures.json").read_text())
    assert "MODEL" not in (carded / "README.md").read_text()
    earlier = {"commands": ["first", "second"], "step": 1959, "tokens": 6_018_048, "elapsed_s": 2760.0}
    figures["run"] |= {"earlier": earlier, "commands": ["third --from MODEL"]}
    text = model_card.card(model_card.Figures(**figures))
    assert "```\nfirst\nsecond\nthird --from MODEL\n```\n" in text
    assert "1,959 steps, 6,018,048 tokens and 46 minutes" in " ".join(text.split())


@pytest.mark.e2e
@pytest.mark.folders
def test_figures_are_plausible(carded: Path) -> None:
    """An untrained model is near chance, the trigram model is better, and hot experts have a quarter or more."""
    figures = json.loads((carded / "figures.json").read_text())
    assert all(value == pytest.approx(400, rel=0.25) for value in figures["perplexity"].values())
    assert max(figures["trigram"]["prose"], figures["trigram"]["python"]) < 20
    assert all(0.25 <= share <= 1 for layers in figures["hot_load"].values() for share in layers)
    assert sum(figures["accuracy"].values()) == 0


@pytest.mark.e2e
@pytest.mark.folders
def test_pictures_are_drawn(carded: Path) -> None:
    """The card's pictures exist and are PNG."""
    text = (carded / "README.md").read_text()
    for name in ("loss.png", "routing.png"):
        assert f"]({name})" in text
        assert (carded / name).read_bytes().startswith(b"\x89PNG")


def test_a_card_by_hand() -> None:
    """Sizes in millions, minutes, percentages and the mean of all tasks are as computed by hand."""
    sizes = {"layers": 6, "hidden": 256, "experts": 32, "inner": 64, "top_k": 4, "vocabulary": 4096}
    files = {"training": 3, "held_out": 1}
    run = {
        **{"size": sizes, "files": {"prose": files, "python": files}, "versions": {"python": "3.11"}},
        **{"commands": ["train"], "threads": 2, "seed": 7, "device": "cpu", "chat_tokens": 256},
        **{"text_tokens": 512, "recipe": {"rate": 0.001, "balance": 0.01}},
    }
    figures = model_card.Figures(
        run=run,
        last={"step": 10, "tokens": 1000, "elapsed_s": 300.0},
        parameters=16_400_000,
        weight_bytes=32_900_000,
        repeated={"prose": 0.125},
        perplexity={"prose": 9.5},
        trigram={"prose": 20.25},
        accuracy={"sums": 0.5, "spelling": 1.0},
        count=4,
        hot_load={"prose": [0.5, 0.75]},
        overlap={"prose / tasks": [0.25, 0.0]},
    )
    text = model_card.card(figures)
    words = " ".join(text.split())
    assert "16.4 M parameters, 32.9 MB in bf16" in words
    assert "10 steps, 1,000 tokens, 5 minutes of running time on cpu with 2 threads, shared" in words
    for row in (
        *("| prose | 9.50 | 20.25 |", "| sums | 50 % |", "| spelling | 100 % |", "| **all** | 75 % |"),
        *("| prose | 50 % | 75 % |", "| prose / tasks | 25 % | 0 % |", "| domain | layer 0 | layer 1 |"),
    ):
        assert row in text
    alone = model_card.card(replace(figures, run=run | {"threads": 1}))
    assert "with 1 thread, shared" in " ".join(alone.split())


def test_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is no trainer's --out exits 2."""
    assert model_card.main([str(tmp_path)]) == 2
    assert "train first" in capsys.readouterr().err
