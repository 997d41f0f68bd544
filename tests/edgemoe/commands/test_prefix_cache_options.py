"""--prefix-cache-dir and --prefix-cache-limit: in chat, in the server and in the Python API; saved conversations."""

from __future__ import annotations

import json

import pytest

import edgemoe
from edgemoe.kv.blocks import BLOCK

LONG = "the quick brown fox jumps over the lazy dog " * 16
"""A text of more tokens than a block has."""


@pytest.fixture
def chat(run, tiny_store, tmp_path, monkeypatch):
    """Runs a chat over lines from a pipe, with a cache and a state of its own; returns its JSON lines, and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def turns(*lines: object, options: tuple[object, ...] = ()) -> tuple[list[dict], str]:
        level = () if "--levels" in options else ("--exact", 4)
        wanted = ("chat", "-m", tiny_store, "-c", 512, "-n", 4, *level, "--json")
        code, out, err = run(*wanted, *options, stdin="\n".join(map(str, lines)))
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()], err

    return turns


def blocks_in(directory) -> int:
    return len(list(directory.glob("*.kv")))


@pytest.mark.e2e
def test_a_saved_conversation_goes_on_with_its_kv(chat, tmp_path):
    """/save writes blocks, also without an option; /load in another process continues them with the same words."""
    file, cache = tmp_path / "talk.json", tmp_path / "cache" / "edgemoe" / "kv"
    (first,), err = chat(LONG, f"/save {file}")
    assert first["prompt_tokens"] > BLOCK
    assert f"and the KV of {BLOCK} tokens on disk" in err
    assert blocks_in(cache) == 1
    (second,), err = chat(f"/load {file}", "and then?")
    assert f"(the KV of {BLOCK} tokens comes from disk)" in err
    assert second["cached_tokens"] == BLOCK
    (computed,), _ = chat(f"/load {file}", "and then?", options=("--prefix-cache-limit", "0"))
    assert (computed["cached_tokens"], computed["text"]) == (0, second["text"])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--kv-cache", "q8_0"), "it was saved as bf16, and this chat has q8_0"),
        (("--levels", "4/2"), "it was saved with another model or other settings"),
        (("--prefix-cache-limit", "0"), "this chat keeps none on disk"),
        (("--prefix-cache-dir", "empty"), "no block of it is on disk"),
    ],
)
def test_kv_that_cannot_be_used_is_computed_again_with_a_word(chat, tmp_path, monkeypatch, options, why):
    """The conversation goes on all the same."""
    monkeypatch.chdir(tmp_path)
    chat(LONG, "/save talk.json")
    (answer,), err = chat("/load talk.json", "and then?", options=options)
    assert f"its KV is computed again: {why}" in err
    assert answer["cached_tokens"] == 0


@pytest.mark.e2e
def test_a_chat_keeps_no_kv_that_is_not_saved(chat, tmp_path):
    """A pipe without /save leaves no block, and reads none; with the option all of it stays."""
    directory = tmp_path / "kv"
    for cached in (0, 0):
        assert [answer["cached_tokens"] for answer in chat(LONG)[0]] == [cached]
    assert blocks_in(tmp_path / "cache" / "edgemoe" / "kv") == 0
    for cached in (0, BLOCK):
        options = ("--prefix-cache-dir", directory, "--prefix-cache-limit", "1MB")
        assert [answer["cached_tokens"] for answer in chat(LONG, options=options)[0]] == [cached]
    assert blocks_in(directory) == 1


@pytest.mark.e2e
def test_continue_goes_on_with_its_kv(chat, tmp_path):
    """A conversation with --continue is kept for it, text and KV."""
    state = tmp_path / "state" / "edgemoe"
    state.mkdir(parents=True)
    (first,), _ = chat(LONG, f"/save {state / 'last-conversation.json'}")
    for path in (tmp_path / "cache" / "edgemoe" / "kv").iterdir():
        path.unlink()
    again, _ = chat("and then?", options=("--continue",))
    third, _ = chat("and now?", options=("--continue",))
    assert [again[0]["cached_tokens"], third[0]["cached_tokens"]] == [0, BLOCK]
    assert third[0]["prompt_tokens"] > again[0]["prompt_tokens"] > first["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefix-cache-limit", "1GB"), "expected --prefix-cache-dir with --prefix-cache-limit"),
        (("--prefix-cache-dir", "kv", "--prefix-cache-limit", "1 pile"), "expected a size such as 12GB"),
    ],
)
def test_the_server_refuses_before_its_port_is_open(run, tiny_store, options, words):
    code, out, err = run("serve", "-m", tiny_store, *options)
    assert (code, out) == (2, "")
    assert words in err


def test_a_limit_below_a_block_exits_2(run, tiny_store, tmp_path):
    """Before the model is loaded."""
    options = ("--prefix-cache-dir", tmp_path / "kv", "--prefix-cache-limit", "4KB")
    code, _, err = run("chat", "-m", tiny_store, "-c", 512, "-p", "x", *options)
    assert code == 2
    assert "a block of 256 tokens, for --prefix-cache-limit" in err
    assert not (tmp_path / "kv").exists()


def test_the_python_api_keeps_kv_between_two_models(tiny_store, tmp_path):
    """The second one reads what the first has computed; answers and figures count it."""
    found = []
    for _ in range(2):
        options = {"prefix_cache_dir": tmp_path, "prefix_cache_limit": "1MB"}
        with edgemoe.load(tiny_store, context=512, exact=4, **options) as model:
            answer = model.generate(LONG, max_new_tokens=4, temperature=0)
            found.append((answer.cached_tokens, model.status().disk.tokens_read, answer.text))
    assert [each[:2] for each in found] == [(0, 0), (BLOCK, BLOCK)]
    assert found[0][2] == found[1][2]
