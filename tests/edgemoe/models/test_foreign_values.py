"""Values of a model that transformers or tokenizers cannot use end in one line and exit code 2 or 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resealed_store import reseal

from storage.errors import ModelRefused, UserError
from storage.untrusted import foreign_code

CONFIGS = {
    "head_dim": "x",
    "rms_norm_eps": "small",
    "hidden_act": "no such function",
    "rope_scaling": {"rope_type": 7},
    "rope_parameters": [1, 2],
    "attention_bias": "yes",
    "sliding_window": "wide",
    "layer_types": 5,
    "torch_dtype": "float99",
    "norm_topk_prob": [],
    "pad_token_id": 10**9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": "maybe",
    "use_sliding_window": {"a": 1},
}

GENERATIONS = {
    "temperature": ["x", float("nan"), float("inf"), -1, True],
    "top_k": [-5, "many", 10**12],
    "top_p": ["x", 1.5, -0.1, float("nan")],
    "repetition_penalty": [0, -1, "x"],
    "eos_token_id": ["x", [1, "y"], -3, {}],
}

TOKENIZERS = [
    b"",
    b"{",
    b"[]",
    b'{"a": 1}',
    b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}',
    b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}',
    b'{"version": "1.0", "model": {"type": "Nothing"}}',
    b'{"version": "1.0", "model": {"type": "WordPiece", "vocab": {}, "unk_token": 5}}',
    b"\xff\xfe",
    b"[" * 100_000,
]


def changed(path: Path, **values: object) -> None:
    """Changes keys of a JSON file in a store, which then has the checksum that its manifest says."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))
    reseal(path.parent, path.name)


def refused(run, store: Path) -> None:
    """A chat ends with 2 or 4 and one line."""
    code, _, err = run("chat", "--model", store, "--prompt", "a", "--max-new-tokens", 1)
    lines = [line for line in err.splitlines() if line.startswith("edgemoe: ")]
    assert code in (2, 4), err
    assert len(lines) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(("key", "value"), CONFIGS.items(), ids=CONFIGS)
def test_a_config_that_transformers_refuses(run, damageable, key, value):
    """The model is refused, or runs where transformers ignores the value; no error is untyped."""
    changed(damageable / "config.json", **{key: value})
    code, _, err = run("chat", "--model", damageable, "--prompt", "a", "--max-new-tokens", 1)
    assert code in (0, 2, 4), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in GENERATIONS for value in GENERATIONS[key]], ids=str
)
def test_generation_settings_that_no_sampler_can_use(run, damageable, key, value):
    """The model is refused with the key."""
    changed(damageable / "generation_config.json", **{key: value, "do_sample": True})
    refused(run, damageable)


@pytest.mark.parametrize("content", TOKENIZERS, ids=lambda content: repr(content[:40]))
def test_tokenizers_that_do_not_load(run, damageable, content):
    """The model is refused, whatever the library raises."""
    (damageable / "tokenizer.json").write_bytes(content)
    reseal(damageable, "tokenizer.json")
    refused(run, damageable)


def test_a_panic_is_a_refusal_and_an_interrupt_is_not():
    """BaseExceptions of foreign libraries become ModelRefused; Ctrl-C, errors of this program and MemoryError pass."""

    class Panic(BaseException):
        pass

    with pytest.raises(ModelRefused, match=r"a model, got Panic: 'at the disco'"), foreign_code("a model"):
        raise Panic("at the disco")
    for error in (KeyboardInterrupt(), MemoryError(), SystemExit(), UserError("a", "b", "c")):
        with pytest.raises(type(error)), foreign_code("a model"):
            raise error
