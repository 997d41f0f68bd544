"""docs/session.txt: a screen of known movements, a model of a known answer, and every part of the tool."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.terminal.recitation import write_recitation
from tools.terminal.screen import Screen
from tools.terminal.session import ANSWER, COLUMNS, PARTS, TRANSCRIPT


@pytest.mark.parametrize("name", ["screen", "recitation"])
def test_the_examples_are_correct(name):
    """They show what each does."""
    failed, attempted = doctest.testmod(import_module(f"tools.terminal.{name}"))
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("\x1b[2mdim\x1b[0m\x1b[?25l", ["dim"]),
        ("one\r\ntwo\x1b[1A\r\x1b[2Kup", ["up", "two"]),
        ("one\r\ntwo\r\nthree\x1b[2A\r\x1b[J!", ["!"]),
        ("abcdef\x1b[3D\x1b[Kx", ["abcx"]),
        ("abcdef\b\bx", ["abcdxf"]),
        ("a\x1b[3Cb", ["a   b"]),
        ("x" * 12, ["x" * 10, "xx"]),
        ("\x1b]0;title\x07text", ["text"]),
    ],
)
def test_a_screen_has_what_stays(text, rows):
    """Movements, erasures and the edge of ten columns; colours and titles leave nothing."""
    screen = Screen(10)
    screen.feed(text)
    assert screen.rows == rows


@pytest.mark.e2e
def test_a_recitation_is_given_to_any_prompt(tmp_path):
    """transformers' own generation, without sampling, writes the answer and ends."""
    write_recitation(tmp_path / "tiers", ANSWER)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiers")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiers").eval()
    for prompt in ("What is a tier?", "x"):
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            made = model.generate(ids, do_sample=False, max_new_tokens=200)[0, ids.shape[1] :]
        assert made[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(made, skip_special_tokens=True) == ANSWER.strip()


def test_the_document_has_every_part():
    """In the tool's order, each with what it shows, within the columns; every exit code is there."""
    text = TRANSCRIPT.read_text(encoding="utf-8")
    commands = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    assert commands == [part.line for part in PARTS]
    assert {f"[exit {code}]" for code in (1, 2, 3, 4, 130)} <= set(text.splitlines())
    shown = [line for line in text.splitlines() if not line.startswith(("$ ", "## "))]
    assert max(map(len, shown)) <= COLUMNS
    for note in (keys.note for part in PARTS for keys in part.keys if keys.note):
        assert f"({note})" in shown
