"""tools/task_text.py: chats of held-out tasks as a text."""

from __future__ import annotations

from edgemoe.evaluate.tasks import KINDS, held_out_tasks
from tools.task_text import main


def test_kinds_take_turns(capsys):
    """The questions and answers of the evaluation's own tasks, a task of each kind before the second of any."""
    assert main(["--count", "2", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    wanted = [held_out_tasks(kind, 2, 3)[number] for number in range(2) for kind in KINDS]
    at = -1
    for turn in (turn for task in wanted for turn in task.turns):
        at = text.index(turn.question, at + 1)
        assert text.index(turn.answer, at) < at + len(turn.question) + len(turn.answer) + 40


def test_a_model_without_a_tokenizer_is_refused(tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) != 0
    assert capsys.readouterr().err
