"""Compares bases of 2 to 4 bits, HQQ's among them, with low-rank compensators, on the experts of one checkpoint.

    python -m tools.low_rank.compare CHECKPOINT --text BOOK.txt [--store STORE] [--tokens 1024] [--ranks 16 32 64]

Prints one JSON object per line. `matrix` lines have, for a projection of all experts: the mean kurtosis, the relative
error of the base and of each rank, and the correlation of kurtosis and error over experts, by values (Pearson) and by
order (Spearman). `quality` lines have the KL to the checkpoint in float32 per token, in nats, and the bits of a weight
that is read, without padding to whole blocks, where the experts at some places of a token's ranking are compensated.
All ranks are uniform; --store adds levels 2 and 4 of a store of the same checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgemoe.evaluate.metrics import kl_of
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.ranks import kurtosis
from tools.command_line import make_parser, positive, two_or_more
from tools.low_rank.bases import (
    Base,
    Decoded,
    added_bits,
    bases,
    compensated,
    compensation,
    experts_of,
    matrices,
)

PROJECTIONS = ("gate", "up", "down")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and prints the comparison."""
    parser = make_parser("tools.low_rank.compare", __doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint whose experts have gate, up and down")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--store", type=Path, help="a store of the checkpoint")
    parser.add_argument("--tokens", type=two_or_more, default=1024, help="of the text")
    parser.add_argument("--window", type=two_or_more, default=256, help="tokens that run together")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 32, 64])
    parser.add_argument("--places", type=_places, nargs="+", default=[_places("1"), _places("2")])
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(options.checkpoint)(options.text.read_text())["input_ids"]
    windows = list(torch.tensor(ids[: options.tokens]).split(options.window))
    with torch.inference_mode(), bases(options.store) as compared:
        for line in lines(model, windows, compared, options.ranks, options.places):
            print(json.dumps(line), flush=True)


def _places(text: str) -> tuple[str, set[int]]:
    """A range of places of a token's ranking, "1-3" from 1, and the places from 0.

    >>> _places("2-3")
    ('2-3', {1, 2})
    """
    first, _, last = text.partition("-")
    places = set(range(int(first) - 1, int(last or first)))
    if not places or min(places) < 0:
        raise argparse.ArgumentTypeError(f"expected places such as 1 or 1-3, got {text!r}")
    return text, places


def lines(
    model: Any,
    windows: Sequence[torch.Tensor],
    compared: Sequence[Base],
    ranks: Sequence[int],
    places: Sequence[tuple[str, set[int]]],
) -> Iterator[dict[str, Any]]:
    """Yields the lines of the comparison; see the module.

    Args:
        model: the checkpoint in float32, by transformers.
        windows: token ids, int64 [tokens] each.
        compared: the bases.
        ranks: ranks of every matrix, none above its smaller side.
        places: names and places of experts that are compensated; all of a token's are another row.
    """
    truth = _log_probabilities(model, windows)
    whole = {i: [matrices(e, n) for n in range(len(e.down_proj))] for i, e in experts_of(model).items()}
    tails = [[kurtosis(of_expert[p]) for each in whole.values() for of_expert in each] for p in range(3)]
    top_k = model.config.num_experts_per_tok
    shapes = [weight.shape for weight in next(iter(whole.values()))[0]]
    for base in compared:
        plain = {
            i: [base.weights(ExpertKey(i, n), w) for n, w in enumerate(each)] for i, each in whole.items()
        }
        yield from _matrix_lines(base.name, 0, whole, plain, tails)
        yield _quality(model, windows, truth, base, (plain, plain), ("all", set())) | {
            "bits": base.bits,
            "rank": 0,
        }
        for rank in ranks:
            better = _compensated(whole, plain, rank)
            yield from _matrix_lines(base.name, rank, whole, better, tails)
            for name, where in (*places, ("all", set(range(top_k)))):
                bits = base.bits + added_bits(shapes, rank) * len(where) / top_k
                row = _quality(model, windows, truth, base, (plain, better), (name, where))
                yield row | {"bits": bits, "rank": rank}


def _compensated(whole: Decoded, plain: Decoded, rank: int) -> Decoded:
    """Adds to each matrix of a base the compensation of its error."""
    return {
        i: [
            [q + compensation(w - q, rank) for w, q in zip(exact, coded, strict=True)]
            for exact, coded in zip(whole[i], plain[i], strict=True)
        ]
        for i in whole
    }


def _matrix_lines(
    name: str, rank: int, whole: Decoded, coded: Decoded, tails: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    for p, projection in enumerate(PROJECTIONS):
        pairs = [(w[p], q[p]) for i in whole for w, q in zip(whole[i], coded[i], strict=True)]
        errors = [float((w - q).norm() / w.norm()) for w, q in pairs]
        both = torch.tensor([tails[p], errors])
        yield {
            "line": "matrix",
            "base": name,
            "projection": projection,
            "rank": rank,
            "kurtosis": float(both[0].mean()),
            "error": float(both[1].mean()),
            "pearson": float(torch.corrcoef(both)[0, 1]),
            "spearman": float(torch.corrcoef(both.argsort(1).argsort(1).float())[0, 1]),
        }


def _quality(
    model: Any,
    windows: Sequence[torch.Tensor],
    truth: torch.Tensor,
    base: Base,
    weights: tuple[Decoded, Decoded],
    places: tuple[str, set[int]],
) -> dict[str, Any]:
    with compensated(model, *weights, places[1]):
        kl = kl_of(_log_probabilities(model, windows), truth)
    found = {"kl": float(kl.mean()), "kl_stderr": float(kl.std() / len(kl) ** 0.5)}
    return {"line": "quality", "base": base.name, "places": places[0]} | found


def _log_probabilities(model: Any, windows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Log probabilities of each next token, float32 [tokens, vocabulary]."""
    return torch.cat([model(window[None]).logits[0].log_softmax(-1) for window in windows])


if __name__ == "__main__":
    main()
