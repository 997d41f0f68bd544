"""The tiny model with logits that want the tokens of a script, and a tokenizer and a chat template with tools."""

from __future__ import annotations

from pathlib import Path

from counted_engine import CountedEngine
from servers import GREEDY
from small_tokenizer import SPECIAL, byte_level_bpe
from transformers import PreTrainedTokenizerFast

from edgemoe.api.model import Model
from edgemoe.engine.sampling import Sampler
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from tools.frontends.scripted import CHATML, Wanted, chatml, following

END = SPECIAL.index("<|im_end|>")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

CALL = '<tool_call>\n{"name":"weather",  "arguments":{"city":"Oslo"}}\n</tool_call>'
"""With other spaces than the chat template has."""

ANSWER = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"

TURNS = 10


def answer_of_turns(prompt: str) -> str:
    """The answer of a conversation of TURNS calls, by the results that its prompt has."""
    done = prompt.count("<tool_response>")
    return "It is sunny." if done == TURNS else ANSWER.replace("Oslo", f"Oslo{done}")


def chatml_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of fewer than 300 tokens, with the tags as added tokens that are not special."""
    text = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}} the sunny cloudy'
    return chatml(byte_level_bpe(text, 288), template)


def chatml_model(store: Path, template: str = CHATML, *, context: int = 1536, parallel: int = 4) -> Model:
    """The tiny model with that tokenizer, every expert at 8 bits; its logits are wider than the tokenizer."""
    settings = RunSettings(levels=(8,), exact=True, readers=4)
    opened = StoreModel.open(store)
    plan = opened.plan(vram_limit=None, settings=settings, context=context, parallel=parallel)
    return Model(CountedEngine(opened, plan, settings), chatml_tokenizer(template), GREEDY, keep=True)


def script(monkeypatch, tokenizer: PreTrainedTokenizerFast, answers: Wanted) -> list[str]:
    """Has logits want answers (following), for the test; returns the text of every prompt, as answers begin."""
    prompts: list[str] = []
    monkeypatch.setattr(Sampler, "next", following(tokenizer, answers, prompts))
    return prompts
