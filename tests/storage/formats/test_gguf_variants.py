"""GGUF files as other converters and programs write them: fields left out, old names, other file names, tokenizers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import rewritten, write_model
from small_tokenizer import CHAT_TEMPLATE, a_tokenizer
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.errors import ModelRefused
from edgemoe.storage.convert.checkpoint import Checkpoint, find_gguf
from edgemoe.storage.formats.gguf_config import own_fields
from edgemoe.storage.formats.gguf_header import read_gguf_header
from edgemoe.storage.formats.gguf_rope import rope_parameters
from edgemoe.storage.formats.gguf_tokenizer import unpack_tokenizer

FILE = Path("model.gguf")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """One layer of four experts. Read-only."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=300,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            intermediate_size=64,
            max_position_embeddings=64,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


@pytest.fixture(scope="module")
def file(qwen3, tmp_path_factory) -> Path:
    """The model in one file. Read-only."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path, qwen3, a_tokenizer())
    return path


def test_fields_that_are_left_out_have_llama_cpps_values(qwen3, tmp_path):
    """The base of rotary embeddings is 10,000; other sizes follow from the fields that are there."""
    left_out = ("rope.freq_base", "attention.key_length", "expert_feed_forward_length")
    write_model(tmp_path / "m.gguf", qwen3, change=dict.fromkeys(left_out))
    config = Checkpoint.open(tmp_path / "m.gguf").config
    theta = config["rope_parameters"]["rope_theta"]
    assert (theta, config["head_dim"], config["moe_intermediate_size"]) == (10000.0, 16, 32)
    assert own_fields({"a.attention.head_count": 8}, "a")["attention.head_count_kv"] == 8


PLAIN = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("own", "scaling"),
    [
        ({}, PLAIN),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, PLAIN),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, PLAIN),
        ({"rope.scaling.type": "linear"}, PLAIN),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0}, PLAIN),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 0.0}, PLAIN),
    ],
)
def test_scaled_positions(own, scaling):
    """Without a type a factor is linear; 0 and 1 scale nothing."""
    found = rope_parameters(own, {}, FILE)
    assert (found.pop("rope_theta"), found) == (None, scaling)


def test_yarn_is_that_of_transformers(qwen3, tmp_path):
    """Factor, original length and the strength of attention, as llama.cpp computes it."""
    change = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    write_model(tmp_path / "m.gguf", qwen3, change=change)
    found = Checkpoint.open(tmp_path / "m.gguf").config["rope_parameters"]
    strength = found.pop("attention_factor")
    theta = float(qwen3.config.rope_parameters["rope_theta"])
    assert found == {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": theta}
    }
    assert strength == pytest.approx(1 + 0.1 * math.log(4))
    betas = rope_parameters(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 2.0,
            "context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {},
        FILE,
    )
    assert (betas["beta_fast"], betas["original_max_position_embeddings"]) == (16.0, 64)


@pytest.mark.parametrize(
    "own",
    [
        {"rope.scaling.type": "longrope"},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": math.inf},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.0},
    ],
)
def test_scaling_that_is_not_known_is_refused(own):
    with pytest.raises(ModelRefused, match=r"model\.gguf"):
        rope_parameters(own, {}, FILE)


def gate_and_up(tensors: dict[str, Any]) -> dict[str, Any]:
    """One tensor with the rows of both, as new converters write it."""
    both = [tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up")]
    return tensors | {"blk.0.ffn_gate_up_exps.weight": np.concatenate(both, 1)}


def one_each(tensors: dict[str, Any]) -> dict[str, Any]:
    """A tensor for each expert, as converters wrote it before April 2024."""
    for part in ("gate", "up", "down"):
        whole = tensors.pop(f"blk.0.ffn_{part}_exps.weight")
        tensors |= {f"blk.0.ffn_{part}.{i}.weight": expert for i, expert in enumerate(whole)}
    return tensors


@pytest.mark.parametrize("change", [gate_and_up, one_each])
def test_experts_by_other_names_are_the_same_experts(file, tmp_path, change):
    """Joined or apart, with the same bytes in all."""
    want, found = Checkpoint.open(file), Checkpoint.open(rewritten(file, tmp_path / "m.gguf", change))
    assert found.names() == want.names()
    for name in want.names():
        assert torch.equal(found[name].read(), want[name].read()), name
        assert found[name].nbytes == want[name].nbytes


def test_ends_of_turns_and_messages_are_ends(file, tmp_path):
    """The config names every token that the file names as an end."""
    made = rewritten(file, tmp_path / "m.gguf", dict, eot_token_id=5, eom_token_id=7)
    assert Checkpoint.open(file).config["eos_token_id"] == 2
    assert Checkpoint.open(made).config["eos_token_id"] == [2, 5, 7]


@pytest.mark.parametrize("name", ["sha256-0a1b2c", "tiny.GGUF", "model"])
def test_a_file_is_known_by_its_first_bytes(file, tmp_path, name):
    """ollama's blobs have no suffix; a directory may have one such file."""
    path = Path(shutil.copy(file, tmp_path / name))
    assert find_gguf(path) == find_gguf(tmp_path) == path
    opened = Checkpoint.open(path)
    assert opened.fingerprint() == Checkpoint.open(tmp_path).fingerprint()
    assert "tokenizer.json" in {each.name for each in opened.companions()}
    (tmp_path / "other").write_bytes(b"GGML" + bytes(20))
    assert find_gguf(tmp_path / "other") is None


@pytest.mark.parametrize("place", ["", "Q4_K_M", "a/b"])
def test_links_of_the_hubs_cache_are_followed_at_any_depth(file, tmp_path, place):
    """A folder below a snapshot has links to the repository's blobs, and to nothing else."""
    blobs, folder = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "c0ffee" / place,
    )
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    shutil.copy(file, blobs / "0a1b")
    (folder / "tiny.gguf").symlink_to(blobs / "0a1b")
    assert Checkpoint.open(folder).format == "GGUF"
    (folder / "tiny.gguf").unlink()
    (folder / "tiny.gguf").symlink_to(file)
    with pytest.raises(ModelRefused, match="outside"):
        Checkpoint.open(folder)


WORDS = ("▁Hello", "▁world", "Hello", "world", "▁▁", "▁", "H", "e", "l", "o", "w", "r", "d")
MERGED = ("ll", "He", "▁w", "or", "ld", "▁wor", "lo", "▁H", "▁He", "Hell", "▁Hell", "wor")
PIECES = (
    "<unk>",
    "<s>",
    "</s>",
    "<|user|>",
    "<think>",
    *(f"<0x{i:02X}>" for i in range(256)),
    *WORDS,
    *MERGED,
)


def tokenizer_of(path: Path, template: str | None = None, **fields: Any) -> Any:
    """The tokenizer of a file with PIECES as SentencePiece's vocabulary, as the program loads it."""
    own = {
        "model": "llama",
        "tokens": list(PIECES),
        "token_type": [2, 3, 3, 3, 4] + [6] * 256 + [1] * len(WORDS + MERGED),
        "scores": [0.0] * 261 + [-float(i) for i in range(len(WORDS + MERGED))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    writer = gguf.GGUFWriter(path / "spm.gguf", "qwen3moe")
    for key, value in (own | fields).items():
        if value is not None:
            add = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}.get(type(value))
            (add or writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    if template:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    into = path / "into"
    into.mkdir()
    (into / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    unpack_tokenizer(path / "spm.gguf", read_gguf_header(path / "spm.gguf").fields, into)
    return AutoTokenizer.from_pretrained(into)


@pytest.mark.parametrize(
    ("text", "prefixed", "plain"),
    [
        ("Hello world", "▁Hello ▁world", "Hello ▁world"),
        (" Hello", "▁▁ Hello", "▁Hello"),
        ("  Hello", "▁▁ ▁Hello", "▁▁ Hello"),
        (
            "<|user|>Hello<|user|> world",
            "<|user|> ▁Hello <|user|> ▁▁ world",
            "<|user|> Hello <|user|> ▁world",
        ),
        ("<think>Hello", "<think> ▁Hello", "<think> Hello"),
        ("Hello<|user|>", "▁Hello <|user|>", "Hello <|user|>"),
        ("", "", ""),
    ],
)
def test_every_piece_between_special_tokens_gets_a_space(tmp_path, text, prefixed, plain):
    """Spaces are llama.cpp's, where add_space_prefix is true or left out; and decoding gives the text again."""
    for flag, want in ((None, prefixed), (True, prefixed), (False, plain)):
        (tmp_path / str(flag)).mkdir()
        made = tokenizer_of(tmp_path / str(flag), add_space_prefix=flag)
        ids = made(text)["input_ids"]
        assert made.convert_ids_to_tokens(ids) == ["<s>", *want.split()]
        if "<" not in text:
            assert made.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("flag", "template", "begins"),
    [
        (True, CHAT_TEMPLATE, True),
        (None, CHAT_TEMPLATE, True),
        (False, CHAT_TEMPLATE, False),
        (True, "{{ bos_token }}" + CHAT_TEMPLATE, True),
        (True, "<s>" + CHAT_TEMPLATE, True),
    ],
)
def test_a_chat_begins_with_the_token_that_texts_begin_with(tmp_path, flag, template, begins):
    """Once, whether the template writes it or not."""
    made = tokenizer_of(tmp_path, template, add_bos_token=flag)
    chat = made.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat.startswith("<s>") is begins
    assert chat.count("<s>") == begins
    assert (made("Hello")["input_ids"][0] == 1) is (flag is not False)
