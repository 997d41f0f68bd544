"""Text and bytes of an answer's tokens, after the prompt that they continue."""

from __future__ import annotations

import pytest
from sentencepiece_tokenizer import sentencepiece_tokenizer
from small_tokenizer import a_tokenizer

from edgemoe.engine.sampling import TokenLogprobs
from edgemoe.engine.text import TextStream
from edgemoe.engine.token_texts import TokenTexts
from edgemoe.serve.openai_chat.logprobs import of_completion
from edgemoe.serve.protocol.logprobs import TextOffsets, entries

PIECES = sentencepiece_tokenizer()


def ids(*words: str) -> list[int]:
    return [PIECES.convert_tokens_to_ids(word) for word in words]


def streamed(tokens: list[int], after: list[int]) -> tuple[str, str]:
    """The text by pieces, and the whole text at the end."""
    stream = TextStream(PIECES, after=after)
    text = "".join(map(stream.add, tokens))
    return text + stream.end(), stream.text


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ("Hello", ("▁world", "▁and"), " world and"),
        ("Hello\n", ("▁▁▁▁", "return"), "    return"),
        ("", ("▁Hello", "▁world"), "Hello world"),
        ("Hello", ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁and"), "\N{GRINNING FACE} and"),
        ("Hello", ("▁world", "<0xF0>", "<0x9F>"), " world\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_an_answer_continues_its_prompt(prompt, tokens, text):
    """Its first token keeps its space; only at the begin of a text there is none."""
    after = PIECES(prompt)["input_ids"] if prompt else [1]
    assert streamed(ids(*tokens), after) == (text, text)


@pytest.mark.parametrize("tokenizer", [PIECES, a_tokenizer()], ids=["bytes of fallback", "byte level"])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer):
    """Joined they are UTF-8, parts of characters included; a special token is no part of an answer."""
    text = " the quick brown \N{GRINNING FACE}é and"
    tokens, texts = tokenizer(text, add_special_tokens=False)["input_ids"], TokenTexts(tokenizer)
    joined = b"".join(map(texts.of, tokens))
    assert joined.decode().lstrip() == text.lstrip()
    end = tokenizer.eos_token_id
    assert (texts.of(end), texts.shown(end)) == (tokenizer.eos_token.encode(), b"")
    assert texts.of(10_000) == b""
    of_each = entries([TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in tokens], texts)
    assert b"".join(bytes(each["bytes"]) for each in of_each) == joined
    assert all(each["bytes"] == each["top_logprobs"][0]["bytes"] for each in of_each)


def test_offsets_lead_to_tokens_in_the_text():
    """With parts of characters and the end's token, and in an echoed prompt, whose first space is not shown."""
    texts, face = TokenTexts(PIECES), ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
    tokens = [TokenLogprobs(token, -1.0, ()) for token in ids("▁world", *face, "▁and", "</s>")]
    text = " world\N{GRINNING FACE} and"
    found = of_completion(None, tokens, texts, TextOffsets(texts), text)
    assert found["text_offset"] == [0, 6, 6, 6, 6, 7, 11]
    assert found["tokens"][0] == " world"
    echoed = of_completion(
        1, [TokenLogprobs(ids("▁Hello")[0], -1.0, ()), *tokens], texts, TextOffsets(texts), "Hello" + text
    )
    assert echoed["text_offset"] == [0, 0, 5, 11, 11, 11, 11, 12, 16]
