"""Which settings are measured, the verdicts on the paper's claims, and the report as text and picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgemoe.errors import UserError
from edgemoe.evaluate.arm import PHASES, TABLE, Arm
from edgemoe.evaluate.claims import claims_of, routing_claims, similarity_claims
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.observations import RoutingRow, SimilarityRow
from edgemoe.evaluate.plot import plot_kl
from edgemoe.evaluate.rows import EvalRow, lowered_row, reference_row, setting_row, with_accuracy
from edgemoe.evaluate.studies import (
    DOMAINS,
    OBSERVED,
    STUDIES,
    TABLE_LEVELS,
    TABLE_RETENTIONS,
    study_arms,
    table_arms,
)
from edgemoe.evaluate.table import claim_lines, quality_lines, routing_lines, similarity_lines, task_lines
from edgemoe.experts.use import ExpertUse
from edgemoe.policy.settings import SIGNALS, RunSettings


def row(levels=(4, 2), kl=0.01, *, study=TABLE, phase="prefill", stderr=0.0, perplexity=10.0, **settings):
    """Returns a measured row; settings other than levels have the defaults of RunSettings."""
    made = Arm(RunSettings(levels=levels, exact=True, **settings), (phase,), study)
    use = ExpertUse(experts={levels[0]: 3, levels[-1]: 1}, scheduled={levels[0]: 1, levels[-1]: 1})
    return setting_row(made, phase, Quality(100, perplexity, kl, stderr, 0.9), use)


def bf16(perplexity=10.0) -> EvalRow:
    return reference_row(Quality(100, perplexity, 0.0, 0.0, 1.0))


def verdicts(*rows: EvalRow) -> dict[str, bool | None]:
    return {claim.claim: claim.holds for claim in claims_of(rows)}


def test_the_default_table():
    """Uniform 8, 4, 2, then 4/2, 4/0, 8/4, 8/4/2/0 at 0.75, 0.9 and 1, exactly, in both phases."""
    arms = table_arms(TABLE_LEVELS, TABLE_RETENTIONS, reuse=False)
    names = ["exact 8", "exact 4", "exact 2"]
    names += [f"{levels} r {r}" for levels in ("4/2", "4/0", "8/4", "8/4/2/0") for r in ("0.75", "0.9", "1")]
    assert [arm.name for arm in arms] == names
    assert all(arm.phases == ("prefill", "decode") and arm.settings.exact for arm in arms)


def test_names_are_distinct():
    """No two arms of the table and all studies share a name, so reports can be joined by it."""
    arms = table_arms(TABLE_LEVELS, TABLE_RETENTIONS, reuse=True)
    arms += [arm for study in STUDIES for arm in study_arms(study)]
    assert len({arm.name for arm in arms}) == len(arms)


def test_the_signal_study_varies_the_signal_and_its_share_alone():
    """Every signal at the same levels and ratio, from 5 to 50 % heavy hitters where it counts them."""
    arms = study_arms("signals")
    groups: dict[RunSettings, list[str]] = {}
    for arm in arms:
        same = arm.settings.with_(importance="load", heavy_hitters=0.5)
        groups.setdefault(same, []).append((arm.settings.importance, arm.settings.heavy_hitters))
    counting = {"heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last", "mix"}
    want = [(signal, share) for signal in counting for share in (0.05, 0.1, 0.2, 0.5)]
    want += [(signal, 0.5) for signal in set(SIGNALS) - counting]
    assert all(sorted(found) == sorted(want) for found in groups.values())


@pytest.mark.parametrize("study", OBSERVED)
def test_observed_studies_run_no_settings(study):
    """They are of the bf16 model, or of routers at one level."""
    assert study_arms(study) == []


def test_an_unknown_study_is_refused():
    """The error names the studies that exist."""
    with pytest.raises(UserError) as refused:
        study_arms("breadth")
    assert ", ".join(STUDIES) in str(refused.value)


def test_bits_are_over_experts_in_prefill_and_pairs_in_decode():
    """Three experts at 4 and one at 2, of which as many pairs at 4 as at 2: 4.0 and 3.5 bits by hand."""
    prefill, decode = (row(phase=phase) for phase in PHASES)
    assert (prefill.bits_per_weight_read, prefill.effective_retention) == (4.0, 0.75)
    assert (decode.bits_per_weight_read, decode.effective_retention) == (3.5, 0.5)


def test_table_one_holds_and_fails_by_perplexity():
    """2 % of bf16's perplexity is the line: 4 bits must be within, 2 bits beyond."""
    text = "prefill: 4 bits keep the model's quality and 2 bits do not (table 1)"
    four = row((4,), perplexity=10.1)
    assert verdicts(bf16(), four, row((2,), perplexity=12)) == {text: True}
    assert verdicts(bf16(), four, row((2,), perplexity=10.1)) == {text: False}
    assert verdicts(bf16(), row((4,), perplexity=11), row((2,), perplexity=12)) == {text: False}
    assert verdicts(four, row((2,), perplexity=12)) == {}


@pytest.mark.parametrize(
    ("without", "stderr", "holds"), [(0.02, 0.001, True), (0.005, 0.001, False), (0.02, 0.005, None)]
)
def test_a_difference_must_exceed_noise(without, stderr, holds):
    """4/2 at KL 0.01 against 4/0: there is a verdict from two standard errors of the difference on."""
    rows = (row(retention=0.75, stderr=stderr), row((4, 0), without, retention=0.75, stderr=stderr))
    assert verdicts(*rows) == {"prefill: at r 0.75, 4/2 is better than 4/0 (table 2)": holds}


@pytest.mark.parametrize(
    ("kls", "holds"), [((0.03, 0.02, 0.01), True), ((0.03, 0.005, 0.01), False), ((0.01, 0.01, 0.01), None)]
)
def test_the_ratio_claim_compares_every_step(kls, holds):
    """Holds if every step up is better, fails if one step is worse though the ends are better; flat is no verdict."""
    rows = [row(kl=kl, retention=r) for r, kl in zip((0.75, 0.9, 1.0), kls, strict=True)]
    assert verdicts(*rows) == {"prefill: 4/2 gets better with the ratio (table 2, figure 11)": holds}


def test_signals_are_compared_at_the_same_setting():
    """Heavy hitters beat random and lose to load at one setting; the other setting has no random to compare with."""
    rows = [
        row(kl=kl, study="signals", retention=0.75, importance=signal, heavy_hitters=0.2)
        for signal, kl in (("heavy-hitters", 0.02), ("load", 0.01), ("random", 0.05))
    ]
    rows.append(row(kl=0.5, study="signals", retention=0.9, importance="load"))
    assert verdicts(*rows) == {
        "prefill 4/2 r 0.75: heavy-hitters 0.2 keeps more than random (figure 3)": True,
        "prefill 4/2 r 0.75: load keeps more than random (figure 3)": True,
        "prefill 4/2 r 0.75: heavy-hitters 0.2 keeps more than load (figure 3)": False,
    }


def test_more_bits_are_mentioned():
    """The figures of a setting that reads more bits per weight say how many more; equal bits are not mentioned."""

    def measured(depth: str, kl: float, at_four: int) -> EvalRow:
        settings = RunSettings(levels=(4, 2), retention=0.75, exact=True, depth=depth)
        use = ExpertUse(scheduled={4: at_four, 2: 4 - at_four})
        return setting_row(Arm(settings, ("decode",), "depth"), "decode", Quality(100, 10, kl, 0, 1), use)

    equal = measured("equal", 0.02, at_four=2)
    for at_four, mentioned in ((3, True), (2, False)):
        (claim,) = claims_of([measured("cosine", 0.01, at_four), equal])
        assert claim.holds
        assert claim.figures.endswith("; it reads 0.50 bits more") is mentioned


@pytest.mark.parametrize(
    ("kls", "holds"), [((4, 3, 2, 1), True), ((1, 2, 3, 4), False), ((1, 2, 2, 1), None)]
)
def test_layers_are_compared_in_halves(kls, holds):
    """The first half of the layers is compared with the second, in any order of the rows."""
    rows = [lowered_row(layer, 4, Quality(9, 5.0, kl / 100, 0.0, 1.0)) for layer, kl in enumerate(kls)]
    (claim,) = claims_of(rows[::-1])
    assert claim.claim.startswith("bf16/2 in one layer: ")
    assert claim.holds is holds
    assert {row.bits_per_weight_read for row in rows} == {(3 * 16 + 2.5) / 4}
    assert claim.figures.endswith(", ".join(f"{kl / 100:.5f}" for kl in kls))


def test_without_kl_there_are_no_claims():
    """Rows of a run without a reference have no verdicts."""
    made = Arm(RunSettings(levels=(4, 2), exact=True), ("prefill",), TABLE)
    unmeasured = setting_row(made, "prefill", Quality(10, 5.0, None, None, None), ExpertUse())
    assert claims_of([unmeasured, unmeasured]) == []
    assert (unmeasured.bits_per_weight_read, unmeasured.effective_retention) == (None, None)


def test_quality_tables():
    """Each study has a table of its own under its name; a missing figure is a dash."""
    study = row(study="signals", importance="random")
    lines = quality_lines([with_accuracy(bf16(), {"sums": 1.0, "words": 0.5}), row(), study])
    assert lines[0].split()[:5] == ["setting", "phase", "perplexity", "KL", "+-"]
    assert lines[1].split()[0] == "bf16"
    assert lines[1].split()[-1] == "0.750"
    assert lines[2].split()[-1] == "-"
    assert lines[3:5] == ["", "study: signals"]
    assert "random" in lines[6]
    assert len(lines) == 7


def routing(correlation: float | None, layer: int = 0, share: float = 0.1) -> RoutingRow:
    return RoutingRow(layer, share, correlation, None, 0.25, [30, 10], [3, 1])


def test_correlations_are_compared_over_layers():
    """The mean over layers that have one decides, for each fraction of heavy hitters."""
    rows = [routing(0.9), routing(0.6, 1), routing(None, 2), routing(0.5, 0, 0.2)]
    few, many = routing_claims(rows)
    assert (few.holds, many.holds) == (True, False)
    assert few.figures.startswith("mean correlation 0.750")
    assert routing_claims([routing(None)]) == routing_claims([]) == []


@pytest.mark.parametrize(("cosines", "holds"), [((0.9, 0.8), True), ((0.9, 0.6), False)])
def test_likeness_must_last_over_the_depth(cosines, holds):
    """One pair of layers that differs is enough."""
    rows = [SimilarityRow(layer, layer + 1, cosine, 0.1, 9) for layer, cosine in enumerate(cosines)]
    (claim,) = similarity_claims(rows)
    assert claim.holds is holds
    assert similarity_claims([]) == []


def test_tables_of_what_routers_do():
    """A line for each row; a missing correlation is a dash, and the most loaded expert has its fraction."""
    name, title, line = routing_lines([routing(0.9)])
    assert name.startswith("study: routing")
    assert title.split()[:3] == ["layer", "heavy", "hitters"]
    assert line.split() == ["0", "0.1", "0.900", "-", "0.250", "0.750", "0.750"]
    _, _, line = similarity_lines([SimilarityRow(0, 2, 0.5, 0.125, 9)])
    assert line.split() == ["0", "2", "0.500", "0.125", "9"]
    assert routing_lines([]) == similarity_lines([]) == []


@pytest.mark.parametrize(
    "study", sorted({*STUDIES} - {"papers-table", "routing", "similarity", "lynx-tasks", *DOMAINS})
)
def test_every_study_has_a_table(study):
    """Its name stands above a line for the row."""
    lines = quality_lines([row(study=study)])
    assert lines[1] == f"study: {study}"
    assert len(lines) == 4


def test_the_table_of_tasks():
    """A line for each kind, a column for each setting, though a setting has a row for each phase."""
    rows = [with_accuracy(r, {"sums": 0.25, "words": 0.5}) for r in (bf16(), row(), row(phase="decode"))]
    lines = [line.split() for line in task_lines(rows)]
    assert lines == [
        ["task", "bf16", "4/2", "r", "0.75"],
        ["sums", "0.250", "0.250"],
        ["words", "0.500", "0.500"],
        ["all", "kinds", "0.375", "0.375"],
    ]
    assert task_lines([row()]) == []


def test_lines_of_verdicts():
    """A claim that does not hold stands out, with its figures."""
    rows = [row(kl=0.05, retention=0.75), row((4, 0), 0.02, retention=0.75)]
    _, line = claim_lines(claims_of(rows))
    assert line.startswith("DOES NOT HOLD: prefill: at r 0.75, 4/2 is better than 4/0")
    assert "4/2: KL 0.05000" in line


def test_a_plot_needs_figures(tmp_path):
    """Without any KL there is nothing to draw, and nothing is written."""
    path = tmp_path / "kl.png"
    with pytest.raises(UserError, match="no row"):
        plot_kl([bf16()], path)
    assert not path.exists()


@pytest.mark.e2e
def test_a_plot_that_cannot_be_written(tmp_path):
    """A missing folder is a user error that names the file."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="kl"):
        plot_kl([row()], tmp_path / "none" / "kl.png")


def phased(name: str, kl: float, stderr: float = 0.0001) -> EvalRow:
    return replace(row(kl=kl, stderr=stderr, study="lynx-sensitivity"), variation=name)


@pytest.mark.parametrize(
    ("prefill", "decode", "holds"), [(0.02, 0.01, True), (0.01, 0.02, False), (0.02, 0.02, None)]
)
def test_the_claim_on_phases(prefill, decode, holds):
    """Lynx, figure 9: agreement in new tokens is to cost less than in prompts."""
    [claim] = claims_of([phased("prefill alone", prefill), phased("decode alone", decode)])
    assert (claim.holds, "figure 9" in claim.claim) == (holds, True)


@pytest.mark.parametrize(("won", "losses", "holds"), [(3, 5, True), (0, 60, False), (20, 30, None)])
def test_the_claim_on_tasks(won, losses, holds):
    """Of 1,000 turns; a point is ten of them, and noise two standard errors; the first row makes no claim."""
    measured = replace(row(study="lynx-tasks"), kl=None, active=0.7, turns=1000, won=won, lost=losses)
    [claim] = claims_of([replace(measured, active=None, won=0, lost=0), measured])
    assert claim.holds is holds
    assert f"{(won - losses) / 10:+.2f} points" in claim.figures
