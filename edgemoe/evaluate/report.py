"""The report of an evaluation: rows, and the claims that they support or contradict."""

from __future__ import annotations

from typing import Any

from edgemoe.evaluate.claims import claims_of, routing_claims, similarity_claims
from edgemoe.evaluate.hotness import HotnessRow
from edgemoe.evaluate.observations import Observations
from edgemoe.evaluate.request import EvalReport, EvalRequest
from edgemoe.evaluate.rows import EvalRow


def report_of(
    request: EvalRequest,
    environment: dict[str, Any],
    rows: list[EvalRow],
    left_out: list[str],
    observations: Observations | None,
    hotness: list[HotnessRow],
) -> EvalReport:
    """Puts the results of an evaluation together.

    Args:
        request: says which routing observations the report has.
        environment: the conditions of the measurements.
        rows: one per setting and phase.
        left_out: why each setting that was not measured was left out.
        observations: routing and similarity; None: neither was measured.
        hotness: rows of its studies.
    """
    routing = observations.routing() if observations and "routing" in request.observed else []
    similarity = observations.similarity() if observations and "similarity" in request.observed else []
    claims = [*claims_of(rows), *routing_claims(routing), *similarity_claims(similarity)]
    return EvalReport(environment, rows, claims, left_out, routing, similarity, hotness)
