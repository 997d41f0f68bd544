"""Bases of low-rank compensators: HQQ's codes, and experts that compute with other weights."""

import json
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.low_rank import factor
from tools.low_rank import compare
from tools.low_rank.bases import Base, added_bits, bases, compensated, compensation, experts_of, matrices
from tools.low_rank.quantizers import half_quadratic, round_to_nearest

HQQ = {
    2: (-1.2624197006225586, -0.6260366439819336, 0.010346392169594765, 0.6467294692993164),
    4: (-1.0179283618927002, 0.8912209272384644),
}
"""Decoded values of hqq 0.2.8 for the cubes of `cubes`: all of 2 bits, the least and the largest of 4."""


def cubes() -> torch.Tensor:
    """One group, float32 [1, 64]: many small weights and few large ones."""
    return ((torch.arange(64).double() * 37 % 64 / 32 - 1) ** 3).float().reshape(1, 64)


def test_half_quadratic_codes_are_those_of_the_package():
    values = half_quadratic(cubes(), 2).unique()
    torch.testing.assert_close(values, torch.tensor(HQQ[2]))
    four = half_quadratic(cubes(), 4)
    torch.testing.assert_close(torch.stack(four.aminmax()), torch.tensor(HQQ[4]))


def test_constant_groups_stay_finite():
    """A group of equal weights has no range; its codes decode to the weight."""
    flat = torch.full((1, 64), 0.25)
    for how in (round_to_nearest, half_quadratic):
        torch.testing.assert_close(how(flat, 2), flat)


def test_rounding_is_exact_at_the_ends_of_a_range():
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    coded = round_to_nearest(weight, 3)
    ends = torch.stack(weight.view(-1, 64).aminmax(dim=1))
    torch.testing.assert_close(torch.stack(coded.view(-1, 64).aminmax(dim=1)), ends)
    assert all(len(group.unique()) == 8 for group in coded.view(-1, 64))


def test_compensation_is_near_the_best_product_of_its_rank():
    """Factors of 3 bits lose less than a tenth of the gain of exact factors, and rank 0 gains nothing."""
    error = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    exact = factor(error, 16)
    best = (error - exact[0].t() @ exact[1]).square().sum()
    left = (error - compensation(error, 16)).square().sum()
    assert best < left < best + 0.1 * (error.square().sum() - best)
    assert not compensation(error, 0).any()
    assert added_bits([error.shape], 16) == pytest.approx(3.25 * 16 * (64 + 96) / (64 * 96))


def test_only_the_named_places_have_the_better_weights(checkpoint):
    """Where all other experts have weights of 0, the logits are the logits of a model without them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    whole = {i: [matrices(e, n) for n in range(len(e.down_proj))] for i, e in experts_of(model).items()}
    none = {i: [[torch.zeros_like(m) for m in w] for w in each] for i, each in whole.items()}
    with torch.inference_mode():
        expected = model(ids).logits
        with compensated(model, none, whole, {0, 1}):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        with compensated(model, none, whole, {0}):
            first = model(ids).logits
        for experts in experts_of(model).values():
            own = experts.forward
            experts.forward = lambda x, indices, shares, own=own: own(
                x, indices, shares * (shares == shares.max(1, keepdim=True).values)
            )
        torch.testing.assert_close(first, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_command_prints_errors_and_quality(checkpoint, tmp_path, capsys, monkeypatch):
    """More rank leaves less error, and bits count the share of experts that are compensated."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    two = Base("HQQ 2", 2.5, lambda key, weights: [half_quadratic(w, 2) for w in weights])
    monkeypatch.setattr(compare, "bases", lambda store: nullcontext([two]))
    options = ["--text", str(text), "--tokens", "16", "--window", "16", "--ranks", "8", "--places", "1"]
    compare.main([str(checkpoint), *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    errors = {(e["base"], e["projection"], e["rank"]): e["error"] for e in lines if e["line"] == "matrix"}
    assert len(errors) == 3 * 2
    assert all(
        error < errors[base, projection, 0] for (base, projection, rank), error in errors.items() if rank
    )
    quality = {(row["base"], row["rank"], row["places"]): row for row in lines if row["line"] == "quality"}
    none, first, every = (
        quality["HQQ 2", rank, places]["bits"] for rank, places in ((0, "all"), (8, "1"), (8, "all"))
    )
    assert (none, (every - none) / (first - none)) == (2.5, pytest.approx(2))
    assert all(row["kl"] > 0 for row in quality.values())


@pytest.mark.parametrize("text", ["0", "3-1", "0-2"])
def test_wrong_places_exit_2(checkpoint, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(checkpoint), "--text", "t", "--places", text])
    assert "expected places such as 1 or 1-3" in capsys.readouterr().err


def test_bases_are_codes_of_their_bits_and_levels_of_a_store(tiny_store, checkpoint):
    """The errors of an expert fall with the bits, and a store's level 4 is nearer to the weights than 3 bits are."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = matrices(experts_of(model)[0], 0)
    with bases(tiny_store) as compared:
        coded = {base.name: base.weights(ExpertKey(0, 0), weights)[2] for base in compared}
    errors = {name: float((weights[2] - each).norm()) for name, each in coded.items()}
    assert list(errors) == ["rounded 2", "rounded 3", "HQQ 2", "HQQ 3", "level 2", "level 4"]
    assert errors["level 4"] < min(errors["HQQ 3"], errors["rounded 3"])
    assert max(errors["HQQ 3"], errors["rounded 3"]) < min(
        errors["HQQ 2"], errors["rounded 2"], errors["level 2"]
    )
