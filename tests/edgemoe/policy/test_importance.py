"""Importance against cases computed by hand and a dense reference (DyMoE eq. 1-2)."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from edgemoe.policy.importance import (
    KEY_BLOCK,
    LAST_QUERIES,
    QUERY_BLOCK,
    PromptAttention,
    attention_received,
    expert_importance,
    first_counted,
)


def dense_attention(query, keys, scaling, window):
    """The whole [heads, R, N] matrix of attention weights, in float64, straight from the definition."""
    heads, rows, _ = query.shape
    tokens = keys.shape[1]
    repeated = keys.double().repeat_interleave(heads // keys.shape[0], 0)
    scores = query.double() @ repeated.transpose(1, 2) * scaling
    for row in range(rows):
        position = tokens - rows + row
        scores[:, row, position + 1 :] = -torch.inf
        if window:
            scores[:, row, : max(position - window + 1, 0)] = -torch.inf
    return scores.softmax(-1)


def blocks_of(keys):
    """The reader of keys [kv_heads, N, D], at most KEY_BLOCK tokens at a time."""

    def read(first, end):
        assert 0 <= first < end <= min(first + KEY_BLOCK, keys.shape[1])
        return keys[:, first:end]

    return read


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize(
    ("rows", "past", "skipped"), [(1, 0, 0), (7, 9, 2), (QUERY_BLOCK + 6, 3, 0), (40, 0, 8), (140, 700, 9)]
)
def test_blockwise_sums_equal_the_whole_matrix(rows, past, skipped, window):
    """Attention received by every token, averaged over heads, is the same in blocks and at once."""
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(6, rows, 8, generator=generator)
    keys = torch.randn(2, past + rows, 8, generator=generator)
    want = dense_attention(query, keys, 0.4, window)[:, skipped:].mean(0).sum(0)
    got = attention_received(query, blocks_of(keys), past + rows, 0.4, window, skipped)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def scores_so_far(query, keys, scaling, window, signal, first, step):
    """Scores of all tokens by the definition, a token and a query at a time.

    Args:
        query, keys: float64 values of the whole prompt so far.
        first: position of its first query.
        step: rows of the last step.
    """
    weights = dense_attention(query, keys, scaling, window).mean(0)
    rows, tokens = weights.shape
    scores = []
    for token in range(tokens):
        seeing = [q for q in range(rows) if 0 <= first + q - token < (window or tokens)]
        queries = {
            "heavy-hitters": range(rows),
            "heavy-hitters-mean": seeing,
            "heavy-hitters-last": range(rows - min(step, LAST_QUERIES), rows),
        }[signal]
        scores.append(sum(float(weights[q, token]) for q in queries) / max(len(queries), 1))
    return scores


@pytest.mark.e2e
@pytest.mark.parametrize("signal", ["heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last"])
@pairwise(
    window=[None, 9],
    steps=[(21,), (20, 1), (3, 40, 17)],
    past=[0, 6],
    block=[16, 64],
)
def test_ranks_are_over_the_whole_prompt_so_far(signal, steps, past, window, block):
    """After every step its rows' ranks among all tokens count all the prompt's queries so far, however cut.

    A step's rows come in blocks, which may divide the last queries.

    Tokens before the prompt are ranked too, and their queries count nothing. Layers do not mix, and a step that runs
    twice before it succeeds counts once.
    """
    generator = torch.Generator().manual_seed(sum(steps))
    query = torch.randn(2, 6, sum(steps), 8, generator=generator)
    keys = torch.randn(2, 2, past + sum(steps), 8, generator=generator)
    prompt, done = PromptAttention(), 0
    for rows in steps:
        end = done + rows
        for attempt in range(2):
            for layer in (0, 1):
                part = query[layer, :, done:end], keys[layer, :, : past + end]
                for start in range(0, rows, block):
                    of = range(start, min(start + block, rows))
                    until = past + done + of.stop
                    own = part[0][:, of.start : of.stop], blocks_of(part[1][:, :until]), until
                    received = attention_received(*own, 0.4, window, first_counted(signal, of, rows))
                    prompt.receive(layer, received, of, signal)
                got = prompt.ranks(layer, rows, window, signal)
                so_far = query[layer, :, :end], keys[layer, :, : past + end]
                scores = scores_so_far(*so_far, 0.4, window, signal, past, rows)
                want = [sum(other > scores[t] for other in scores) for t in range(past + done, past + end)]
                assert (got * (past + end)).round().int().tolist() == want, (layer, attempt)
        prompt.commit(rows)
        done = end


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor):
                size = each.untyped_storage().nbytes() // each.element_size()
                self.elements = max(self.elements, size)
        return out


def test_only_a_block_of_queries_is_in_memory():
    """Neither the whole matrix nor all keys in float32: the largest tensor that is made is one block's scores."""
    heads, rows, tokens, dim = 8, 2 * QUERY_BLOCK, 5 * KEY_BLOCK, 32
    query, keys = torch.randn(heads, rows, dim).bfloat16(), torch.randn(2, tokens, dim).bfloat16()
    with Largest() as largest:
        attention_received(query, lambda first, end: keys[:, first:end].clone(), tokens, 0.1, None, 0)
    assert largest.elements == heads * QUERY_BLOCK * KEY_BLOCK


def test_sums_by_hand():
    """One head, keys all zero: every query spreads its attention evenly over the tokens that it sees."""
    got = attention_received(torch.ones(1, 3, 4), blocks_of(torch.zeros(1, 3, 4)), 3, 1.0, None, 0)
    assert got.tolist() == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])


INDEX = torch.tensor([[0, 1], [0, 2], [3, 1], [0, 1]])
WEIGHTS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5], [0.6, 0.4]])
RANKS = torch.tensor([0.75, 0.0, 0.25, 0.5])
"""Of four tokens, token 1 received most attention."""


@pytest.mark.parametrize(
    ("signal", "want"),
    [
        ("load", [3, 3, 1, 1, 0]),
        ("gate", [2.3, 1.0, 0.2, 0.5, 0]),
        ("heavy-hitters", [1, 1, 1, 1, 0]),  # tokens 1 and 2 are heavy: experts 0, 2 and 3, 1
        ("mix", [3 / 8 + 1 / 4, 3 / 8 + 1 / 4, 1 / 8 + 1 / 4, 1 / 8 + 1 / 4, 0]),
    ],
)
def test_importance_by_hand(signal, want):
    """Four tokens, five experts, the two tokens that received most attention are heavy hitters."""
    got = expert_importance(signal, INDEX, WEIGHTS, RANKS, 0.5, 5)
    # A tie-break is worth less than the smallest step of its signal.
    step = {"mix": 1 / 8}.get(signal, 1)
    assert got.tolist() == pytest.approx(want, abs=step / 2 + 1e-6 if signal != "gate" else 1e-6)
    assert got[4] == 0


@pytest.mark.parametrize(("share", "heavy"), [(0.05, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (1, 4)])
def test_a_share_of_all_tokens_is_heavy(share, heavy):
    """Tokens with fewer than that share of all tokens before them; four tokens with an expert of their own each."""
    own = torch.arange(4)[:, None]
    got = expert_importance("heavy-hitters", own, torch.ones(4, 1), RANKS, share, 4)
    assert (got >= 1).tolist() == (heavy > RANKS * 4).tolist()


@pytest.mark.parametrize("signal", ["heavy-hitters", "mix"])
def test_a_step_without_heavy_hitters_goes_by_the_rest(signal):
    """Where all heavy hitters came in earlier steps, gate weights decide, or load where that is mixed in."""
    got = expert_importance(signal, INDEX, WEIGHTS, torch.full((4,), 0.6), 0.5, 5)
    other = "gate" if signal == "heavy-hitters" else "load"
    want = expert_importance(other, INDEX, WEIGHTS, None, 0.5, 5)
    assert got.argsort(descending=True).tolist() == want.argsort(descending=True).tolist()


def test_gate_weights_break_ties():
    """Experts 0 and 1 have three tokens each; expert 0 has more gate weight, which counts for less than a token."""
    load = expert_importance("load", INDEX, WEIGHTS, None, 0.5, 5)
    assert load[0] > load[1] > load[3] > load[2]
    assert load[0] - load[1] < 1


def test_random_depends_on_the_routing_alone():
    """Equal routing gives equal values, whatever random numbers were drawn before; another routing does not."""
    first = expert_importance("random", INDEX, WEIGHTS, None, 0.5, 5)
    torch.rand(3)
    assert torch.equal(first, expert_importance("random", INDEX, WEIGHTS, None, 0.5, 5))
    assert not torch.equal(first, expert_importance("random", INDEX + 1, WEIGHTS, None, 0.5, 5))
    assert math.isfinite(float(first.sum()))


def test_sinks_absorb_attention_of_every_query():
    """Attention that goes to a head's sink is received by no token."""
    query, keys = torch.zeros(2, 3, 4), torch.zeros(1, 3, 4)
    sinks = torch.tensor([math.log(1.0), math.log(3.0)])
    # Query i sees i + 1 tokens of weight 1 each, and a sink of weight 1 in one head and 3 in the other.
    to_each = [(1 / (seen + 1) + 1 / (seen + 3)) / 2 for seen in (1, 2, 3)]
    want = torch.tensor([sum(to_each[token:]) for token in range(3)])
    got = attention_received(query, blocks_of(keys), 3, 1.0, None, 0, sinks)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("signal", ["heavy-hitters", "mix"])
def test_a_layer_without_scores_uses_load(signal):
    """Without attention scores a prompt's experts are ranked by their numbers of tokens."""
    index = torch.tensor([[0, 1], [0, 2], [0, 1]])
    weights = torch.full((3, 2), 0.5)
    wanted = expert_importance("load", index, weights, None, 0.5, 4)
    assert torch.equal(expert_importance(signal, index, weights, None, 0.5, 4), wanted)
