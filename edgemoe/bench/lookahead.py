"""How good the look-ahead's guesses were, and what the wrong ones cost, in all and per layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefetch.counts import TransferCounts


def lookahead_report(counts: TransferCounts) -> dict[str, Any]:
    """One JSON object: experts, bytes and seconds in all, and a list with the same per layer.

    recall is the share of the experts wanted that had been predicted, precision the share of those predicted
    that were then wanted; None where nothing was. See prefetch.base for the rest.
    """
    return {
        "speculated": counts.speculated,
        "speculated_used": counts.speculated_used,
        "speculated_cancelled": counts.speculated_cancelled,
        "hidden_bytes": counts.hidden_bytes,
        "wasted_bytes": counts.wasted_bytes,
        "hidden_s": counts.hidden_s,
        "auto_off": counts.auto_off,
        "auto_resting": counts.auto_resting,
        "layers": [
            {"layer": layer, **asdict(of), "recall": of.recall, "precision": of.precision}
            for layer, of in sorted(counts.lookahead.items())
        ],
    }
