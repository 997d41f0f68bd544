"""Perplexity, KL and agreement against values by hand, and windows of text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_tokenizer import a_tokenizer

from edgemoe.errors import UserError
from edgemoe.evaluate.metrics import BLOCK_ROWS, QualityMeter
from edgemoe.evaluate.score import text_windows

HALF = [math.log(2), 0.0, 0.0]
"""Logits of the distribution 1/2, 1/4, 1/4."""
EVEN = [0.0, 0.0, 0.0]


def test_perplexity_by_hand():
    """Row i predicts token i + 1: probabilities 1/2 and 1/4 make a perplexity of the root of 8."""
    meter = QualityMeter()
    meter.add(torch.tensor([HALF, HALF, [0.0, 99.0, 0.0]]), [2, 0, 1])
    quality = meter.quality()
    assert quality.tokens == 2
    assert quality.perplexity == pytest.approx(math.sqrt(8))
    assert (quality.kl, quality.kl_stderr, quality.top1_agreement) == (None, None, None)


def test_perplexity_is_over_tokens_not_windows():
    """A window of three predicted tokens has three times the weight of a window of one."""
    meter = QualityMeter()
    meter.add(torch.tensor([HALF, HALF, HALF, EVEN]), [0, 0, 0, 0])
    meter.add(torch.tensor([HALF, EVEN]), [0, 1])
    assert meter.quality().perplexity == pytest.approx((2 * 2 * 2 * 4) ** 0.25)


def test_kl_by_hand():
    """KL(reference || setting) in nats; its standard error is over tokens."""
    meter = QualityMeter()
    meter.add(torch.tensor([HALF, EVEN, EVEN]), [0, 1, 1], torch.tensor([EVEN, EVEN, HALF]))
    first = (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3
    quality = meter.quality()
    assert quality.kl == pytest.approx(first / 2)
    assert quality.kl_stderr == pytest.approx(first / 2)


def test_kl_is_not_symmetric():
    """With the distributions swapped, KL is another number."""
    meter = QualityMeter()
    meter.add(torch.tensor([EVEN, EVEN]), [0, 0], torch.tensor([HALF, EVEN]))
    assert meter.quality().kl == pytest.approx(math.log(3 / 2) / 2 + math.log(3 / 4) / 2)


def test_agreement_by_hand():
    """The share of predicted tokens with the same likeliest token in both; the last row does not count."""
    ours = torch.tensor([[3.0, 1, 2], [1, 3, 2], [1, 2, 3], [3, 2, 1]])
    theirs = torch.tensor([[5.0, 1, 2], [9, 3, 2], [0, 0, 1], [1, 2, 3]])
    meter = QualityMeter()
    meter.add(ours, [0, 0, 0, 0], theirs)
    assert meter.quality().top1_agreement == pytest.approx(2 / 3)


def test_many_rows_match_float64():
    """More rows than a block, with a bf16 reference, give numpy's result in float64."""
    rows, vocab = 2 * BLOCK_ROWS + 7, 50
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(rows, vocab, generator=generator) * 3
    theirs = (ours + torch.randn(rows, vocab, generator=generator)).bfloat16()
    tokens = torch.randint(vocab, (rows,), generator=generator).tolist()
    meter = QualityMeter()
    meter.add(ours, tokens, theirs)

    def logs(logits: torch.Tensor) -> np.ndarray:
        x = logits.double().numpy()[:-1]
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    q, p = logs(ours), logs(theirs)
    kls = (np.exp(p) * (p - q)).sum(1)
    quality = meter.quality()
    nll = -q[np.arange(rows - 1), tokens[1:]].mean()
    assert quality.perplexity == pytest.approx(float(np.exp(nll)), rel=1e-5)
    assert quality.kl == pytest.approx(float(kls.mean()), rel=1e-4)
    assert quality.kl_stderr == pytest.approx(float(kls.std(ddof=1) / math.sqrt(rows - 1)), rel=1e-3)
    assert quality.top1_agreement == pytest.approx(float((q.argmax(1) == p.argmax(1)).mean()))


def test_windows_are_the_text_in_order(tmp_path):
    """Windows put together are the first tokens of the text; only the last is shorter."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 20, encoding="utf-8")
    tokenizer = a_tokenizer()
    ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    windows = text_windows(tokenizer, path, tokens=50, window=16)
    assert [len(w) for w in windows] == [16, 16, 16, 2]
    assert [token for w in windows for token in w] == ids[:50]


def test_a_window_that_predicts_nothing_is_left_out(tmp_path):
    """A last window of one token has nothing to predict."""
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh", encoding="utf-8")
    assert [len(w) for w in text_windows(a_tokenizer(), path, tokens=5, window=4)] == [4]


@pytest.mark.parametrize("content", [b"", b"a", b"\xff\xfe\xff", None])
def test_unusable_text_is_refused(tmp_path, content):
    """A missing file, bytes that are not UTF-8, or fewer than two tokens: a UserError that names the file."""
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"text\.txt"):
        text_windows(a_tokenizer(), path, tokens=10, window=10)
