"""Stores of any shape and source, exported and converted back, have equal codes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from bpe_tokenizer import save_bpe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import convert
from edgemoe.storage.export.levels import one_level
from edgemoe.storage.export.run import export
from edgemoe.storage.formats.source_codes import SourceCodes
from edgemoe.storage.record.encode import assemble, quantize_matrix
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.writer import StoreWriter

EXPERTS, LAYER = 2, 0
SIZES = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts_per_tok": 2}
SIZES |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": True}
MULTIPLIERS = {"embedding_multiplier": 12, "attention_multiplier": 0.3, "residual_multiplier": 0.22}
CONFIGS = {
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True, "head_dim": 32, "num_key_value_heads": 1},
    "mixtral": {"num_local_experts": EXPERTS, "num_key_value_heads": 1, "sliding_window": None},
    "olmoe": {"num_experts": EXPERTS, "num_key_value_heads": 2},
    "granitemoe": {
        "num_local_experts": EXPERTS,
        "num_key_value_heads": 1,
        "logits_scaling": 6,
        **MULTIPLIERS,
    },
}
"""model_type -> its config in addition to SIZES."""


@st.composite
def stores(draw):
    """(hidden, inner, groups of gate_up and down, whether the source is symmetric, layout, seed, family)."""
    groups = draw(st.tuples(st.sampled_from([32, 64, 128]), st.sampled_from([32, 64])))
    hidden, inner = (group * draw(st.integers(1, 3)) for group in groups)
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    seed, family = draw(st.integers(0, 1 << 20)), draw(st.sampled_from(sorted(CONFIGS)))
    return hidden, inner, groups, draw(st.booleans()), layout, seed, family


def four_bit(rows: int, cols: int, group: int, symmetric: bool) -> SourceCodes:
    """Random codes with steps and centres of a bf16 each, as a 4-bit checkpoint has them."""
    groups = cols // group
    scale = (torch.rand(rows, groups) * 0.02 + 0.002).bfloat16().float()
    centre = torch.zeros(rows, groups)
    if not symmetric:
        centre = (torch.randn(rows, groups) * 0.02).bfloat16().float()
    return SourceCodes(torch.randint(0, 16, (rows, cols), dtype=torch.uint8), scale, centre, group)


def write_store(directory: Path, drawn) -> tuple[Manifest, list[list[SourceCodes]]]:
    """A store of one layer, with a tokenizer and dense weights, and the matrices that it holds."""
    hidden, inner, (up, down), symmetric, layout, seed, model_type = drawn
    torch.manual_seed(seed)
    geometry = RecordGeometry(
        (MatrixSpec.of("gate_up", 2 * inner, hidden, up), MatrixSpec.of("down", hidden, inner, down)), 4
    )
    matrices = [
        [four_bit(2 * inner, hidden, up, symmetric), four_bit(hidden, inner, down, symmetric)]
        for _ in range(EXPERTS)
    ]
    records = [
        assemble(
            geometry,
            LAYOUTS[layout],
            [quantize_matrix(m, s) for m, s in zip(pair, geometry.matrices, strict=True)],
        )
        for pair in matrices
    ]
    config = {"model_type": model_type, "hidden_size": hidden, **SIZES, **CONFIGS[model_type]}
    config["moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"] = inner
    family = family_of(config)
    source = directory.with_name("companions")
    source.mkdir()
    save_bpe(source)
    (source / "config.json").write_text(json.dumps(config))
    dense = {"model.norm.weight": torch.randn(hidden).bfloat16()}
    dense["model.embed_tokens.weight"] = torch.randn(40, hidden).bfloat16()
    dense[family.router(LAYER)] = torch.randn(EXPERTS, hidden).bfloat16()
    specs = {name: ("BF16", tensor.shape) for name, tensor in dense.items()}
    with StoreWriter(
        directory, geometry=geometry, layout=LAYOUTS[layout], source="f00d", dense_bits=16
    ) as writer:
        writer.write_layer(LAYER, EXPERTS, records)
        writer.write_dense(specs, dense.items())
        for path in sorted(source.iterdir()):
            writer.copy(path)
        return writer.finish(), matrices


def exported(store: Path, to: Path, format: str) -> Checkpoint:
    config = json.loads((store / "config.json").read_text())
    manifest = Manifest.load(store)
    levels = one_level(manifest, manifest.max_level)
    export(store, to, family_of(config), format=format, levels=levels, progress=lambda done, total: None)
    return Checkpoint.open(to)


def read_back(checkpoint: Checkpoint) -> list[tuple[SourceCodes, SourceCodes]]:
    experts = ExpertWeights(checkpoint, family_of(checkpoint.config))
    return [experts.read(LAYER, number) for number in range(EXPERTS)]


def wide(values: torch.Tensor, group: int, cols: int) -> torch.Tensor:
    return values.repeat_interleave(group, 1)[:, :cols]


QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.e2e
@given(stores())
@QUICK
def test_gguf_gives_the_same_codes_back(drawn):
    """SourceCodes and steps are the store's, for any groups and centres; a centre moves by the rounding of float16."""
    with tempfile.TemporaryDirectory() as name:
        _, matrices = write_store(Path(name) / "store", drawn)
        for pair, found in zip(
            matrices, read_back(exported(Path(name) / "store", Path(name) / "out", "gguf")), strict=True
        ):
            for wanted, matrix in zip(pair, found, strict=True):
                cols = wanted.codes.shape[1]
                assert torch.equal(matrix.codes, wanted.codes)
                steps = wide(wanted.scale, wanted.group, cols)
                assert torch.equal(wide(matrix.scale, matrix.group, cols), steps)
                moved = wide(matrix.centre, matrix.group, cols) - wide(wanted.centre, wanted.group, cols)
                assert bool((moved.abs() <= (8 * steps + 0.08) / 2048).all())


@pytest.mark.e2e
@given(stores())
@QUICK
def test_compressed_tensors_gives_the_same_codes_back(drawn):
    """A symmetric store comes back as it was; of others the codes that were exported come back, for good."""
    symmetric = drawn[3]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _, matrices = write_store(root / "store", drawn)
        checkpoint = exported(root / "store", root / "out", "compressed-tensors")
        found = read_back(checkpoint)
        if symmetric:
            for pair, back in zip(matrices, found, strict=True):
                for wanted, matrix in zip(pair, back, strict=True):
                    cols = wanted.codes.shape[1]
                    assert torch.equal(matrix.codes, wanted.codes)
                    steps = wide(wanted.scale, wanted.group, cols)
                    assert torch.equal(wide(matrix.scale, matrix.group, cols), steps)
        again = root / "again"
        options = {"max_level": None, "layout": LAYOUTS[drawn[4]], "dense_bits": 16}
        convert(
            root / "out", again, family_of(checkpoint.config), **options, progress=lambda done, total: None
        )
        exported(again, root / "twice", "compressed-tensors")
        first, second = (load_file(root / place / "model.safetensors") for place in ("out", "twice"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)


@pytest.mark.e2e
@given(stores())
@settings(QUICK, max_examples=10)
def test_safetensors_gives_the_same_weights_back(drawn):
    """bf16 weights differ from the store's by bf16's rounding alone."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _, matrices = write_store(root / "store", drawn)
        for pair, found in zip(
            matrices, read_back(exported(root / "store", root / "out", "safetensors")), strict=True
        ):
            for wanted, matrix in zip(pair, found, strict=True):
                weights = wanted.weights()
                assert bool(((matrix.float() - weights).abs() <= weights.abs() / 256 + 1e-6).all())


def test_the_printed_error_is_that_of_the_files(tmp_path):
    """The error that `export` returns, against weights computed from the files and the source by hand."""
    drawn = (64, 32, (64, 32), False, "cpu-generic", 11, "qwen3_moe")
    manifest, matrices = write_store(tmp_path / "store", drawn)
    family = family_of(json.loads((tmp_path / "store" / "config.json").read_text()))
    errors = export(
        tmp_path / "store",
        tmp_path / "out",
        family,
        format="compressed-tensors",
        levels=one_level(manifest, 4),
        progress=lambda done, total: None,
    )
    found = read_back(Checkpoint.open(tmp_path / "out"))
    squared = total = 0.0
    for pair, back in zip(matrices, found, strict=True):
        for wanted, matrix in zip(pair, back, strict=True):
            squared += float((matrix.weights() - wanted.weights()).square().sum())
            total += float(wanted.weights().square().sum())
    assert errors.total == pytest.approx(total, rel=1e-4)
    assert errors.exported == pytest.approx(squared, rel=1e-3)
    assert errors.own == 0
    assert (errors.kept, errors.groups) == (0, EXPERTS * (2 * 32 * 2 + 64))
