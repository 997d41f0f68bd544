"""A model whose logits want the tokens of a script, with a tokenizer and a chat template that have tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from conftest import SPECIAL, byte_level_bpe
from servers import GREEDY
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from edgemoe.api.model import Model
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.sampling import Sampler
from edgemoe.policy.settings import RunSettings

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
END = SPECIAL.index("<|im_end|>")

CHATML = """\
{%- if tools %}<|im_start|>system
tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif thinking_begun %}<think>
{% endif %}
{%- endif %}"""
"""A template in the manner of Qwen 3: calls as JSON between tags, reasoning between tags."""


def chatml_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of fewer than 300 tokens, with the tags as added tokens that are not special."""
    text = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}} the sunny cloudy'
    tokenizer = byte_level_bpe(text, 288)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=template
    )


def chatml_model(store: Path, template: str = CHATML, *, context: int = 768, parallel: int = 4) -> Model:
    """The tiny model with that tokenizer, every expert at 8 bits; its logits are wider than the tokenizer."""
    settings = RunSettings(levels=(8,), exact=True, readers=4)
    opened = StoreModel.open(store)
    plan = opened.plan(vram_limit=None, settings=settings, context=context, parallel=parallel)
    return Model(Engine(opened, plan, settings), chatml_tokenizer(template), GREEDY, keep=True)


CHOOSE = Sampler.next


def script(
    monkeypatch, tokenizer: PreTrainedTokenizerFast, wanted: str | Callable[[str], str | list[int]]
) -> list[str]:
    """Has logits want an answer token by token, then the end; a grammar may leave them a quote or a brace instead.

    Args:
        monkeypatch: of the test.
        tokenizer: of the model.
        wanted: the answer of every prompt; or text of a prompt -> text, or token ids, of its answer.

    Returns:
        the text of every prompt, as answers begin.
    """
    prompts: list[str] = []
    quote, brace = (tokenizer.convert_tokens_to_ids(text) for text in '"}')

    def next_token(self, tokens, logits, new=0):
        prompt = tokenizer.decode(tokens[: len(tokens) - new])
        if new == 0:
            prompts.append(prompt)
        answer = wanted if isinstance(wanted, str) else wanted(prompt)
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"] if isinstance(answer, str) else answer
        scores = torch.zeros_like(logits)
        scores[quote], scores[brace] = 50.0, 45.0
        scores[ids[new] if new < len(ids) else END] = 100.0
        return CHOOSE(self, tokens, scores, new)

    monkeypatch.setattr(Sampler, "next", next_token)
    return prompts
