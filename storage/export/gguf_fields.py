"""The metadata of a GGUF file: the model's sizes, its tokenizer and its chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import gguf
from gguf.gguf_writer import WriterState

from edgemoe.errors import ModelRefused
from edgemoe.storage.convert.config import Config
from edgemoe.storage.files.untrusted import read_json, shortened
from edgemoe.storage.formats.gguf_architectures import ARCHITECTURES
from edgemoe.storage.formats.gguf_config import REALS
from edgemoe.storage.formats.gguf_row import Architecture

_ACTION = "export as compressed-tensors or safetensors"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2 = "ByteLevel"

_SPLITS = {(_GPT2,): "gpt-2", ("Digits", _GPT2): "smollm", (_QWEN2,): "qwen2", (_LLAMA3,): "llama-bpe"}
"""Rules that split text before merges, in order -> llama.cpp's name of them."""

_DEFAULTS: Config = {
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    **dict.fromkeys((key for key in REALS if key.endswith(("multiplier", "scaling"))), 1.0),
}
"""Config key -> transformers' value where config.json has none; other keys have an empty one."""

_log = logging.getLogger("edgemoe")


def architecture_of(config: Config) -> tuple[str, Architecture]:
    """Finds the architecture of a model: its name in GGUF files, and its names in transformers.

    Raises:
        ModelRefused: no architecture has the config's model_type and values.
    """
    for name, architecture in ARCHITECTURES.items():
        if not architecture.exported or architecture.fixed["model_type"] != config["model_type"]:
            continue
        for key, value in architecture.fixed.items():
            found = config.get(key, _DEFAULTS.get(key))
            if key != "architectures" and (found or None) != (value or None):
                raise ModelRefused(
                    f"{key} {value} in a GGUF file of {name}",
                    shortened(found),
                    _ACTION,
                )
        if (found := config.get("hidden_act", _DEFAULTS["hidden_act"])) != _DEFAULTS["hidden_act"]:
            raise ModelRefused("hidden_act silu for a GGUF file", shortened(found), _ACTION)
        if config.get("attention_bias"):
            raise ModelRefused("attention without biases for a GGUF file", "attention_bias", _ACTION)
        return name, architecture
    known = ", ".join(str(each.fixed["model_type"]) for each in ARCHITECTURES.values() if each.exported)
    raise ModelRefused(
        f"a model_type among {known} for a GGUF file", shortened(config["model_type"]), _ACTION
    )


def sizes(config: Config, architecture: Architecture) -> dict[str, int | float]:
    """The model's sizes by field, without the architecture's name in front.

    Raises:
        ModelRefused: scaled rotary embeddings, or a size is missing.
    """
    values = {**_DEFAULTS, **config}
    rope = config.get("rope_parameters") or values
    kind = rope.get("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ModelRefused("rotary embeddings without scaling for a GGUF file", shortened(kind), _ACTION)
    values["rope_theta"] = rope["rope_theta"]
    heads = config["num_attention_heads"]
    values["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    if architecture.repeated_heads or not config.get("num_key_value_heads"):
        values["num_key_value_heads"] = heads
    for one, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        values.setdefault(one, config.get(other))
    out: dict[str, int | float] = {}
    for key, field in architecture.keys.items():
        value = values.get(key)
        if not isinstance(value, int | float):
            raise ModelRefused(f"{key} in config.json for a GGUF file", shortened(value), _ACTION)
        out[field] = float(value) if key in REALS else value
    out["attention.key_length"] = out["attention.value_length"] = values["head_dim"]
    if "intermediate_size" in values:
        out.setdefault("feed_forward_length", values["intermediate_size"])
    return out


def add_fields(writer: gguf.GGUFWriter, store: Path, config: Config) -> None:
    """Adds sizes, tokenizer and chat template of a store.

    Raises:
        ModelRefused: the file format has no such architecture or tokenizer.
    """
    name, architecture = architecture_of(config)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field, value in sizes(config, architecture).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{name}.{field}", value)
    _add_tokenizer(writer, store, config)


def header(writer: gguf.GGUFWriter) -> bytes:
    """The bytes before the tensors' data, padded as the data begins."""
    writer.fout, writer.state = [BytesIO()], WriterState.EMPTY  # as open_output_file leaves them
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    raw = bytes(writer.fout[0].getvalue())
    return raw + bytes(-len(raw) % gguf.GGUF_DEFAULT_ALIGNMENT)


def _add_tokenizer(writer: gguf.GGUFWriter, store: Path, config: Config) -> None:
    parsed = read_json(store, "tokenizer.json")
    model = parsed.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
        found = model.get("type") if isinstance(model, dict) else model
        raise ModelRefused("a tokenizer of byte-level BPE for a GGUF file", shortened(found), _ACTION)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(parsed.get("pre_tokenizer"), store))
    tokens, kinds = _tokens(parsed, model["vocab"], config["vocab_size"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # llama.cpp refuses a vocabulary without merges.
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]] or ["Ċ Ċ"]
    writer.add_token_merges(merges)
    optional = store / "tokenizer_config.json"
    settings = read_json(store, optional.name) if optional.exists() else {}
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        value = config.get(key)
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int:
            add(value)
    writer.add_add_bos_token(_adds_bos(parsed.get("post_processor")) or bool(settings.get("add_bos_token")))
    template = store / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _tokens(
    parsed: Mapping[str, Any], vocabulary: Mapping[str, int], size: int
) -> tuple[list[str], list[gguf.TokenType]]:
    """Tokens and their kinds by id; ids of the embedding without a token are unused."""
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in parsed.get("added_tokens") or []:
        kind = gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    return tokens, kinds


def _pre(value: object, store: Path) -> str:
    """llama.cpp's name of the rules that split text; the nearest one where it has none, with a warning."""
    rules = _rules(value)
    if (known := _SPLITS.get(tuple(rules))) is not None:
        return known
    digits = any("\\d" in rule or "\\p{N}" in rule for rule in rules)
    nearest = "smollm" if digits else "gpt-2"
    _log.warning(
        "%s: llama.cpp has no tokenizer that splits text by the rules %s; with %s, the nearest, some text gets other "
        "tokens",
        store,
        shortened(rules),
        nearest,
    )
    return nearest


def _rules(value: object) -> list[str]:
    match value:
        case {"type": "Sequence", "pretokenizers": [*each]}:
            return [rule for one in each for rule in _rules(one)]
        case {"type": "ByteLevel", "use_regex": False}:
            return []
        case {"type": "Split", "pattern": {"Regex": str() as regex}}:
            return [regex]
        case {"type": "Digits", "individual_digits": False}:
            return ["Digits of any length"]
        case {"type": str() as kind}:
            return [kind]
    return []


def _adds_bos(value: object) -> bool:
    match value:
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": _}, *_]}:
            return True
        case {"type": "Sequence", "processors": [*each]}:
            return any(map(_adds_bos, each))
    return False
