"""chat.tokenizer: hostile tokenizers end in the confined process, as a refusal with what was wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgemoe.errors import ModelRefused
from edgemoe.models import tokenizer as tokenizer_module
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer, try_tokenizer

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def edited(tmp_path) -> Callable[[Edit], Path]:
    """Returns a function that copies the demo's small files and edits its tokenizer.json."""

    def edit(change: Edit) -> Path:
        for file in (*DEMO.glob("*.json"), *DEMO.glob("*.jinja")):
            shutil.copy(file, tmp_path)
        path = tmp_path / "tokenizer.json"
        parsed = json.loads(path.read_text())
        change(parsed)
        path.write_text(json.dumps(parsed))
        return tmp_path

    return edit


def added(content: str, number: int) -> dict[str, Any]:
    """An added token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **flags}


def doubling(pattern: str, content: str) -> dict[str, Any]:
    """Rules that make 2^36 characters of one."""
    rule = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * 36}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "rules", [doubling("a", "aa"), doubling("ⴰ", "ⴰⴰ")], ids=["a letter", "a rare letter"]
)
def test_rules_that_explode_are_refused(edited, monkeypatch, rules):
    """The text grows until a limit ends the process, whichever character the rules wait for."""
    monkeypatch.setattr(tokenizer_module, "MEMORY_BYTES", 200 << 20)
    directory = edited(lambda parsed: parsed.update(normalizer=rules))
    with pytest.raises(ModelRefused, match=r"a tokenizer in .* that works"):
        load_tokenizer(directory)


def test_a_token_beyond_the_vocabulary_is_refused(edited):
    """An id that the embedding has no row for is named, and the model's number of rows."""
    directory = edited(lambda parsed: parsed["model"]["vocab"].update({"Zork": 4096}))
    with pytest.raises(ModelRefused, match=r"token 'Zork' with id 4096, where .* vocab_size 4096"):
        load_tokenizer(directory)


def test_an_added_token_beyond_the_vocabulary_that_no_text_gives(edited):
    """Fine-tunes have a padding token there; one that every text begins with is refused."""
    directory = edited(lambda parsed: parsed["added_tokens"].append(added("Zork", 4096)))
    assert load_tokenizer(directory).convert_tokens_to_ids("Zork") == 4096

    def begins(parsed: dict[str, Any]) -> None:
        parsed["added_tokens"].append(added("Zork", 4096))
        parsed["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "Zork", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"Zork": {"id": "Zork", "ids": [4096], "tokens": ["Zork"]}},
        }

    with pytest.raises(ModelRefused, match="id 4096 in each text"):
        load_tokenizer(edited(begins))


@pytest.mark.e2e
def test_too_many_added_tokens_are_refused(edited, monkeypatch):
    """Adding tens of thousands takes minutes in transformers: the limit of time ends it."""
    monkeypatch.setattr(tokenizer_module, "CPU_SECONDS", 1.0)
    directory = edited(
        lambda parsed: parsed["added_tokens"].extend(added(f"x{i}", 4096 + i) for i in range(60_000))
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 100_000}))
    with pytest.raises(ModelRefused, match=r"more than [13] s"):
        load_tokenizer(directory)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change",
    [
        lambda parsed: parsed.update(model={"type": "BPE"}),
        lambda parsed: parsed["model"].update(vocab={"a": -1}),
        lambda parsed: parsed.update(decoder={"type": "Metaspace", "replacement": ""}),
        lambda parsed: parsed.update(added_tokens="x"),
        lambda parsed: parsed.clear(),
    ],
    ids=["no vocabulary", "a negative id", "a decoder of nothing", "no list", "empty"],
)
def test_whatever_the_library_raises_is_a_refusal(edited, change):
    """Exceptions and panics of tokenizers and transformers become ModelRefused with the directory."""
    with pytest.raises(ModelRefused, match=r"a tokenizer in .* that works"):
        load_tokenizer(edited(change))


@pytest.mark.e2e
def test_the_demo_passes():
    """The sample, every string of its rules and every id."""
    assert try_tokenizer(DEMO, 4096) is None
    assert load_tokenizer(DEMO).decode(load_tokenizer(DEMO)("Hello").input_ids) == "Hello"
