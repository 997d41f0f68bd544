"""GGUF: tensors against the gguf package, whole models against transformers, and broken headers."""

from __future__ import annotations

import shutil
import struct
from contextlib import suppress
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Kind, blocks, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizer import CHAT_TEMPLATE, a_tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from edgemoe.errors import BadHeader, EdgemoeError, MissingTensor, ModelRefused, TruncatedFile
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint, find_gguf
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.formats.gguf_config import REALS
from edgemoe.storage.formats.gguf_header import read_gguf_header
from edgemoe.storage.formats.source_codes import SourceCodes

CODE_BITS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), 4),
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K), 5),
    Kind.Q8_0: 8,
}
"""Types whose codes are kept in a record -> bits of a code."""

SIZES = {
    "vocab_size": 300,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def qwen3():
    """2 layers of 4 experts of 256; weights in float32. Read-only."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=64, num_experts=4, moe_intermediate_size=256, norm_topk_prob=True)
    )


@pytest.fixture(scope="module")
def mixtral():
    """A Mixtral model of the same sizes."""
    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=256))


@pytest.fixture(scope="module")
def olmoe():
    """An OLMoE model of the same sizes, with as many heads of keys as of queries, as all that are published."""
    torch.manual_seed(2)
    sizes = SIZES | {"num_key_value_heads": 4}
    return OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, intermediate_size=256))


@pytest.fixture(scope="module")
def granitemoe():
    """A Granite model of the same sizes, whose multipliers float32 holds exactly."""
    torch.manual_seed(3)
    multipliers = {
        "embedding_multiplier": 6.5,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.25,
        "logits_scaling": 3.0,
    }
    return GraniteMoeForCausalLM(
        GraniteMoeConfig(**SIZES, **multipliers, num_local_experts=4, intermediate_size=256)
    )


FAMILIES = ["qwen3", "mixtral", "olmoe", "granitemoe"]


@pytest.fixture(scope="module")
def file(qwen3, tmp_path_factory) -> Path:
    """The Qwen3 model with experts in F16 and a tokenizer. Read-only."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path, qwen3, a_tokenizer())
    return path


@pytest.fixture
def copy(file, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(file, tmp_path / "tiny.gguf"))


def quantized(kind: Kind):
    """Experts of one type with random codes, since no package here writes all types."""

    def make(name: str, weight: torch.Tensor) -> tuple[np.ndarray, Kind]:
        return blocks(kind, tuple(weight.shape), sum(name.encode())), kind

    return make


@pytest.mark.covers("GGUF")
@pytest.mark.parametrize("kind", [*CODE_BITS, Kind.Q6_K])
def test_tensors_are_what_the_gguf_package_reads(qwen3, tmp_path, kind):
    """Every expert's matrix equals a slice of the tensor that the package dequantizes, and so do its codes."""
    path = tmp_path / "experts.gguf"
    write_model(path, qwen3, experts=quantized(kind))
    opened = Checkpoint.open(path)
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    bits = CODE_BITS.get(kind)
    for part in ("gate", "up", "down"):
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            expected = torch.from_numpy(theirs[f"blk.1.ffn_{part}_exps.weight"][expert].copy())
            assert torch.equal(opened[name].read(), expected)
            assert opened[name].group == (32 if bits else None)
            if bits:
                codes = opened[name].codes()
                assert int(codes.codes.max()) == 2**bits - 1
                torch.testing.assert_close(codes.weights(), expected, rtol=1e-5, atol=1e-6)
    experts = ExpertWeights(opened, family_of(opened.config))
    assert experts.geometry(None).max_level == (4 if bits == 4 else 8)
    if bits == 4:
        with pytest.raises(ModelRefused, match="max-level"):
            experts.geometry(8)


def test_each_matrix_keeps_the_bits_of_its_type(qwen3, tmp_path):
    """With down in Q6_K in one layer, as in Q4_K_M files, Q4_K is kept and down coded again with fewer bits than 8."""

    def mixed(name: str, weight: torch.Tensor):
        return quantized(Kind.Q6_K if name.startswith("blk.1.ffn_down") else Kind.Q4_K)(name, weight)

    path = tmp_path / "mixed.gguf"
    write_model(path, qwen3, experts=mixed)
    opened = Checkpoint.open(path)
    experts = ExpertWeights(opened, family_of(opened.config))
    geometry = experts.geometry(None)
    assert [geometry.of_layer(layer).matrix_bits for layer in (0, 1)] == [(4, 4), (4, 6)]
    assert [geometry.of_layer(layer).max_level for layer in (0, 1)] == [4, 8]
    assert [isinstance(matrix, SourceCodes) for matrix in (*experts.read(0, 0), *experts.read(1, 0))] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.covers("GGUF")
@pytest.mark.parametrize("family", FAMILIES)
def test_its_config_tokenizer_and_template_are_unpacked(family, request, tmp_path):
    """transformers reads every size, every token and the template from the unpacked files."""
    model, tokenizer = request.getfixturevalue(family), a_tokenizer()
    path = tmp_path / "model.gguf"
    write_model(path, model, tokenizer)
    opened = Checkpoint.open(path)
    companions = opened.companions()
    assert {p.name for p in companions} >= {"config.json", "tokenizer.json", "chat_template.jinja"}
    config = AutoConfig.from_pretrained(companions[0].parent)
    for key in (
        *SIZES,
        "model_type",
        "hidden_size",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        *(key for key in REALS if hasattr(model.config, key)),
    ):
        if key != "bos_token_id":
            assert getattr(config, key) == pytest.approx(getattr(model.config, key)), key
    unpacked = AutoTokenizer.from_pretrained(companions[0].parent)
    text = "the quick brown fox, twice<|im_end|>\n"
    assert unpacked(text).input_ids == tokenizer(text).input_ids
    assert unpacked.eos_token == tokenizer.eos_token
    assert unpacked.chat_template == CHAT_TEMPLATE


def test_the_fingerprint_is_the_files_own(file, copy):
    """A copy has the same fingerprint; a changed bit at either end of the data changes it."""
    original = Checkpoint.open(file).fingerprint()
    assert Checkpoint.open(copy).fingerprint() == original
    data = copy.read_bytes()
    copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert Checkpoint.open(copy).fingerprint() != original


def test_a_directory_with_one_file_is_that_file(copy, tmp_path):
    """A directory with one GGUF file opens as that file; with two files it is refused."""
    assert find_gguf(tmp_path) == copy
    assert Checkpoint.open(tmp_path).format == "GGUF"
    shutil.copy(copy, tmp_path / "other.gguf")
    with pytest.raises(ModelRefused, match=r"2 files .*, first other\.gguf"):
        Checkpoint.open(tmp_path)


@pytest.fixture(scope="module")
def split(qwen3, tmp_path_factory) -> Path:
    """The Qwen3 model in parts of five tensors. Read-only."""
    directory = tmp_path_factory.mktemp("split")
    write_model(directory / "tiny.gguf", qwen3, a_tokenizer(), part_tensors=5)
    assert len(list(directory.iterdir())) == 6
    return directory


def test_a_split_model_is_the_model_in_one_file(split, file):
    """Its directory, and every part of it, have the tensors, config and tokenizer of the whole; so has every part."""
    whole, parts = Checkpoint.open(file), [Checkpoint.open(path) for path in (split, *split.iterdir())]
    assert len({part.fingerprint() for part in parts}) == 1
    assert all(part.config == whole.config for part in parts)
    assert parts[0].names() == whole.names()
    for name in whole.names():
        torch.testing.assert_close(parts[0][name].read(), whole[name].read())
    texts = [(path.name, path.read_bytes()) for each in (parts[0], whole) for path in each.companions()]
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]


def test_parts_that_are_no_whole_model_are_refused(split, file, tmp_path):
    """A missing part, one of another model, one tensor twice, a renamed part, and a link out are each named."""

    def refused(match, error=ModelRefused):
        with pytest.raises(error, match=match):
            Checkpoint.open(tmp_path / "m" / first)
        shutil.rmtree(tmp_path / "m")
        shutil.copytree(split, tmp_path / "m")

    first, second, third = sorted(path.name for path in split.iterdir())[:3]
    here = Path(shutil.copytree(split, tmp_path / "m"))
    (here / second).unlink()
    with pytest.raises(ModelRefused, match="not all parts of one, first tiny-00001"):
        find_gguf(here)
    refused(f"{second} in", MissingTensor)
    shutil.copy(here / third, here / second)
    refused(r"part 2 of 6 .* split\.count 6 and split\.no 2")
    shutil.copy(file, here / second)
    refused(r"split\.count 1 and split\.no 0")
    names = {part: read_gguf_header(part).tensors for part in here.iterdir()}
    other, part, name = next(
        (a, part, b)
        for one, part in product(names, names)
        for a, b in product(names[one], names[part])
        if one != part and len(a) == len(b)
    )
    part.write_bytes(part.read_bytes().replace(name.encode(), other.encode()))
    refused("twice", BadHeader)
    (here / second).unlink()
    (here / second).symlink_to(split / second)
    refused("outside")
    alone = Path(shutil.copy(split / second, tmp_path / "alone.gguf"))
    with pytest.raises(ModelRefused, match=r"split\.count 6 and split\.no 1"):
        Checkpoint.open(alone)


def test_a_link_out_of_the_directory_is_refused(file, tmp_path):
    """A GGUF file that links out of the directory is refused."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.gguf").symlink_to(file)
    with pytest.raises(ModelRefused, match="outside"):
        Checkpoint.open(inner)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"expert_count": None}, "experts"),
        ({"block_count": None}, "block_count"),
        ({"embedding_length": 1 << 31}, "hidden_size"),
        ({"expert_count": 1 << 20}, "num_experts"),
        ({"expert_count": 5}, "ffn_gate_exps"),
        ({"rope.freq_base": float("nan")}, "rope_theta"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -2.0}, "factor"),
        ({"attention.head_count": 0}, "num_attention_heads"),
        ({"expert_used_count": 9}, "num_experts_per_tok"),
    ],
)
def test_impossible_values_are_refused(qwen3, tmp_path, change, match):
    """Values have the bounds of config.json, and a missing field is named."""
    write_model(tmp_path / "bad.gguf", qwen3, change=change)
    with pytest.raises((ModelRefused, MissingTensor), match=match):
        Checkpoint.open(tmp_path / "bad.gguf")


@pytest.mark.e2e
@pytest.mark.parametrize("field", ["embedding_scale", "attention.scale", "residual_scale", "logit_scale"])
@pytest.mark.parametrize("value", [None, 0.0, float("inf"), 3])
def test_multipliers_are_numbers_above_0(granitemoe, tmp_path, field, value):
    """A multiplier that a file lacks, or that no model computes with, is refused by its field or key."""
    write_model(tmp_path / "bad.gguf", granitemoe, change={field: value})
    with pytest.raises(
        (ModelRefused, MissingTensor), match=r"_scale|attention\.scale|_multiplier|logits_scaling"
    ):
        Checkpoint.open(tmp_path / "bad.gguf")


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    """The message lists the known architectures."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelRefused, match=r"qwen3moe.*'mamba'"):
        Checkpoint.open(tmp_path / "m.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, fields: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + body


def tensor(name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


FAULTS = {
    "magic": b"GGML" + bytes(20),
    "version": header(version=1),
    "tensors without end": header(tensors=1 << 62),
    "fields without end": header(fields=1 << 62),
    "a key without end": header(fields=1, body=struct.pack("<Q", 1 << 62)),
    "a field of no type": header(fields=1, body=text(b"k") + struct.pack("<I", 77)),
    "a list without end": header(fields=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62)),
    "texts without end": header(fields=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 62)),
    "a list of lists": header(fields=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
    "a key twice": header(fields=2, body=2 * (text(b"k") + struct.pack("<II", 4, 1))),
    "no UTF-8": header(fields=1, body=text(b"\xff\xfe") + struct.pack("<II", 4, 1)),
    "an alignment of 3": header(fields=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3)),
    "an alignment of 0": header(fields=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "dimensions without end": header(tensors=1, body=text(b"t") + struct.pack("<I", 1 << 30)),
    "no dimension": header(tensors=1, body=tensor(shape=())),
    "a size that overflows": header(tensors=1, body=tensor(shape=(1 << 40, 1 << 40))),
    "a size of nothing": header(tensors=1, body=tensor(shape=(0,))),
    "an unknown type": header(tensors=1, body=tensor(kind=9999)),
    "a row of half a block": header(tensors=1, body=tensor(shape=(33,), kind=int(Kind.Q8_0))),
    "an offset without end": header(tensors=1, body=tensor(offset=1 << 63)),
    "a hole": header(tensors=1, body=tensor(offset=64)) + bytes(4096),
    "a tensor twice": header(tensors=2, body=tensor() + tensor(offset=128)) + bytes(4096),
    "an overlap": header(tensors=2, body=tensor() + tensor(name=b"u", offset=32)) + bytes(4096),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_contradicts_its_file_is_refused(tmp_path, fault):
    """Counts, lengths and offsets are bounded before use: BadHeader is raised at once."""
    (tmp_path / "fault.gguf").write_bytes(FAULTS[fault])
    with pytest.raises(BadHeader):
        read_gguf_header(tmp_path / "fault.gguf")


@pytest.mark.parametrize("cut", [2, 10, 30, 1000, -1])
def test_a_file_that_ends_early_is_truncated(copy, cut):
    """A file cut in the header or in the data is refused before any data is read."""
    data = copy.read_bytes()
    copy.write_bytes(data[:cut])
    with pytest.raises(TruncatedFile):
        Checkpoint.open(copy)


@pytest.mark.e2e
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_the_header_is_read_or_refused(file, tmp_path, data):
    """A header with replaced bytes is read, or refused with an error of the tree."""
    whole = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, 3000))
    whole[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(whole)
    with suppress(EdgemoeError):
        Checkpoint.open(changed)


def test_a_missing_tokenizer_is_refused(qwen3, tmp_path):
    """A file without a vocabulary is refused with the reason."""
    write_model(tmp_path / "mute.gguf", qwen3)
    with pytest.raises(ModelRefused, match="tokenizer"):
        Checkpoint.open(tmp_path / "mute.gguf").companions()
