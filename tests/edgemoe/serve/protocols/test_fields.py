"""Refusals of each protocol's fields, and the requests that fields mean; decided without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgemoe.grammar.lark import TextForm
from edgemoe.serve.anthropic.endpoints import Messages
from edgemoe.serve.errors import ApiError
from edgemoe.serve.ollama.endpoints import Chat, Generate
from edgemoe.serve.openai_chat.endpoints import Chats, Completions
from edgemoe.serve.openai_chat.fields import ChatFields, TokenizeFields
from edgemoe.serve.openai_responses.endpoints import Responses
from edgemoe.serve.protocol.base import Exchange
from edgemoe.serve.protocol.reply import json_bytes
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import parse
from edgemoe.serve.serving import Serving

USER = [{"role": "user", "content": "Oslo?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
MODEL = SimpleNamespace(engine=SimpleNamespace(plan=SimpleNamespace(context=128)))


def request_of(kind: type[Exchange[Any]], body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """The request that a body means, once everything that fields decide is decided."""
    serving = Serving("x", limit=1)
    serving.model, serving.chats = MODEL, SimpleNamespace(make=list)
    serving.text_limit = SimpleNamespace(require=lambda *texts: None, require_chat=lambda *chat: None)
    exchange = kind()
    given = parse(kind.fields, json_bytes(body))
    assert exchange.without_prompt(given) is None
    request = exchange.request(given, serving)
    serving.prompts_of(request)
    request.choices()
    return request


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def calls(arguments: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}]


def form(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


NAMED_TOOL = {"type": "function", "function": {"name": "x"}}

GOOD: dict[type[Exchange[Any]], dict[str, Any]] = {
    Chats: {"messages": USER},
    Completions: {"prompt": "x"},
    Responses: {"model": "x", "input": "Oslo?"},
    Messages: {"model": "x", "max_tokens": 200, "messages": USER},
    Chat: {"model": "x", "messages": USER},
    Generate: {"model": "x", "prompt": "Oslo?"},
}

WRONG: list[tuple[type[Exchange[Any]], dict[str, Any], str | None, str]] = [
    (Chats, {"messages": None}, "messages", "required"),
    (Chats, {"messages": []}, "messages", "at least 1"),
    (Chats, {"messages": "hello"}, "messages", "valid array"),
    (Chats, {"messages": [{"role": "user", "content": 3}]}, "messages", "got 3"),
    (Chats, {"messages": user({"type": "input_audio"})}, "messages", "'input_audio'"),
    (Chats, {"messages": [{"role": "function", "name": "x", "content": "y"}]}, "messages", "see tools"),
    (Chats, {"messages": calls("[1]")}, "messages", "a JSON object"),
    (Chats, {"messages": calls('{"a')}, "messages", "a JSON object"),
    (Chats, {"temperature": "hot"}, "temperature", "'hot'"),
    (Chats, {"n": 0}, "n", "greater than or equal to 1"),
    (Chats, {"n": True}, "n", "valid integer"),
    (Chats, {"stream": "yes"}, "stream", "'yes'"),
    (Chats, {"top_logprobs": 2}, "top_logprobs", "logprobs true"),
    (Chats, {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (Chats, {"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools", "name"),
    (Chats, {"tools": [tool("a b")]}, "tools", "pattern"),
    (Chats, {"tools": [tool("a"), tool("a")]}, "tools", "rename 'a'"),
    (Chats, {"tools": [tool("a")] * 129}, "tools", "at most 128"),
    (Chats, {"tools": [{"type": "browser", "function": {"name": "x"}}]}, "tools", "'function'"),
    (Chats, {"tool_choice": "always"}, "tool_choice", "'required'"),
    (Chats, {"tool_choice": NAMED_TOOL, "tools": [tool("a")]}, "tool_choice", "no 'x'"),
    (Chats, {"tool_choice": "required"}, "tool_choice", "no 'tools'"),
    (Chats, {"functions": [{"name": "x"}]}, "functions", "send tools"),
    (Chats, {"function_call": {"name": "x"}}, "function_call", "send tool_choice"),
    (Chats, {"max_tokens": 2.5}, "max_tokens", "2.5"),
    (Chats, {"max_tokens": -7}, "max_tokens", "-7"),
    (Chats, {"max_completion_tokens": 0}, "max_completion_tokens", "1 or more"),
    (Chats, {"add_generation_prompt": False}, "add_generation_prompt", "add_generation_prompt True"),
    (
        Chats,
        {"continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
        "continue_final_message False",
    ),
    (Chats, {"chat_template": "{{ messages }}"}, "chat_template", "no chat_template"),
    (Chats, {"guided_choice": "yes"}, "guided_choice", "valid array"),
    (Chats, {"guided_choice": ["yes"], "guided_regex": "no"}, "guided_choice", "one form"),
    (Completions, {"guided_choice": ["yes", "no"]}, "guided_choice", "no guided_choice"),
    (Chats, {"grammar": 'root ::= "yes"'}, "grammar", "no grammar"),
    (Chats, {"mirostat": 2}, "mirostat", "mirostat 0"),
    (Chats, {"typical_p": 0.9}, "typical_p", "typical_p 1"),
    (Chats, {"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n", "repeat_last_n -1"),
    (Chats, {"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens True"),
    (Chats, {"guided_json": "["}, "guided_json", "a JSON schema"),
    (Chats, {"structured_outputs": {"grammar": "a"}}, "structured_outputs", "'grammar'"),
    (Chats, {"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", "a list of texts"),
    (
        Chats,
        {"guided_json": CITY, "response_format": {"type": "json_object"}},
        "guided_json",
        "either response_format",
    ),
    (Chats, {"ignore_eos": True, "json_schema": CITY}, "ignore_eos", "json_schema"),
    (Chats, {"min_tokens": 4, "tools": [tool("x")], "tool_choice": NAMED_TOOL}, "min_tokens", "tools"),
    (Completions, {"guided_json": CITY}, "guided_json", "no guided_json"),
    (Completions, {"response_format": {"type": "json_object"}}, "response_format", "response_format"),
    (Chats, {"response_format": {"type": "grammar"}}, "response_format", "'json_object'"),
    (Chats, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    (Chats, {"response_format": form(None)}, "response_format", "json_schema.schema"),
    (Chats, {"response_format": form([])}, "response_format", "object"),
    (
        Chats,
        {"response_format": {"type": "json_object"}, "tools": [tool("a")]},
        "response_format",
        "either tools",
    ),
    (Completions, {"prompt": []}, "prompt", "0 prompts"),
    (Completions, {"prompt": ["a"] * 40, "n": 2}, "prompt", "1 to 64 answers"),
    (Completions, {"prompt": ["a"] * 40, "best_of": 2}, "prompt", "1 to 64 answers"),
    (Completions, {"suffix": "b", "echo": True}, "suffix", "echo"),
    (Completions, {"best_of": 3, "stream": True}, "best_of", "only n"),
    (Completions, {"best_of": 2, "n": 3}, "best_of", "2 with n 3"),
    (Completions, {"max_tokens": 0}, "max_tokens", "1 or more"),
    (Responses, {"input": []}, "input", "input"),
    (Responses, {"input": None}, "input", "input"),
    (Responses, {"tempereture": 1}, "tempereture", "no tempereture"),
    (Responses, {"previous_response_id": "resp_1"}, "previous_response_id", "send all items"),
    (Responses, {"conversation": "conv_1"}, "conversation", "no conversation"),
    (Responses, {"prompt": {"id": "pmpt_1"}}, "prompt", "no prompt"),
    (Responses, {"background": True}, "background", "background"),
    (Responses, {"truncation": "auto"}, "truncation", "truncation"),
    (Responses, {"include": ["file_search_call.results"]}, "include", "file_search_call"),
    (Responses, {"tools": [{"type": "file_search"}]}, "tools", "'file_search'"),
    (Responses, {"input": user({"type": "input_file"})}, "input", "'input_file'"),
    (Responses, {"input": user({"type": "input_file", "file_id": "x"})}, "input", "'input_file'"),
    (Responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    (Responses, {"input": [{"role": "assistant", "content": "The"}]}, "input", "continued"),
    (Responses, {"text": {"verbosity": "low"}}, "text", "verbosity"),
    (Messages, {"messages": []}, "messages", "messages"),
    (Messages, {"max_tokens": None}, "max_tokens", "max_tokens"),
    (Messages, {"max_tokens": 0}, "max_tokens", "max_tokens"),
    (Messages, {"tempereture": 1}, "tempereture", "no tempereture"),
    (Messages, {"top_k": 1.5}, "top_k", "top_k"),
    (Messages, {"mcp_servers": [{}]}, "mcp_servers", "no mcp_servers"),
    (Messages, {"messages": user({"type": "image", "source": {"type": "url"}})}, "messages", "'url'"),
    (Messages, {"messages": user({"type": "text"})}, "messages", "messages.0.content.0.text.text"),
    (Messages, {"messages": user({"type": "text", "text": "x", "y": 1})}, "messages", "text.y"),
    (Messages, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role"),
    (
        Messages,
        {"messages": user({"type": "tool_use", "id": "a", "name": "b", "input": {}})},
        "messages",
        "'tool_use'",
    ),
    (
        Messages,
        {"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})},
        "messages",
        "'image'",
    ),
    (Messages, {"messages": [*USER, {"role": "assistant", "content": "The"}]}, "messages", "continued"),
    (Messages, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools", "web_search_20250305"),
    (Messages, {"tool_choice": {"type": "any"}}, "tool_choice", "no 'tools'"),
    (Messages, {"tool_choice": {"type": "tool"}}, "tool_choice", "expected a name"),
    (Chat, {"tempereture": 1}, "tempereture", "no tempereture"),
    (Chat, {"options": {"mirostat": 1}}, "options", "options.mirostat"),
    (Chat, {"options": {"tempereture": 1}}, "options", "no options.tempereture"),
    (Chat, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options", "options.repeat_last_n"),
    (Chat, {"options": {"num_predict": 0}}, "options", "num_predict"),
    (Chat, {"format": "xml"}, "format", "format"),
    (Chat, {"format": "json", "tools": [tool("a")]}, "response_format", "either tools"),
    (Generate, {"images": ["aGk="], "raw": True}, "images", "no images"),
    (Generate, {"context": [1, 2]}, "context", "no context"),
    (Generate, {"template": "{{ .Prompt }}"}, "template", "no template"),
    (Generate, {"raw": True, "format": "json"}, "format", "no format"),
    (Chats, {"reasoning_effort": "much"}, "reasoning_effort", "'medium'"),
    (Chats, {"thinking_budget": -2}, "thinking_budget", "greater than or equal to -1"),
    (Responses, {"reasoning": {"effort": "much"}}, "reasoning", "'medium'"),
    (Messages, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking", "budget_tokens"),
    (Chat, {"think": "much"}, "think", "'medium'"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "param", "words"),
    WRONG,
    ids=[f"{case[0].__name__}-{next(iter(case[1]))}" for case in WRONG],
)
def test_a_wrong_field_is_named(kind, fields, param, words):
    """Status 400, with the field and the reason; null leaves a field out."""
    body = {name: value for name, value in (GOOD[kind] | fields).items() if value is not None}
    with pytest.raises(ApiError) as refused:
        request_of(kind, body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["lora", "lora_request", "adapter", "adapters"])
def test_adapters_are_refused_in_every_protocol(name):
    """Whatever their name: the field would have changed the model."""
    for kind, body in GOOD.items():
        with pytest.raises(ApiError, match=f"no {name}") as refused:
            request_of(kind, body | {name: "x"})
        assert refused.value.status == 400


def test_good_bodies_and_unknown_fields():
    """Every protocol has a smallest body; OpenAI's chats and completions ignore what they do not know."""
    for kind, body in GOOD.items():
        request_of(kind, body)
    for kind in (Chats, Completions):
        request_of(kind, GOOD[kind] | {"user": "me", "store": False, "seed": None})


ASSISTANT = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}

HARMLESS: dict[type[Exchange[Any]], list[dict[str, Any]]] = {
    # what clients send by default: no limit, off, neutral, empty, and numbers with a decimal point
    Chats: [
        {"max_tokens": -1, "n": 1.0, "seed": 7.0, "top_k": 40.0, "stop": [""], "top_logprobs": 0},
        {
            "logit_bias": [],
            "ban_eos_token": False,
            "max_completion_tokens": -1,
            "logprobs": False,
            "functions": [],
            "function_call": "none",
        },
        {"functions": None, "function_call": "auto", "tools": [], "tool_choice": "auto"},
        {"n_predict": -1, "repeat_last_n": 64, "repeat_penalty": 1.0, "mirostat": 0, "typ_p": 1.0},
        {"add_generation_prompt": True, "continue_final_message": False, "guided_json": None, "grammar": ""},
        {
            "modalities": ["text"],
            "verbosity": "medium",
            "structured_outputs": {},
            "skip_special_tokens": True,
        },
    ],
    Completions: [{"max_tokens": -1, "best_of": 1.0, "logprobs": 2.0, "xtc_probability": 0.0}],
    Responses: [
        {
            "conversation": None,
            "max_output_tokens": -1,
            "tools": [],
            "top_logprobs": 0,
            "max_tool_calls": None,
        }
    ],
    Messages: [
        {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "betas": ["x"],
        },
        {
            "mcp_servers": [],
            "container": None,
            "speed": "standard",
            "service_tier": "auto",
            "max_tokens": 9.0,
        },
        {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}},
        {"messages": [*USER, ASSISTANT, *USER], "stop_sequences": [""]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *user({"type": "text", "text": "x", "citations": []}),
            ]
        },
        {
            "tools": [
                {"name": "x", "input_schema": CITY, "defer_loading": False, "allowed_callers": ["direct"]}
            ]
        },
    ],
    Chat: [
        {"options": {"num_ctx": 10**6, "num_predict": -2, "stop": None, "seed": -1}, "keep_alive": "-1s"},
        {
            "options": {
                "repeat_last_n": 64,
                "repeat_penalty": 1.0,
                "mirostat": 0,
                "mirostat_eta": 0.1,
                "tfs_z": 1.0,
            }
        },
        {"truncate": True, "shift": True, "format": "", "tools": None},
        {"messages": [{**USER[0], "images": [], "tool_calls": []}]},
    ],
    Generate: [
        {"template": "", "context": [], "images": [], "options": {"repeat_last_n": 0, "repeat_penalty": 1.2}}
    ],
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_clients_send_by_default_changes_nothing(kind):
    """The request is the smallest body's, but for its seed."""
    for fields in HARMLESS[kind]:
        request = request_of(kind, GOOD[kind] | fields)
        (choices,) = request.choices()
        own = {"max_new_tokens", "top_k", "seed", "repetition_penalty", "logprobs"} - {"stop"}
        assert choices.keys() <= own, fields
        assert choices.get("repetition_penalty", 1.0) == 1.0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"with_pieces": True}, "with_pieces"),
    ],
)
def test_fields_that_would_change_tokens_are_refused(fields, field):
    """By /tokenize; with the values that change nothing they pass."""
    with pytest.raises(ApiError, match=field):
        parse(TokenizeFields, json_bytes({"content": "x"} | fields))
    same = {"add_generation_prompt": True, "continue_final_message": False, "chat_template": None}
    assert (
        parse(TokenizeFields, json_bytes({"content": "x", "add_special": False} | same)).add_special_tokens
        is False
    )


def test_a_seed_of_minus_one_is_random():
    """As llama.cpp, LM Studio and ollama have it; no limit leaves the answer the rest of the context."""
    seeds = {request_of(Chats, GOOD[Chats] | {"seed": -1}).choices()[0]["seed"] for _ in range(3)}
    assert len(seeds) == 3
    for kind in (Chats, Completions):
        assert "max_new_tokens" not in request_of(kind, GOOD[kind] | {"max_tokens": -1}).choices()[0]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_choice": ["yes", "no"]}, TextForm(("yes", "no"))),
        ({"guided_regex": "a+"}, TextForm(pattern="a+")),
        ({"regex": "a+"}, TextForm(pattern="a+")),
        ({"structured_outputs": {"choice": ["yes"]}}, TextForm(("yes",))),
        ({"structured_outputs": {"regex": "a+"}}, TextForm(pattern="a+")),
        ({"guided_json": CITY}, CITY),
        ({"json_schema": '{"type": "array"}'}, {"type": "array"}),
        ({"structured_outputs": {"json": CITY, "regex": None}}, CITY),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": CITY}}, CITY),
        ({"response_format": {"type": "json_schema", "schema": CITY}}, CITY),
        ({"response_format": form(CITY)}, CITY),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_a_form_is_obeyed_under_each_of_its_names(fields, form):
    """The names of OpenAI, vLLM, llama.cpp, SGLang and others."""
    assert request_of(Chats, GOOD[Chats] | fields).answer_form() == form


def test_fields_of_ends_are_obeyed():
    """Tokens that end an answer, ends that do not, and a least number of tokens."""
    fields = {
        "stop_token_ids": [5, 6.0],
        "ignore_eos": True,
        "min_new_tokens": 3.0,
        "logit_bias": [[7, -1.5]],
    }
    for kind in (Chats, Completions):
        (choices,) = request_of(kind, GOOD[kind] | fields).choices()
        want = {"stop_token_ids": [5, 6], "ignore_ends": True, "min_new_tokens": 3, "logit_bias": {7: -1.5}}
        assert {name: choices[name] for name in want} == want


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_reasoning_is_turned_off_under_each_of_its_names(fields):
    """The template gets both names that templates have for it."""
    want = {"enable_thinking": False, "thinking": False, "tools": None}
    assert request_of(Chats, GOOD[Chats] | fields).template() == want


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9999],
)
def test_bodies_that_are_no_json_object(body):
    """Each is status 400, without a field at fault but where the object has one."""
    with pytest.raises(ApiError) as refused:
        parse(ChatFields, body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("kind", "fields", "effort", "variables"),
    [
        (Messages, {"thinking": {"type": "disabled"}}, None, {"enable_thinking": False}),
        (Messages, {"thinking": {"type": "adaptive"}}, None, {"enable_thinking": True}),
        (
            Messages,
            {"thinking": {"type": "enabled", "budget_tokens": 31999}},
            None,
            {"enable_thinking": True},
        ),
        (Messages, {"output_config": {"effort": "low"}}, "low", None),
        (Responses, {"reasoning": {"effort": "none"}}, "none", None),
        (Responses, {"reasoning": {"effort": "low"}}, "low", None),
        (Chat, {"think": False}, None, {"enable_thinking": False}),
        (Chat, {"think": "low"}, "low", {"enable_thinking": True}),
        (Generate, {"think": True}, None, {"enable_thinking": True}),
    ],
)
def test_reasoning_becomes_variables_of_the_template(kind, fields, effort, variables):
    """Each protocol's way to turn it on, off, or to a level."""
    request = request_of(kind, GOOD[kind] | fields)
    assert (request.reasoning_effort, request.chat_template_kwargs) == (effort, variables)


@pytest.mark.parametrize(
    ("kind", "fields", "budget"),
    [
        (Chats, {}, None),
        (Chats, {"thinking_budget": 40}, 40),
        (Chats, {"thinking_budget_tokens": 40}, 40),
        (Chats, {"thinking_token_budget": 40, "reasoning_effort": "low"}, 40),
        (Chats, {"thinking_budget": -1}, None),
        (Chats, {"thinking": {"type": "enabled", "budget_tokens": 40}}, 40),
        (Chats, {"thinking": {"type": "disabled", "budget_tokens": 40}}, 0),
        (Chats, {"reasoning": {"max_tokens": 40}}, 40),
        (Chats, {"reasoning": {"effort": "high"}}, 800),
        (Chats, {"enable_thinking": False}, 0),
        (Chats, {"enable_thinking": True}, None),
        (Chats, {"reasoning_effort": "none"}, 0),
        (Chats, {"reasoning_effort": "minimal"}, 100),
        (Chats, {"reasoning_effort": "low"}, 200),
        (Chats, {"reasoning_effort": "medium"}, 500),
        (Chats, {"reasoning_effort": "high"}, 800),
        (Chats, {"reasoning_effort": "xhigh"}, 950),
        (Chats, {"reasoning_effort": "max"}, None),
        (Completions, {}, None),
        (Responses, {"reasoning": {"effort": "none"}}, 0),
        (Responses, {"reasoning": {"effort": "low"}}, 200),
        (Messages, {"thinking": {"type": "enabled", "budget_tokens": 40}}, 40),
        (Messages, {"thinking": {"type": "adaptive"}}, None),
        (Messages, {"thinking": {"type": "disabled"}}, 0),
        (Messages, {"output_config": {"effort": "medium"}}, 500),
        (Chat, {"think": "low"}, 200),
        (Chat, {"think": True}, None),
        (Chat, {"think": False}, 0),
        (Generate, {"think": "high"}, 800),
    ],
)
def test_the_budget_of_an_answer_of_1000_tokens(kind, fields, budget):
    """A number as it is, an effort as its share; the server's own for requests that say nothing."""
    request = request_of(kind, GOOD[kind] | fields)
    assert request.reasoning_budget(1000) == budget
    says_nothing = kind in (Chats, Messages, Chat) and (not fields or fields.get("enable_thinking"))
    if says_nothing:
        assert request.reasoning_budget(1000, 7) == 7
        assert request.reasoning_budget(1000, 0) == (None if fields else 0)


def test_templates_that_know_an_effort_or_a_budget_get_it():
    """With the server's budget of 0 reasoning is off in the template too, unless the request asks for some."""
    given = {"reasoning_effort": "low", "thinking_budget": 40}
    assert request_of(Chats, GOOD[Chats] | given).template() == given | {"tools": None}
    request = request_of(Chats, GOOD[Chats])
    assert request.template(0) == {"enable_thinking": False, "thinking": False, "tools": None}
    assert request_of(Chats, GOOD[Chats] | given).template(0) == given | {"tools": None}
