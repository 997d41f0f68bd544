"""One evaluation: the reference first, then every setting through an engine."""

from __future__ import annotations

from contextlib import ExitStack

from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.accuracy import ChatTasks
from edgemoe.evaluate.arm_rows import ArmRows
from edgemoe.evaluate.compensation.arms import with_gains
from edgemoe.evaluate.environment import conditions
from edgemoe.evaluate.hotness import HotnessRow, hotness_rows
from edgemoe.evaluate.lynx.cached import cached_rows
from edgemoe.evaluate.plans import eval_plans, possible_arms, require_enough
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.reference_rows import reference_rows
from edgemoe.evaluate.report import report_of
from edgemoe.evaluate.request import EvalReport, EvalRequest
from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.score import Windows, text_windows
from edgemoe.evaluate.settings_runs import SettingsRuns
from edgemoe.evaluate.studies import DOMAINS
from edgemoe.models.tokenizer import load_tokenizer


def run_eval(store: StoreModel, request: EvalRequest) -> EvalReport:
    """Measures the reference, frees it, then measures the settings; settings of one plan share an engine.

    Shows progress and remaining time of the reference and of each setting on stderr, text and tasks apart.

    Raises:
        UserError: the text or the reference is unusable, tasks are wanted of a model without a chat template, or there
            are fewer windows or tasks than a study runs at once.
        DoesNotFit: the limits are too small, or the disk for the reference's logits.
    """
    arms, left_out = possible_arms(request.arms, store)
    tokenizer = load_tokenizer(store.directory)
    windows: Windows = []
    if request.text:
        windows = text_windows(tokenizer, request.text, request.tokens, request.window)
    tasks = ChatTasks.of_store(store.directory, tokenizer, request.task_count, request.seed)
    require_enough(arms, windows, len(tasks))
    plans = eval_plans(store, request)  # limits that are too small are reported before the reference runs
    with ExitStack() as stack:
        rows: list[EvalRow] = []
        logits = None
        if request.reference:
            logits = stack.enter_context(LogitFile(sum(map(len, windows)), store.shape.vocab))
            layers = "layers" in request.observed
            rows += reference_rows(store, request.reference, windows, tasks, logits, layers=layers)
        runs = SettingsRuns(store, request, ArmRows(windows, tasks, logits, request.seed))
        for plan, some in plans:
            rows += runs.run(plan, some)
        rows += cached_rows(store, [arm for arm in arms if arm.cache], windows, logits)
        observed = runs.observe(plans[0][0], windows)
    hotness = _hotness(store, request)
    rows = list(with_gains(rows))
    environment = conditions(store, request, windows)
    environment |= {"damage": runs.damage, "prefill_rows": plans[0][0].prefill_rows}
    return report_of(request, environment, rows, left_out, observed, hotness)


def _hotness(store: StoreModel, request: EvalRequest) -> list[HotnessRow]:
    """The rows of the studies of hotness that are wanted."""
    rows: list[HotnessRow] = []
    for study in DOMAINS:
        if study in request.observed:
            assert request.reference
            sizes = request.tokens, request.window
            changes = study == DOMAINS[1]
            rows += hotness_rows(store, request.reference, request.domains, *sizes, changes=changes)
    return rows
