"""tools/synthetic/store.py: the statistics and tensors of the stores that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from edgemoe.bench.synthetic import workload
from edgemoe.errors import MissingTensor, ModelRefused, UserError
from edgemoe.storage.base import ExpertKey, Plane
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader
from tools.synthetic import store as synthetic_store
from tools.synthetic.gguf_dense import Gguf


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for tiny experts: the tool's is for experts of millions of weights."""
    monkeypatch.setattr(workload, "POOL", 1 << 13)


def make(directory: Path, *options: str) -> Path:
    assert synthetic_store.main(["--like", "tiny", *options, str(directory)]) == 0
    return directory


def weights(store: Path, key: ExpertKey, level: int) -> list[torch.Tensor]:
    manifest = Manifest.load(store)
    reader = RecordReader.open(store, manifest)
    record = np.empty(manifest.geometry.record_bytes + 4096, np.uint8)
    record = record[-record.ctypes.data % 4096 :][: manifest.geometry.record_bytes]
    last = Plane.D8 if manifest.max_level == 8 else Plane.D4
    reader.read(key, Plane.BASE, last, [memoryview(record)])
    reader.close()
    return decode(record, manifest.geometry, LAYOUTS[manifest.layout], level)


def test_experts_look_like_quantized_gaussians(tmp_path: Path) -> None:
    """Weights have variance 1 / inputs, and each level has the measured loss of quantized Gaussians."""
    store = make(tmp_path / "s")
    at = {
        level: torch.cat([weights(store, ExpertKey(1, e), level)[0] for e in range(8)]) for level in (8, 4, 2)
    }
    assert at[8].shape == (8 * 64, 64)
    assert at[8].std().item() == pytest.approx(64**-0.5, rel=0.02)
    # 0.0878 and 0.352: relative Frobenius errors of levels 4 and 2 on Gaussian weights in groups of 64.
    for level, expected in {4: 0.0878, 2: 0.352}.items():
        assert ((at[level] - at[8]).norm() / at[8].norm()).item() == pytest.approx(expected, rel=0.03)


def test_experts_are_distinct_and_reproducible(tmp_path: Path) -> None:
    """No two experts are equal; an equal seed gives an equal store, another seed another store."""
    one, same = make(tmp_path / "a"), make(tmp_path / "b")
    other = make(tmp_path / "c", "--seed", "1")
    everything = [weights(one, ExpertKey(layer, e), 8)[1] for layer in range(2) for e in range(8)]
    for i, matrix in enumerate(everything):
        assert all((matrix != later).float().mean() > 0.9 for later in everything[i + 1 :])
    for path in one.iterdir():
        assert path.read_bytes() == (same / path.name).read_bytes(), path.name
    assert not torch.equal(weights(one, ExpertKey(0, 0), 8)[0], weights(other, ExpertKey(0, 0), 8)[0])


def test_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run interrupted in the second layer and resumed gives the bytes of an uninterrupted run."""
    whole = make(tmp_path / "whole")
    drawn: list[int] = []
    records = workload.ExpertPool.records

    def interrupted(pool: Any, layer: int, count: int) -> Any:
        drawn.append(layer)
        if layer == 1 and drawn == [0, 1]:
            raise KeyboardInterrupt
        return records(pool, layer, count)

    monkeypatch.setattr(workload.ExpertPool, "records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "torn")
    torn = make(tmp_path / "torn")
    assert drawn == [0, 1, 1], "the first layer must not be drawn twice"
    assert {p.name: p.read_bytes() for p in torn.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def test_dense_weights_at_8_bits(tmp_path: Path) -> None:
    """Matrices become int8 with one scale per row, close to bf16; norms and routers stay."""
    full = load_file(make(tmp_path / "16") / "dense.safetensors")
    small = load_file(make(tmp_path / "8", "--dense-bits", "8") / "dense.safetensors")
    for name, tensor in full.items():
        if tensor.ndim == 2 and "mlp.gate" not in name:
            assert small[name].dtype == torch.int8
            again = small[name].float() * small[name + "_scale"].float().unsqueeze(1)
            assert (again - tensor.float()).norm() < 0.01 * tensor.float().norm()
        else:
            assert torch.equal(small[name], tensor)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.12), (5, 0.06)])
def test_dense_weights_in_groups(tmp_path: Path, bits: int, error: float) -> None:
    """Matrices but embedding and head become groups, where their shapes allow it."""
    full = load_file(make(tmp_path / "16") / "dense.safetensors")
    small = load_file(make(tmp_path / "few", "--dense-bits", f"{bits}") / "dense.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in small.values())
    for name, tensor in small.items():
        if tensor.dtype == torch.uint8:
            again = dense_groups.decoded(tensor)
            assert (again - full[name].float()).norm() < error * full[name].float().norm()
    assert small["lm_head.weight"].dtype == small["model.embed_tokens.weight"].dtype == torch.int8


def test_routers_are_skewed() -> None:
    """The lengths of a router's rows are lognormal with sigma 0.35."""
    router = workload.random_dense(workload.PRESETS["tiny"], 0, "model.layers.3.mlp.gate.weight", (128, 2048))
    # Of 128 rows: the standard error of a standard deviation is sigma / sqrt(2 * 127) = 0.022.
    assert router.float().norm(dim=1).log().std().item() == pytest.approx(0.35, abs=0.07)


def test_tokenizer(tmp_path: Path) -> None:
    """The tokenizer has exactly --vocab tokens, round-trips text, decodes every token, and has a chat template."""
    store = make(tmp_path / "s", "--vocab", "400")
    assert json.loads((store / "config.json").read_text())["vocab_size"] == 400
    tokenizer = AutoTokenizer.from_pretrained(store)
    assert len(tokenizer) == 400
    text = "Grüße, 世界!\n\tx"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    # 256 bytes and 3 special tokens come first, so token 398 is placeholder 139.
    assert tokenizer.decode([398, 399]).split() == ["word139", "word140"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--like", "tiny", "--vocab", "258"], "259"),
        (["--from-gguf", "x", "--vocab", "300"], "--vocab"),
        (["--like", "tiny", "--layers", "0"], "--layers"),
        ([], "--like"),
    ],
)
def test_impossible_arguments_are_refused(
    tmp_path: Path, options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contradicting or too small options exit 2 with their names before a file is written."""
    try:
        code = synthetic_store.main([*options, str(tmp_path / "s")])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


LAYER = {
    "attn_norm": ("input_layernorm", (64,)),
    "attn_q": ("self_attn.q_proj", (64, 64)),
    "attn_k": ("self_attn.k_proj", (32, 64)),
    "attn_v": ("self_attn.v_proj", (32, 64)),
    "attn_output": ("self_attn.o_proj", (64, 64)),
    "attn_q_norm": ("self_attn.q_norm", (16,)),
    "attn_k_norm": ("self_attn.k_norm", (16,)),
    "ffn_norm": ("post_attention_layernorm", (64,)),
    "ffn_gate_inp": ("mlp.gate", (8, 64)),
}


def write_gguf(
    path: Path, architecture: str = "qwen3moe", without: str = ""
) -> dict[str, np.ndarray[Any, Any]]:
    """A GGUF of one layer, attn_q in Q8_0. Returns its tensors in float32 by transformers' names."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": 1,
        "embedding_length": 64,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 12345.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    names = {f"blk.0.{g}.weight": (f"model.layers.0.{h}.weight", shape) for g, (h, shape) in LAYER.items()}
    names["token_embd.weight"] = ("model.embed_tokens.weight", (300, 64))
    names["output_norm.weight"] = ("model.norm.weight", (64,))
    names["output.weight"] = ("lm_head.weight", (300, 64))
    written = {}
    for name, (hf, shape) in names.items():
        if name == without:
            continue
        array = written[hf] = random.standard_normal(shape, np.float32)
        if name == "blk.0.attn_q.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("tied", [False, True])
def test_dense_weights_from_a_gguf(tmp_path: Path, tied: bool) -> None:
    """Shapes and dense tensors equal the GGUF's: floats up to bf16 rounding, Q8_0 up to its precision."""
    written = write_gguf(tmp_path / "m.gguf", without="output.weight" if tied else "")
    assert synthetic_store.main(["--from-gguf", str(tmp_path / "m.gguf"), str(tmp_path / "s")]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "s")
    sizes = (config.vocab_size, config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    assert (*sizes, config.moe_intermediate_size, config.tie_word_embeddings) == (300, 1, 8, 2, 32, tied)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (12345.0, pytest.approx(1e-5))
    stored = load_file(tmp_path / "s" / "dense.safetensors")
    assert set(stored) == set(written)
    for name, array in written.items():
        expected = torch.from_numpy(array)
        if name.endswith("q_proj.weight"):
            assert (stored[name].float() - expected).norm() < 0.01 * expected.norm()
        else:
            assert torch.equal(stored[name], expected.to(torch.bfloat16)), name
    assert weights(tmp_path / "s", ExpertKey(0, 7), 8)[1].shape == (64, 32)


def test_every_layout_has_the_same_weights(tmp_path: Path) -> None:
    """Stores for a GPU and a CPU have equal weights in another order, for any number of threads."""
    for layout in ("cuda", "cpu-avx2"):
        arguments = ["--like", "tiny", "--max-level", "4", "--layout", layout, str(tmp_path / layout)]
        assert synthetic_store.main(arguments) == 0
        assert json.loads((tmp_path / layout / "store.json").read_text())["layout"] == layout
    for key in (ExpertKey(0, 0), ExpertKey(1, 7)):
        gpus, cpus = (weights(tmp_path / layout, key, 4) for layout in ("cuda", "cpu-avx2"))
        assert all(torch.equal(*pair) for pair in zip(gpus, cpus, strict=True))


def test_unsuitable_gguf_is_refused(tmp_path: Path) -> None:
    """Another architecture, a missing tensor and a file that is no GGUF are refused by name."""
    write_gguf(tmp_path / "llama.gguf", architecture="llama")
    with pytest.raises(ModelRefused, match="llama"):
        Gguf(tmp_path / "llama.gguf")
    write_gguf(tmp_path / "torn.gguf", without="blk.0.attn_v.weight")
    with pytest.raises(MissingTensor, match=r"blk\.0\.attn_v\.weight"):
        Gguf(tmp_path / "torn.gguf").dense("model.layers.0.self_attn.v_proj.weight", (32, 64))
    (tmp_path / "text").write_text("not a GGUF at all")
    with pytest.raises(UserError, match="text"):
        Gguf(tmp_path / "text")
