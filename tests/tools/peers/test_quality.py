"""The comparison of quality with llama.cpp: its 16-bit file, bits per weight, the table, and a failed tool."""

from __future__ import annotations

from argparse import Namespace
from math import prod
from pathlib import Path

import gguf
import pytest
import torch
from family_models import random_model, save

from edgemoe.errors import UserError
from edgemoe.families.table import family_of
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.store.manifest import Manifest
from tools.peers.bf16_gguf import write_gguf
from tools.peers.llama_types import Llama
from tools.peers.quality_rows import Row, best_within, bits_of_gguf, bits_of_store, draw, table


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a small random checkpoint."""
    directory = tmp_path_factory.mktemp("quality")
    save(random_model("qwen3_moe"), directory / "model", fused=False)
    return directory / "model"


def test_the_16_bit_file_has_the_checkpoints_weights(model, tmp_path):
    """Read back as a model: experts bit for bit, and the other matrices to float16's rounding."""
    write_gguf(model, tmp_path / "model.gguf")
    theirs, ours = Checkpoint.open(tmp_path / "model.gguf"), Checkpoint.open(model)
    experts = [ExpertWeights(each, family_of(each.config)) for each in (theirs, ours)]
    for layer in experts[1].layers:
        read, wanted = (each.read(layer, 1) for each in experts)
        assert all(torch.equal(a.bfloat16(), b.bfloat16()) for a, b in zip(read, wanted, strict=True))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(
            theirs[name].read().float(), ours[name].read().float(), rtol=2**-9, atol=1e-7
        )
    assert 16 < bits_of_gguf(gguf.GGUFReader(tmp_path / "model.gguf")) < 18  # norms and routers have 32


def test_bits_of_a_store_count_codes_parameters_and_dense_tensors(model, tmp_path):
    """A level more or less changes the result by its bits for each weight of an expert; the rest is counted by hand."""
    convert_checkpoint(model, tmp_path / "store", max_level=8, layout="cpu-generic", dense_bits=16)
    manifest, opened = Manifest.load(tmp_path / "store"), Checkpoint.open(model)
    experts = ExpertWeights(opened, family_of(opened.config))
    sizes = {name: prod(opened[name].shape) for name in opened.names()}
    weights, own = sum(sizes.values()), sum(sizes[name] for name in experts.names)
    assert [matrix.group for matrix in manifest.geometry.matrices] == [64, 32]
    expert = 8 + 32 / 64 * 2 / 3 + 32 / 32 / 3  # gate and up have two thirds of the weights
    bits = bits_of_store(tmp_path / "store", manifest, 8.5, weights)
    assert bits == pytest.approx((own * expert + 16 * (weights - own)) / weights)
    less = bits_of_store(tmp_path / "store", manifest, 4.5, weights)
    assert bits - less == pytest.approx(4 * own / weights)


ROWS = [
    Row("llama.cpp", "Q4_0", 4.5, 0.004, 0.001),
    Row("edgemoe, a", "level 4", 4.5, 0.002, 0.001),
    Row("edgemoe, a", "level 8", 8.5, 0.001, 0.001),
    Row("edgemoe, a", "4 bits", 4.4, 0.0015, 0.001, mixed=True),
    Row("llama.cpp", "Q2_K", 3.0, 0.02, None),
]


def test_rows_stand_next_to_the_best_of_at_most_their_bits(tmp_path):
    """Q4_0 next to level 4 and not to level 8; Q2_K next to nothing; one level and mixed ones apart."""
    assert best_within(ROWS, 4.5, mixed=False) == ROWS[1]
    assert best_within(ROWS, 3.0, mixed=True) is None
    lines = table(ROWS).splitlines()
    assert lines[2].startswith("| edgemoe, a | level 8 |")
    ours = "0.00200 (level 4, 4.50 bits) | 0.00150 (4 bits, 4.40 bits)"
    assert f"| llama.cpp | Q4_0 | 4.50 | 0.00400 | {ours} |" in lines
    assert "| llama.cpp | Q2_K | 3.00 | 0.02000 |  |  |" in lines
    draw(ROWS, tmp_path / "plot.svg")
    assert "<!-- Q4_0 -->" in (tmp_path / "plot.svg").read_text()


def test_a_tool_that_fails_leaves_no_file_of_a_type(tmp_path):
    """llama-quantize exits with 1 after it has begun a file."""
    tool = tmp_path / "llama-quantize"
    tool.write_text('#!/bin/sh\necho begun > "$2"\necho "no such type" >&2\nexit 1\n')
    tool.chmod(0o755)
    options = Namespace(checkpoint=Path("demo"), place=tmp_path, llama_bin=tmp_path, threads=1)
    with pytest.raises(UserError, match="no such type"):
        Llama(options, [], None, 0)._quantized("Q4_0")
    assert not list(tmp_path.glob("*Q4_0.gguf"))
