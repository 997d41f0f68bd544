"""Values of a model that transformers or tokenizers cannot use end in one line and exit code 2 or 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutated_models import CONFIGS, GENERATIONS
from resealed_store import reseal

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.sampling import Sampling
from edgemoe.errors import ModelRefused, UserError
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.storage.files.untrusted import foreign_code

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


@pytest.mark.e2e
@pytest.mark.parametrize(("key", "value"), CONFIGS.items(), ids=CONFIGS)
def test_a_config_that_transformers_refuses(run, damageable, key, value):
    """The model is refused, or runs where transformers ignores the value; no error is untyped."""
    changed(damageable / "config.json", **{key: value})
    code, _, err = run("chat", "--model", damageable, "--prompt", "a", "--max-new-tokens", 1)
    assert code in (0, 2, 4), err
    assert "Traceback" not in err


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in GENERATIONS for value in GENERATIONS[key]], ids=str
)
def test_generation_settings_that_no_sampler_can_use(run, damageable, key, value):
    """The model is refused with the key."""
    changed(damageable / "generation_config.json", **{key: value, "do_sample": True})
    refused(run, damageable)


@pytest.mark.e2e
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


@pytest.mark.e2e
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}], ids=repr)
def test_a_tokenizer_config_that_cannot_encode(run, damageable, value):
    """A value that transformers reads while it encodes a prompt is refused."""
    changed(damageable / "tokenizer_config.json", model_max_length=value)
    refused(run, damageable)


def test_a_tokenizer_that_cannot_decode(open_engine, tiny_store):
    """Whatever tokenizers raises about an answer's token is a refusal, in the stream and in the whole text."""
    tokenizer = load_tokenizer(tiny_store)
    conversation = Conversation(
        Model(open_engine(tiny_store), tokenizer, Sampling(0, 1, 0, 1, 0, 3, frozenset()))
    )

    class Broken:
        """Encodes, and does not decode."""

        backend_tokenizer = tokenizer.backend_tokenizer

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def __call__(self, *arguments: object, **keywords: object) -> object:
            return tokenizer(*arguments, **keywords)

        def decode(self, *arguments: object, **keywords: object) -> str:
            raise RuntimeError("no such token")

    conversation._model.tokenizer = Broken()
    with pytest.raises(ModelRefused, match="no such token"):
        conversation.ask("a", lambda text: None)
    Broken.backend_tokenizer = None
    with pytest.raises(ModelRefused, match="decodes the model's tokens"):
        conversation.ask("a", lambda text: None)


@pytest.mark.e2e
def test_a_tokenizer_of_a_larger_vocabulary(run, damageable):
    """A prompt with a token that the model has no row for is refused; the model never looks it up."""
    tokenizer = json.loads((damageable / "tokenizer.json").read_text())
    added = {
        "id": 300,
        "content": "<new>",
        "special": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    tokenizer["added_tokens"].append(added | {"normalized": False})
    (damageable / "tokenizer.json").write_text(json.dumps(tokenizer))
    reseal(damageable, "tokenizer.json")
    assert run("chat", "--model", damageable, "--prompt", "a", "--max-new-tokens", 1)[0] == 0
    code, _, err = run("chat", "--model", damageable, "--prompt", "a<new>")
    assert (code, "300 from the tokenizer" in err) == (2, True)


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (KeyError("hidden_act"), "hidden_act 'relu9' (KeyError"),
        (ValueError("no function relu9 here"), "hidden_act 'relu9' (ValueError"),
        (ValueError("a factor of yarn3"), "rope {'type': 'yarn3'} (ValueError"),
        (ValueError("something else"), "ValueError: 'something else'"),
    ],
    ids=str,
)
def test_a_value_is_blamed_by_its_key_or_its_text(error, key):
    """The message names the key that the library's text names or quotes, and none where there is none."""
    values = {"hidden_act": "relu9", "rope": {"type": "yarn3"}, "a": "of"}
    with pytest.raises(ModelRefused) as refused, foreign_code("a model", values=values):
        raise error
    assert key in str(refused.value)


def test_the_line_that_failed_names_the_key():
    """A library's line that reads config.head_dim blames head_dim."""
    config = type("Config", (), {"head_dim": "x"})()
    with (
        pytest.raises(ModelRefused, match=r"head_dim 'x' \(TypeError"),
        foreign_code("a model", values=vars(type(config))),
    ):
        _ = 1 // config.head_dim
