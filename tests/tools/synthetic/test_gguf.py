"""tools/synthetic/gguf.py: the package gguf reads its qwen3moe files and finds every tensor."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from edgemoe.bench.synthetic.workload import PRESETS, random_dense
from tools.synthetic import gguf as gguf_tool
from tools.synthetic.gguf_dense import Gguf

pytestmark = pytest.mark.e2e

SMALL = PRESETS["small"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    assert gguf_tool.main(["--like", "small", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def tensors(written: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}


def weights(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_sizes(written: Path) -> None:
    """The shape read back equals the preset's, and every id has a token."""
    assert Gguf(written).shape() == replace(SMALL, eps=float(np.float32(SMALL.eps)))
    tokens = gguf.GGUFReader(written).fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == SMALL.vocab


def test_types(tensors: dict[str, gguf.ReaderTensor]) -> None:
    """Matrices are Q4_K, routers and norms float32, experts fused; 12 tensors per layer and 3 others."""
    assert len(tensors) == 12 * SMALL.layers + 3
    for name, tensor in tensors.items():
        plain = "norm" in name or "ffn_gate_inp" in name
        assert tensor.tensor_type == (Kind.F32 if plain else Kind.Q4_K), name
    assert list(tensors["blk.1.ffn_up_exps.weight"].shape) == [256, 256, 8]


def test_routers_and_dense_weights_equal_the_stores(tensors: dict[str, gguf.ReaderTensor]) -> None:
    """Routers equal the store's exactly, attention up to Q4_K's error."""

    def drawn(name: str, *shape: int) -> np.ndarray:
        return random_dense(SMALL, 0, name, shape).float().numpy()

    router = drawn("model.layers.1.mlp.gate.weight", 8, 256)
    assert np.array_equal(tensors["blk.1.ffn_gate_inp.weight"].data, router)
    query = drawn("model.layers.0.self_attn.q_proj.weight", 256, 256)
    error = np.linalg.norm(weights(tensors["blk.0.attn_q.weight"]) - query) / np.linalg.norm(query)
    assert 0.04 < error < 0.1


def test_experts_are_gaussian_and_distinct(tensors: dict[str, gguf.ReaderTensor]) -> None:
    """Every expert has variance 1 / inputs; no two of any layer or matrix have much in common."""
    experts = [
        expert
        for layer in range(SMALL.layers)
        for matrix in ("gate", "up", "down")
        for expert in tensors[f"blk.{layer}.ffn_{matrix}_exps.weight"].data
    ]
    assert len(experts) == 6 * SMALL.experts
    for i, expert in enumerate(experts):
        assert all((expert != later).mean() > 0.8 for later in experts[i + 1 :])
    down = weights(tensors["blk.0.ffn_down_exps.weight"])
    assert down.std() == pytest.approx(SMALL.inner**-0.5, rel=0.02)
    assert abs(down.mean()) < 0.02 * down.std()


def test_equal_arguments_give_equal_bytes(written: Path, tmp_path: Path) -> None:
    """Equal arguments give equal bytes, another seed gives others, and an existing file is replaced."""
    path = tmp_path / "again.gguf"
    path.write_text("old")
    assert gguf_tool.main(["--like", "small", str(path)]) == 0
    assert path.read_bytes() == written.read_bytes()
    assert gguf_tool.main(["--like", "small", "--seed", "1", str(path)]) == 0
    assert path.read_bytes() != written.read_bytes()


def test_interrupted_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the run leaves neither the file nor a part of it."""
    make = gguf_tool.Tensors.make

    def interrupted(tensors: gguf_tool.Tensors, name: str, size: tuple[int, ...]) -> np.ndarray:
        if name.startswith("blk.1."):
            raise KeyboardInterrupt
        return make(tensors, name, size)

    monkeypatch.setattr(gguf_tool.Tensors, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gguf_tool.main(["--like", "small", str(tmp_path / "torn.gguf")])
    assert list(tmp_path.iterdir()) == []


def test_full_disk_keeps_the_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk during the run exits 3 with the file's name, and the existing file stays."""
    path = tmp_path / "full.gguf"
    path.write_text("old")

    def full(writer: gguf.GGUFWriter, tensor: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    assert gguf_tool.main(["--like", "small", str(path)]) == 3
    assert str(path) in capsys.readouterr().err
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("full.gguf", "old")]


@pytest.mark.parametrize(
    ("options", "message"), [(["--like", "tiny"], "multiples of 256"), (["--vocab", "100"], "259")]
)
def test_impossible_shape_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that Q4_K cannot store and too small a vocabulary exit 2 before a file is written."""
    assert gguf_tool.main([*options, str(tmp_path / "x.gguf")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_torchs_generator_does_not_advance() -> None:
    """Draws depend only on names and the seed, and do not advance torch's global generator."""
    before = torch.get_rng_state()
    gguf_tool.Tensors(SMALL, 0).make("blk.0.ffn_up_exps.weight", (8, 256, 256))
    assert torch.equal(torch.get_rng_state(), before)
