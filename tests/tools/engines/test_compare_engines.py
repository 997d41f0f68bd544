"""The comparison of engines: equal answers, near-ties and KL, from log-probabilities made by hand; its protocol."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from tools.engines.compare import TIE, compare, run
from tools.engines.own import prompts
from tools.engines.protocol import Answers, Request, log_softmax, serve


def rows(*logits: tuple[float, ...]) -> np.ndarray:
    return log_softmax(np.array(logits, np.float32))


def test_equal_answers_and_equal_rows():
    """Nothing differs."""
    ours = Answers([[0, 1], [2]], rows((3, 0, 0), (0, 3, 0), (0, 0, 3)))
    found = compare(ours, Answers([[0, 1], [2]], ours.logprobs))
    assert (found["same"], found["near_ties"], found["gaps"]) == (2, 0, [])
    assert found["kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("gap", "near"), [(TIE - 0.01, 1), (TIE + 0.01, 0)])
def test_a_different_token_is_a_near_tie_by_our_log_probabilities(gap, near):
    """The second answer's second token differs; the gap is read in that answer's row, and not in another's."""
    ours = Answers([[0], [1, 2]], rows((9, 0, 0), (0, 9, 0), (0, -gap, 0)))
    found = compare(ours, Answers([[0], [1, 1]], ours.logprobs))
    assert (found["same"], found["near_ties"]) == (1, near)
    assert found["gaps"] == ([] if near else [round(gap, 3)])


def test_an_answer_that_ends_earlier_is_not_the_same():
    """The shorter answer is a prefix of the other one."""
    ours = Answers([[0, 1]], rows((9, 0, 0), (0, 9, 0)))
    assert compare(ours, Answers([[0]], ours.logprobs))["same"] == 0


def test_kl_is_that_of_the_engine_from_edgemoe():
    """Halves against three quarters and a quarter, by the definition."""
    ours = Answers([[0]], np.log(np.array([[0.5, 0.5]], np.float32)))
    theirs = Answers([[0]], np.log(np.array([[0.75, 0.25]], np.float32)))
    assert compare(ours, theirs)["kl"] == pytest.approx(
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    )


def test_a_process_gets_the_request_and_returns_answers(tmp_path, monkeypatch):
    """The results of an engine's process come back, answers of any length included."""
    request = Request("model", [[1, 2], [3]], [[4], [5, 6]], 3, [2], 64, 8, 1)
    request.save(tmp_path)
    assert json.loads((tmp_path / "request.json").read_text()) == asdict(request)
    monkeypatch.setattr("sys.argv", ["child", str(tmp_path)])
    logprobs = rows(*[(1.0,) * 8] * 3)
    seen: list[Request] = []

    def answer(task: Request) -> Answers:
        seen.append(task)
        return Answers([[4], [5, 6, 7]], logprobs)

    assert serve(answer) == 0
    assert seen == [request]
    found = Answers.load(tmp_path)
    assert found.tokens == [[4], [5, 6, 7]]
    assert np.array_equal(found.logprobs, logprobs)


@pytest.mark.parametrize("file", ["", "model.gguf"])
def test_a_line_names_what_was_compared(tmp_path, monkeypatch, file):
    """The directory's name, also where the engine loads a file of it; the engine and the level as given."""
    ours = Answers([[0, 1]], rows((9, 0, 0), (0, 9, 0)))
    engine = SimpleNamespace(store=SimpleNamespace(config={"eos_token_id": 2}))
    for name, value in {
        "load_tokenizer": lambda store: SimpleNamespace(eos_token_id=1),
        "prompts": lambda tokenizer, count: [[3, 4]],
        "opened": lambda *given: nullcontext(engine),
        "answers": lambda *given: ours,
        "ask": lambda engine, python, request: ours,
    }.items():
        monkeypatch.setattr(f"tools.engines.compare.{name}", value)
    export = tmp_path / "demo-int4"
    export.mkdir()
    (export / "model.gguf").touch()
    options = Namespace(
        store=tmp_path, export=export / file, engine="llama", python="python", level=4,
        prompts=1, new_tokens=2, threads=1,
    )  # fmt: skip
    found = run(options)
    assert (found["export"], found["engine"], found["level"]) == ("demo-int4", "llama", 4)
    assert found["same"] == 1


def test_prompts_are_distinct_held_out_questions(checkpoint):
    """There are as many questions as wanted, of every kind, none twice."""
    from edgemoe.models.tokenizer import load_tokenizer

    found = prompts(load_tokenizer(checkpoint), 30)
    assert len({tuple(ids) for ids in found}) == len(found) == 30
