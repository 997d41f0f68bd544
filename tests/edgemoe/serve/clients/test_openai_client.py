"""OpenAI's own client against the server: whole and streamed answers, in an event loop too, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from imported_later import imported_later
from servers import a_model, server_of

from edgemoe.serve.guard import Access

openai = imported_later("openai")

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
KEY = "sk-local"


@pytest.fixture(scope="module")
def keyed(tiny_store) -> Iterator[object]:
    with server_of(a_model(tiny_store, parallel=2), Access(key=KEY), limit=4) as one:
        yield one


@pytest.fixture
def client(keyed) -> Iterator[object]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


def test_a_chat_whole_and_streamed(keyed, client):
    """Text, reason, usage and log probabilities, as the client's types have them."""
    want = keyed.serving.model.generate(MESSAGES, max_new_tokens=5, logprobs=1)
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**fields)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (want.text, want.finish_reason)
    assert whole.usage.completion_tokens == want.new_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens <= want.prompt_tokens
    assert [each.logprob for each in choice.logprobs.content] == [each.logprob for each in want.logprobs]
    streamed = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    pieces = [c.choices[0].delta.content or "" for c in streamed if c.choices]
    assert "".join(pieces) == want.text
    assert streamed[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_clients_stream_helper(client):
    """The helper that joins chunks ends with the whole completion."""
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "logit_bias": {"2": 1000}}
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**fields).choices[0]
    (choice,) = final.choices
    assert (choice.message.role, choice.finish_reason, whole.finish_reason) == ("assistant", "stop", "stop")
    assert (choice.message.content or "") == whole.message.content


def test_completions_and_models(client):
    """A legacy completion with echo and log probabilities, and the list of models."""
    done = client.completions.create(model="tiny", prompt="the fox", max_tokens=2, echo=True, logprobs=1, n=2)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].logprobs.token_logprobs[0] is None
    assert done.choices[0].text.startswith("the fox")
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgemoe"


@pytest.mark.e2e
def test_many_at_once_in_an_event_loop(keyed):
    """Eight asynchronous requests, half of them streams, with the answers of one; beyond the queue they retry."""

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=20) as client:

            async def one(i: int) -> str:
                fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
                if i % 2:
                    stream = await client.chat.completions.create(**fields, stream=True)
                    return "".join([c.choices[0].delta.content or "" async for c in stream])
                return (await client.chat.completions.create(**fields)).choices[0].message.content

            return await asyncio.gather(*map(one, range(8)))

    want = keyed.serving.model.generate(MESSAGES, max_new_tokens=4).text
    assert asyncio.run(main()) == [want] * 8


def test_errors_have_the_clients_types(keyed, client):
    """A wrong field, a missing model or endpoint, a wrong key, and a prompt beyond the context."""
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="tiny", messages=MESSAGES, temperature=-1)
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        create(model="tiny", messages=[{"role": "user", "content": "fox " * 500}], stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.InternalServerError, match="embeddings are not computed") as none:
        client.embeddings.create(model="tiny", input="x")
    assert (none.value.status_code, none.value.response.request.headers["x-stainless-retry-count"]) == (
        501,
        "0",
    )
    other = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        other.models.list()
