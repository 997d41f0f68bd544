"""Exact levels: limits, tiers and reader threads change the time of an answer, never one bit of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from integrity import check_integrity
from pairwise import pairwise

from edgemoe.kernels.registry import compute
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint

pytestmark = pytest.mark.e2e

PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(2)).tolist()
DECODED = [11, 250, 11, 42, 99, 7, 180, 64]


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory) -> Path:
    """The tiny model with 4 experts per token: a sum of two would be equal in any order."""
    directory = tmp_path_factory.mktemp("four")
    source = Path(shutil.copytree(checkpoint, directory / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    convert_checkpoint(source, directory / "store", max_level=8, layout="auto", dense_bits=16)
    return directory / "store"


@pytest.fixture
def logits(open_engine, store):
    """Runs the prompt, then the decoded tokens, on an engine of given options: (logits [9, vocab], its counts)."""

    def run(**how: Any):
        engine = open_engine(store, **how)
        sequence = engine.sequences.new()
        rows = [engine.prefill(sequence, PROMPT)]
        rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
        assert sequence.length == len(PROMPT) + len(DECODED)
        for tier in (engine.vram, engine.dram):
            if tier is not None:
                check_integrity(tier)
        return torch.stack(rows), engine.take_counts()

    return run


@pytest.mark.parametrize(
    ("level", "readers", "kv"),
    [(8, 1, "bf16"), (4, 4, "bf16"), (2, 4, "bf16"), (8, 4, "q8_0"), (4, 1, "q4_0")],
)
def test_limits_do_not_change_a_bit(logits, level: int, readers: int, kv: str):
    """Bits do not change with all experts resident, the smallest limit, a middle one, and three second tiers."""
    want, counts = logits(level=level, kv=kv)
    assert counts.ssd_bytes > 0
    reads, hits = {}, {}
    for experts in (2, 7):
        for dram in (0, 3, 14):
            got, counts = logits(level=level, experts=experts, dram_experts=dram, readers=readers, kv=kv)
            assert torch.equal(got, want), (experts, dram)
            assert counts.levels == {level: counts.requests}
            reads[experts, dram] = counts.ssd_bytes
            hits[experts, dram] = counts.dram_hits
    assert reads[2, 0] > reads[7, 0] > reads[7, 14]
    assert hits[7, 14] > hits[7, 0] == 0


def test_levels_differ(logits):
    """Fewer bits give other logits, so the test above does not compare logits without experts."""
    eight, four, two = (logits(level=level)[0] for level in (8, 4, 2))
    assert not torch.equal(eight, four)
    assert (two - eight).norm() > 2 * (four - eight).norm()


def test_formats_of_the_kv_differ(logits):
    """Other keys and values give other logits, so the test above does not compare one format with itself."""
    exact, eight, four = (logits(level=8, kv=kv)[0] for kv in ("bf16", "q8_0", "q4_0"))
    assert not torch.equal(exact, eight)
    assert not torch.equal(exact, four)
    assert not torch.equal(eight, four)


@pytest.mark.skipif(
    compute().name != "native", reason="another kernel's attention sums by the rows of a call"
)
@pytest.mark.parametrize(("level", "kv"), [(8, "bf16"), (4, "bf16"), (4, "q8_0"), (4, "q4_0")])
def test_a_token_has_the_bits_that_it_has_in_a_prompt(open_engine, tiny_store, level: int, kv: str):
    """A token has its bits in a prompt, in two calls, or one by one from the third on, attending to up to 180."""
    engine = open_engine(tiny_store, level=level, kv=kv, context=192)
    tokens = torch.randint(3, 300, (180,), generator=torch.Generator().manual_seed(3)).tolist()

    def run(*ends: int) -> torch.Tensor:
        sequence, found = engine.sequences.new(), []
        for start, end in zip((0, *ends), ends, strict=False):
            found.append(engine.all_logits(sequence, tokens[start:end], decode=True))
        engine.sequences.end(sequence)
        return torch.cat(found)

    whole = run(180)
    assert torch.equal(run(70, 180), whole)
    assert torch.equal(run(*range(3, 181)), whole)


@pairwise(alone=["level", "other"], level=[8, 4, 2], other=["cpu-avx2", "cpu-avx512"])
def test_a_store_of_another_layout_answers_the_same_and_warns(
    checkpoint, tiny_store, open_engine, tmp_path, caplog, other, level
):
    """Records packed for another kernel are re-laid out on arrival, with equal bits and one warning."""
    if other == compute().layout.name:
        pytest.skip("the kernel reads this layout")
    convert_checkpoint(checkpoint, tmp_path / "other", max_level=8, layout=other, dense_bits=16)
    answers = []
    for directory in (tiny_store, tmp_path / "other"):
        caplog.clear()
        engine = open_engine(directory, level=level, experts=3)
        answers.append(engine.prefill(engine.sequences.new(), PROMPT))
    assert torch.equal(*answers)
    assert [
        f"layout {other}," in record.message and compute().layout.name in record.message
        for record in caplog.records
    ] == [True]
