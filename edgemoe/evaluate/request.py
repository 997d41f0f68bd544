"""The request and the report of one evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgemoe.evaluate.arm import Arm
from edgemoe.evaluate.claims import Claim
from edgemoe.evaluate.hotness import HotnessRow
from edgemoe.evaluate.observations import RoutingRow, SimilarityRow
from edgemoe.evaluate.rows import EvalRow


@dataclass(frozen=True)
class EvalRequest:
    """The measurements of an evaluation.

    Args:
        text: file for perplexity and KL; None: tasks only.
        reference: checkpoint of the bf16 model; None: no bf16 row, no KL.
        tokens: most tokens of the text.
        window: tokens of a window, at most kv.blocks.BLOCK_ROWS on a device or with a vram_limit, which holds no more
            rows' logits.
        task_count: held-out tasks of each kind for every row of the table; 0: none.
        seed: chooses the tasks.
        arms: settings, in the order of the rows.
        observed: studies of studies.OBSERVED; "layers" and studies of hotness need a reference.
        vram_limit, dram_limit: bytes, as for a chat; no result depends on them.
        prefill_rows: most tokens of a window in one step, whose experts are ranked together; None: all.
        domains: texts of the studies of hotness, two or more.
    """

    text: Path | None
    reference: Path | None
    tokens: int
    window: int
    task_count: int
    seed: int
    arms: tuple[Arm, ...]
    vram_limit: int | None = None
    dram_limit: int = 0
    observed: tuple[str, ...] = ()
    prefill_rows: int | None = None
    domains: tuple[Path, ...] = ()


@dataclass(frozen=True)
class EvalReport:
    """The results of an evaluation. Field names are the JSON's.

    Args:
        environment: versions, model, text and counts.
        rows: bf16 first, where there is a reference.
        claims: statements of the paper, and whether they hold here.
        left_out: names of settings that need more bits than the store has.
        routing, similarity, hotness: rows of these studies.
    """

    environment: dict[str, Any]
    rows: list[EvalRow]
    claims: list[Claim]
    left_out: list[str]
    routing: list[RoutingRow] = field(default_factory=list)
    similarity: list[SimilarityRow] = field(default_factory=list)
    hotness: list[HotnessRow] = field(default_factory=list)
