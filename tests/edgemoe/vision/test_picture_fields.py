"""Pictures in the bodies of all four protocols become the parts that the Python API takes."""

from __future__ import annotations

import pytest
from small_tokenizer import a_tokenizer

from edgemoe.api.pictures import bytes_of
from edgemoe.serve.anthropic.fields import Turn
from edgemoe.serve.ollama.fields import ChatBody, GenerateBody
from edgemoe.serve.openai_responses.items import MessageItem
from edgemoe.serve.request.chat import MessageFields, as_messages
from edgemoe.serve.text_limit import TextLimit

BYTES, DATA, TEXT = b"picture", "cGljdHVyZQ==", {"type": "text", "text": "what is it"}


def chats() -> list[dict[str, object]]:
    """The user's message as OpenAI's chats have it."""
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}", "detail": "high"}}
    return as_messages([MessageFields.model_validate({"role": "user", "content": [part, TEXT]})])


def responses() -> list[dict[str, object]]:
    """The user's message as OpenAI's responses have it."""
    parts = [{"type": "input_image", "image_url": f"data:;base64,{DATA}"}, {**TEXT, "type": "input_text"}]
    messages: list[dict[str, object]] = []
    MessageItem.model_validate({"role": "user", "content": parts}).add_to(messages)
    return messages


def anthropic() -> list[dict[str, object]]:
    """The user's message as Anthropic's messages have it."""
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    turn = Turn.model_validate({"role": "user", "content": [{"type": "image", "source": source}, TEXT]})
    return turn.as_messages()


def ollama() -> list[dict[str, object]]:
    """The user's message as ollama's chats have it."""
    message = {"role": "user", "content": TEXT["text"], "images": [DATA]}
    return as_messages(ChatBody(model="m", messages=[message]).as_chat(64).messages)


def ollama_generate() -> list[dict[str, object]]:
    """The user's message as ollama's prompts have it."""
    return as_messages(GenerateBody(model="m", prompt=TEXT["text"], images=[DATA]).as_chat(64).messages)


@pytest.mark.parametrize(
    "read", [chats, responses, anthropic, ollama, ollama_generate], ids=lambda f: f.__name__
)
def test_a_picture_of_a_body_becomes_a_part(read):
    """Its bytes come before the text, as the client has sent them."""
    (message,) = read()
    picture, text = message["content"]
    assert (bytes_of(picture), text) == (BYTES, TEXT)


def test_the_bytes_of_a_picture_are_no_text():
    """The bound on characters of a prompt counts the text around it alone."""
    limit = TextLimit(a_tokenizer(), 1)
    part = {"type": "image_url", "image_url": {"url": "x" * 10 * limit.characters}}
    limit.require_chat([{"role": "user", "content": [part, {"type": "text", "text": ""}]}], {})
