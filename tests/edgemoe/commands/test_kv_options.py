"""--kv-cache, --kv-cache-k and --kv-cache-v: in each command, in the plan, and in the Python API."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from short_probes import probe_briefly

import edgemoe
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.kv.formats import KVFormat


def kv_bytes(run, store, *options) -> int:
    code, out, _ = run("plan", "--model", store, "--context", 64, "--json", *options)
    assert code == 0
    return json.loads(out)["kv_bytes"]


@pytest.mark.e2e
def test_a_plan_has_their_bytes(run, tiny_store):
    """Heads of 16: 32 bytes in bf16; a scale of 2 bytes, and 16 or 8 of codes."""
    whole = kv_bytes(run, tiny_store)
    assert kv_bytes(run, tiny_store, "--kv-cache", "bf16") == whole
    assert kv_bytes(run, tiny_store, "--kv-cache", "q8_0") * 32 == whole * 18
    assert kv_bytes(run, tiny_store, "--kv-cache", "q4_0") * 32 == whole * 10
    keys, values = ("--kv-cache-k", "q8_0"), ("--kv-cache-v", "q4_0")
    assert kv_bytes(run, tiny_store, *keys) * 64 == whole * (18 + 32)
    assert kv_bytes(run, tiny_store, *keys, *values) * 64 == whole * (18 + 10)
    assert kv_bytes(run, tiny_store, "--kv-cache", "q8_0", *values) * 64 == whole * (18 + 10)
    out = run("plan", "--model", tiny_store, *keys, *values)[1]
    assert "tokens, in q8_0 keys, q4_0 values" in out
    assert " in bf16" not in run("plan", "--model", tiny_store)[1]


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["plan", "chat", "bench", "eval", "serve"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-cache", "q5_1"), "expected bf16, q8_0, q4_0 for --kv-cache, got 'q5_1': choose one of them"),
        (("--kv-cache", "q8_0", "--kv-cache-k", "bf16", "--kv-cache-v", "q4_0"), "leave --kv-cache out"),
    ],
)
def test_wrong_formats_exit_2(run, tiny_store, command, options, words):
    text = ("--text", tiny_store / "store.json") if command == "eval" else ()
    code, out, err = run(command, "--model", tiny_store, *text, *options)
    assert (code, out) == (2, "")
    assert words in err


def test_a_device_has_every_format_and_a_latent_one_for_both(tiny_store):
    """The plan of a device counts the rows in their format."""
    store = StoreModel.open(tiny_store)
    on_device, eight = replace(store, device=SimpleNamespace(name="cuda")), KVFormat("q8_0", "q8_0")
    assert on_device.with_kv(KVFormat()).shape == store.shape
    kv = on_device.with_kv(eight).shape.kv.moving()
    assert kv.bytes_for(64) < 0.6 * store.shape.kv.moving().bytes_for(64)
    latent = replace(store, shape=replace(store.shape, kv=replace(store.shape.kv, latent=8)))
    with pytest.raises(UserError, match="give --kv-cache q8_0 alone"):
        latent.with_kv(KVFormat("q8_0", "q4_0"))


@pytest.mark.e2e
def test_answers_bench_and_the_api_use_them(run, tiny_store, monkeypatch):
    """Answers differ from the answers of bf16 keys and values, and the API's equal the command's."""
    probe_briefly(monkeypatch)
    chosen = {"temperature": 0, "max_new_tokens": 24}

    def answer(**how):
        with edgemoe.load(tiny_store, exact=8, context=64, **how) as model:
            return model.generate("fox", **chosen, logprobs=0)

    plain, eight, four = answer(), answer(kv_cache="q8_0"), answer(kv_cache_k="q4_0", kv_cache_v="q4_0")
    found = [[token.logprob for token in each.logprobs] for each in (plain, eight, four)]
    assert found[0] != found[1] != found[2]
    assert found[0][0] == pytest.approx(found[1][0], abs=0.05)
    options = "--kv-cache", "q8_0", "--prompt-tokens", 16, "--new-tokens", 4, "--runs", 1, "--json"
    code, out, _ = run("bench", "--model", tiny_store, *options)
    assert (code, json.loads(out)["environment"]["kv_cache"]) == (0, "q8_0")
