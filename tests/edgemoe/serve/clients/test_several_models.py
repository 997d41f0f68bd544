"""Two models under one limit, through the clients of OpenAI, Anthropic and ollama, and llama.cpp's router."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from imported_later import imported_later
from prometheus_client.parser import text_string_to_metric_families
from servers import TestServer, a_model, running

from edgemoe.api.load import Loading
from edgemoe.commands.served_models import ServedModel, models_by_name, served_models
from edgemoe.console.sizes import parse_size
from edgemoe.errors import UserError
from edgemoe.models import open as opening_module
from edgemoe.models.heat import NAME as HEAT
from edgemoe.models.options.groups import Opening
from edgemoe.serve.limits import Limits
from edgemoe.serve.slot import ALONE

anthropic, ollama, openai = map(imported_later, ("anthropic", "ollama", "openai"))

QUESTION = [{"role": "user", "content": "the quick brown fox"}]
LONG = [{"role": "user", "content": "the quick brown fox jumps " * 30}]


@pytest.fixture(scope="module")
def stores(tiny_store, tmp_path_factory) -> Path:
    """A directory of two stores."""
    directory = tmp_path_factory.mktemp("stores")
    for name in ("blue", "red"):
        shutil.copytree(tiny_store, directory / name)
    return directory


@pytest.fixture(scope="module")
def two(stores, tmp_path_factory) -> Iterator[TestServer]:
    """A server of both, under a limit that holds either of them; the cache is another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        opening = Opening(stores / "blue", context=512, vram_limit="1GB", parallel=2)
        whole = ServedModel("blue", Loading(opening)).check().needs.vram
        opening = replace(opening, vram_limit=f"{whole * 3 // 2}B")
        loadings = {
            name: Loading(replace(opening, model=path))
            for name, path in models_by_name([stores], None).items()
        }
        with running(served_models(loadings, 8, Limits(), None)) as server:
            yield server


def states(two: TestServer) -> dict[str, str]:
    entries = two.client.get("/models").json()["data"]
    return {entry["id"]: entry["status"]["value"] for entry in entries}


def test_the_models_field_chooses(two, stores):
    """Both are listed with their contexts, one is loaded at a time, and an unknown name is 404."""
    want = a_model(stores / "red", context=512).generate(QUESTION, max_new_tokens=5).text
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as client:
        assert [(model.id, model.max_model_len) for model in client.models.list()] == [
            ("blue", 512),
            ("red", 512),
        ]
        for name, other in (("red", "blue"), ("blue", "red"), ("red", "blue")):
            answer = client.chat.completions.create(
                model=name, messages=QUESTION, max_tokens=5, temperature=0
            )
            assert (answer.model, answer.choices[0].message.content) == (name, want)
            assert states(two) == {name: "loaded", other: "unloaded"}
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="green", messages=QUESTION)
        assert unknown.value.code == "model_not_found"
        pieces = client.chat.completions.create(
            model="blue", messages=QUESTION, max_tokens=5, temperature=0, stream=True
        )
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == want
        response = client.responses.create(model="red", input=QUESTION, max_output_tokens=5, temperature=0)
        assert response.output_text == want
    with anthropic.Anthropic(base_url=two.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="blue", messages=QUESTION, max_tokens=5, extra_body={"temperature": 0}
        )
        assert message.content[0].text == want
        assert client.messages.count_tokens(model="red", messages=QUESTION).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="green", messages=QUESTION, max_tokens=5)
    assert states(two) == {"blue": "unloaded", "red": "loaded"}
    tokens = [two.client.post("/tokenize", json={"model": name, "content": "fox"}).json() for name in "x"]
    assert tokens[0]["error"]["code"] == "model_not_found"


def test_kv_and_heat_come_back(two, stores):
    """A prompt's KV is read from disk after another model had the memory; experts' heat is next to the store."""

    def ask(name: str) -> dict:
        body = {"model": name, "messages": LONG, "max_tokens": 4, "temperature": 0}
        return two.client.post("/v1/chat/completions", json=body).json()

    first = ask("blue")
    ask("red")
    assert (stores / "blue" / HEAT).exists()
    again = ask("blue")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_ollamas_clients_load_and_unload(two):
    """By `keep_alive`, with or without a prompt; ps shows what is loaded, and show loads nothing."""
    with ollama.Client(host=two.url) as client:
        assert {entry.model for entry in client.list().models} == {"blue", "red"}
        assert all(entry.size > 0 for entry in client.list().models)
        assert client.generate("red", keep_alive="5m").done_reason == "load"
        (entry,) = client.ps().models
        assert (entry.model, entry.context_length) == ("red", 512)
        assert 290 < (entry.expires_at - entry.expires_at.now(entry.expires_at.tzinfo)).total_seconds() <= 300
        client.chat("red:latest", QUESTION, keep_alive=-1, options={"num_predict": 2})
        assert client.ps().models[0].expires_at.year == 2318
        assert client.generate("red", keep_alive=0).done_reason == "unload"
        two.wait(lambda: states(two)["red"] == "unloaded")
        assert client.ps().models == []
        assert client.show("red").modelinfo["qwen3_moe.context_length"] == 512
        assert states(two) == {"blue": "unloaded", "red": "unloaded"}
        assert two.client.get("/health").status_code == 200
        assert two.client.get("/status").json()["state"] == "unloaded"
        client.chat("blue", QUESTION, keep_alive="0", options={"num_predict": 2})
        two.wait(lambda: states(two)["blue"] == "unloaded")
        for wrong in ("soon", True, [1]):
            answer = two.client.post("/api/generate", json={"model": "red", "keep_alive": wrong})
            assert (answer.status_code, "keep_alive" in answer.json()["error"]) == (400, True)
        with pytest.raises(ollama.ResponseError, match="not found") as unknown:
            client.chat("green", QUESTION)
        assert unknown.value.status_code == 404


def test_llama_cpps_router(two):
    """Orders to load and unload are taken at once; the list shows how far they are."""
    for name, other in (("red", "blue"), ("blue", "red")):
        assert two.client.post("/models/load", json={"model": name}).json() == {"success": True}
        two.wait(lambda name=name: states(two)[name] == "loaded")
        assert states(two)[other] == "unloaded"
    assert two.client.post("/models/unload", json={"model": "blue"}).json() == {"success": True}
    two.wait(lambda: states(two)["blue"] == "unloaded")
    assert two.client.post("/models/load", json={"model": "green"}).status_code == 404


def test_metrics_have_a_label_for_each_model(two):
    """Each figure stands once, and counts both models' answers."""
    for name in ("blue", "red"):
        two.client.post("/v1/completions", json={"model": name, "prompt": "fox", "max_tokens": 1})
    text = two.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    by_name = {family.name: family for family in families}
    answered = {sample.labels["model_name"] for sample in by_name["vllm:request_success"].samples}
    assert answered == {"blue", "red"}
    open_ = {sample.labels["model_name"] for sample in by_name["vllm:num_requests_running"].samples}
    assert open_ == {"red"}


def test_a_model_on_a_gpu_takes_the_whole_limit(stores, monkeypatch):
    """The process has one cap on the GPU's memory; on the CPU a model is opened with the bytes that it needs."""
    one = ServedModel("red", Loading(Opening(stores / "red", context=512, vram_limit="1GB", parallel=2)))
    assert one.check().needs.vram == parse_size(one._options().opening.vram_limit) < 10**9
    really = opening_module.open_store

    def on_gpu(*args, **options):
        store, plan, settings = really(*args, **options)
        return SimpleNamespace(directory=store.directory, device=object()), plan, settings

    monkeypatch.setattr(opening_module, "open_store", on_gpu)
    assert one.check().needs == ALONE
    assert one._options().opening.vram_limit == f"{10**9}B"


def test_names_of_models(stores):
    """A directory of stores stands for its stores; one name for two models, and a model twice, are refused."""
    assert models_by_name([stores], None) == {"blue": stores / "blue", "red": stores / "red"}
    assert models_by_name([stores / "red"], "x") == {"x": stores / "red"}
    assert models_by_name([Path("org/name")], None) == {"org/name": Path("org/name")}
    again = stores.parent / "again" / "red"
    shutil.copytree(stores / "red", again)
    assert list(models_by_name([stores, again], None)) == ["blue", str(stores / "red"), str(again)]
    with pytest.raises(UserError, match="one model with --name"):
        models_by_name([stores], "x")
    with pytest.raises(UserError, match="twice"):
        models_by_name([stores, stores / "red"], None)
