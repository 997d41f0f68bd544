"""The endpoints: the answers of the Python API in OpenAI's shapes, and errors with the field at fault."""

from __future__ import annotations

import json
import math

import pytest
from servers import a_model, server_of
from small_tokenizer import CHAT_TEMPLATE

from edgemoe.policy.hotness import Hotness

TEXT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": TEXT}]


def events(response) -> list[dict]:
    """The objects of a stream, whose end it has."""
    parts = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def post(server, path: str, **body):
    return server.client.post(path, json=body)


def test_a_chat_is_the_answer_of_the_api(server):
    """Text, usage, timings and edgemoe's counts are Model.generate's."""
    want = server.serving.model.generate(MESSAGES, max_new_tokens=6)
    body = post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=6).json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, want.finish_reason, None)
    assert body["usage"]["prompt_tokens"] == want.prompt_tokens
    assert body["usage"]["completion_tokens"] == body["timings"]["predicted_n"] == want.new_tokens
    assert body["usage"]["total_tokens"] == want.prompt_tokens + want.new_tokens
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["edgemoe"]["new_tokens"] == want.new_tokens
    assert body["edgemoe"]["levels"].keys() == want.levels.keys()
    assert body["timings"]["prompt_ms"] > 0


def test_a_streamed_chat_is_the_whole_one(server):
    """The role comes first, the pieces are the text, the end has the reason, and usage comes if it is wanted."""
    want = server.serving.model.generate(MESSAGES, max_new_tokens=6)
    more = {"stream": True, "max_tokens": 6}
    chunks = events(post(server, "/v1/chat/completions", messages=MESSAGES, **more))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == want.text
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == want.finish_reason
    assert chunks[-1]["timings"]["predicted_n"] == chunks[-1]["edgemoe"]["new_tokens"] == want.new_tokens
    assert len({chunk["id"] for chunk in chunks}) == 1
    more["stream_options"] = {"include_usage": True}
    last = events(post(server, "/v1/chat/completions", messages=MESSAGES, **more))[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], want.new_tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(server, stream):
    """Each token has its own and the likeliest ones, streamed or not; the bytes are its text's."""
    want = server.serving.model.generate(MESSAGES, logprobs=2, max_new_tokens=6).logprobs
    fields = {"logprobs": True, "top_logprobs": 2, "stream": stream, "max_tokens": 6}
    response = post(server, "/v1/chat/completions", messages=MESSAGES, **fields)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    found = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert [each["logprob"] for each in found] == [each.logprob for each in want]
    assert [len(each["top_logprobs"]) for each in found] == [2] * len(want)
    assert all(bytes(each["bytes"]).decode(errors="replace") == each["token"] for each in found)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_its_scores(server, stream):
    """lm-eval's form: one entry for each token of the prompt and of the answer, the first null, equal floats on top."""
    model = server.serving.model
    tokens = model.encode(TEXT)
    (scores,) = model.logprobs([tokens], top=1)
    fields = {"prompt": [tokens], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    response = post(server, "/v1/completions", stream=stream, **fields)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices).startswith(TEXT)
    kept = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    found = [value for each in kept for value in each["token_logprobs"]]
    top = [value for each in kept for value in each["top_logprobs"]]
    assert len(found) == len(top) == len(tokens) + 1
    assert found[0] is None
    assert top[0] is None
    assert found[1:-1] == [score.logprob for score in scores]
    assert [max(each.values()) for each in top[1:-1]] == [score.top[0][1] for score in scores]
    offsets = [value for each in kept for value in each["text_offset"]]
    texts = [value for each in kept for value in each["tokens"]]
    assert offsets == [sum(map(len, texts[:i])) for i in range(len(texts))]


def test_an_end_of_sequence_has_an_entry_too(server):
    """An answer whose first token ends it leaves entries for the whole prompt and for that token."""
    body = post(
        server, "/v1/completions", prompt=TEXT, echo=True, logprobs=0, max_tokens=1, logit_bias={"2": 1000}
    ).json()
    (choice,) = body["choices"]
    entries = choice["logprobs"]["token_logprobs"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", TEXT)
    assert len(entries) == len(server.serving.model.encode(TEXT)) + 1


def test_scores_alone(server):
    """max_tokens 0 with echo shows the prompt and its scores, and no answer."""
    body = post(server, "/v1/completions", prompt=TEXT, echo=True, logprobs=0, max_tokens=0).json()
    (choice,) = body["choices"]
    assert choice["text"] == TEXT
    assert len(choice["logprobs"]["tokens"]) == len(server.serving.model.encode(TEXT))


def test_prompts_times_n_in_order(server):
    """Two prompts of two answers each: four choices by index, the prompts' tokens counted once."""
    prompts = [TEXT, "the lazy dog"]
    body = post(
        server, "/v1/completions", prompt=prompts, n=2, max_tokens=3, temperature=1, seed=5, echo=True
    ).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert all(text.startswith(prompts[i // 2]) for i, text in enumerate(texts))
    encode = server.serving.model.encode
    assert body["usage"]["prompt_tokens"] == sum(len(encode(prompt)) for prompt in prompts)
    again = post(
        server, "/v1/completions", prompt=prompts, n=2, max_tokens=3, temperature=1, seed=5, echo=True
    ).json()
    assert [choice["text"] for choice in again["choices"]] == texts


def test_choices_reach_the_sampler(server):
    """Stop strings, biases, a seed, and max_completion_tokens before max_tokens."""
    want = server.serving.model.generate(MESSAGES, max_new_tokens=20, stop="e").text
    found = post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=20, stop=["e"]).json()
    assert found["choices"][0]["message"]["content"] == want
    body = {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 2, "top_k": -1, "min_p": 0.1}
    assert post(server, "/v1/chat/completions", **body).json()["usage"]["completion_tokens"] == 2
    biased = post(server, "/v1/completions", prompt=TEXT, max_tokens=3, logit_bias={"70": 100}).json()
    assert biased["choices"][0]["text"] == server.serving.model.tokenizer.decode([70] * 3)


def test_an_answer_without_a_limit_fills_the_context(server):
    """A chat without max_tokens ends with the context, by OpenAI's name; a completion has 16 tokens."""
    bias = {"70": 100}
    body = post(server, "/v1/chat/completions", messages=MESSAGES, logit_bias=bias).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 128
    assert (
        post(server, "/v1/completions", prompt=TEXT, logit_bias=bias).json()["usage"]["completion_tokens"]
        == 16
    )


def test_messages_of_newer_clients(server):
    """Parts of text are joined, developer is system, null is empty, and unknown fields are ignored."""
    old = [{"role": "system", "content": "be\nbrief"}, {"role": "assistant", "content": ""}, *MESSAGES]
    new = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": TEXT, "name": "x"},
    ]
    bodies = [
        post(
            server, "/v1/chat/completions", messages=each, max_tokens=4, user="me", store=False, seed=None
        ).json()
        for each in (old, new)
    ]
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert bodies[0]["usage"] == bodies[1]["usage"]


def test_variables_of_the_template(server, monkeypatch):
    """chat_template_kwargs and reasoning_effort reach the chat template."""
    template = CHAT_TEMPLATE + "{{ extra }}{{ reasoning_effort }}"
    monkeypatch.setattr(server.serving.model.tokenizer, "chat_template", template)
    fields = {"chat_template_kwargs": {"extra": "xx"}, "reasoning_effort": "low", "max_tokens": 1}
    more = post(server, "/v1/chat/completions", messages=MESSAGES, **fields).json()["usage"]["prompt_tokens"]
    less = post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()["usage"][
        "prompt_tokens"
    ]
    assert more - less == len(server.serving.model.encode("xxlow"))


def test_the_tokenizer(server):
    """Texts to ids and back, messages through the template, and the special tokens."""
    tokens = server.serving.model.encode(TEXT)
    for name in ("prompt", "content"):
        assert post(server, "/tokenize", **{name: TEXT}).json()["tokens"] == tokens
    assert post(server, "/tokenize", prompt=TEXT, add_special_tokens=False).json()["count"] == len(tokens)
    assert post(server, "/detokenize", tokens=tokens).json() == {"prompt": TEXT, "content": TEXT}
    chat = post(server, "/tokenize", messages=MESSAGES).json()["tokens"]
    assert chat == server.serving.model.encode(MESSAGES)
    info = server.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == ("<|im_end|>", CHAT_TEMPLATE)


def test_models_and_health(server):
    """The one model, by its name too; health is 200."""
    (entry,) = server.client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"], entry["meta"]["n_ctx"]) == ("tiny", 128, 128)
    assert server.client.get("/v1/models/tiny").json() == entry
    assert server.client.get("/v1/models/other/name").json()["error"]["code"] == "model_not_found"
    assert server.client.get("/health").json() == {"status": "ok"}


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, None, "temperature of 0 or more"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"300": 1}}, 400, None, "0 to 299"),
        (COMPLETE, {"prompt": [[]]}, 400, None, "at least one token"),
        (COMPLETE, {"prompt": [[300]]}, 400, "prompt", "0 to 299"),
        (COMPLETE, {"prompt": [[-1]]}, 400, "prompt", "-1"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, None, "<|fim_prefix|>"),
        ("/tokenize", {}, 400, "prompt", "a text"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens", "0 to 299"),
        ("/v1/rerank", {}, 404, None, "an endpoint"),
        ("/health", {}, 405, None, "another method"),
    ],
)
def test_what_the_model_or_the_routes_refuse_is_named(server, path, body, status, param, words):
    """Status, field and words of OpenAI's error object; no request is left."""
    response = post(server, path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not server.serving.queue.jobs


def test_metrics_count_answers(server):
    """vLLM's counters grow by the tokens of an answer; gauges and our own figures are there."""

    def figures() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {
            name: float(value) for line in lines if line[0] != "#" for name, value in [line.rsplit(" ", 1)]
        }

    before = figures()
    usage = post(server, "/v1/completions", prompt=TEXT, max_tokens=3).json()["usage"]
    server.idle()
    after = figures()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    label = '{model_name="tiny"}'
    assert grown(f"vllm:prompt_tokens_total{label}") == usage["prompt_tokens"]
    assert grown(f"vllm:generation_tokens_total{label}") == usage["completion_tokens"]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown(f"vllm:{name}_seconds_count{label}") == 1
        assert math.isfinite(after[f"vllm:{name}_seconds_sum{label}"])
    assert grown(f"vllm:request_generation_tokens_sum{label}") == usage["completion_tokens"]
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after['edgemoe:lynx_experts_total{count="active",model_name="tiny"}'] == 0
    assert after['edgemoe:compensated_total{count="pairs",model_name="tiny"}'] == 0
    parts = {name: value for name, value in after.items() if name.startswith("edgemoe:memory_bytes")}
    assert len(parts) == 7
    assert sum(parts.values()) <= after[f"edgemoe:memory_limit_bytes{label}"]
    assert grown('edgemoe:expert_requests_total{level="8",model_name="tiny"}') > 0


@pytest.mark.e2e
def test_a_restarted_server_reads_the_kv_of_its_prompts(tiny_store, tmp_path):
    """cached_tokens of the same chat after a restart, and the figures of the disk: tokens, files and bytes."""
    messages, found = [{"role": "user", "content": "the quick brown fox jumps " * 30}], []
    for _ in range(2):
        with server_of(a_model(tiny_store, context=512, kv=tmp_path)) as server:
            usage = post(server, CHAT, messages=messages, max_tokens=3).json()["usage"]
            server.idle()
            lines = server.client.get("/metrics").text.splitlines()
        lines = [line.rsplit(" ", 1) for line in lines if line.startswith("edgemoe:prefix_cache_")]
        figures = {name: float(value) for name, value in lines}
        found.append((usage["prompt_tokens_details"]["cached_tokens"], figures))
    (cold, _), (warm, after) = found
    (size,) = (path.stat().st_size for path in tmp_path.glob("*.kv"))
    assert (cold, warm) == (0, 256)
    assert after['edgemoe:prefix_cache_blocks_total{kind="read",model_name="tiny"}'] == 1
    assert after['edgemoe:prefix_cache_moved_bytes_total{kind="read",model_name="tiny"}'] == size
    assert after['edgemoe:prefix_cache_disk_hits_total{model_name="tiny"}'] == 256
    assert size <= after['edgemoe:prefix_cache_disk_bytes{model_name="tiny"}'] < size + 4096


def test_metrics_count_moves(tiny_store):
    """Of --policy hotness: experts by kind of move, and the bytes of the promotions among them."""
    hot = Hotness(interval=2, warmup=0)
    model = a_model(tiny_store, context=64, levels=(4, 2), exact=False, hotness=hot)
    with server_of(model) as server:
        post(server, "/v1/completions", prompt=TEXT, max_tokens=20, ignore_eos=True)
        server.idle()
        text = server.client.get("/metrics").text
    names = ['edgemoe:expert_transitions_total{kind="promoted"', "edgemoe:transition_bytes_total"]
    promoted, size = (float(line.split()[1]) for line in text.splitlines() if line.startswith(tuple(names)))
    assert size == 4096 * promoted > 0
    assert 'kind="deferred"' in text
    assert 'kind="moved_bytes"' not in text
