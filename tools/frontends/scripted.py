"""A server whose model answers by a script: a stand-in where a trained one is too small for tools.

The logits want the script's tokens; all else is the server's own: template, parser, grammars, cache and protocols.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from edgemoe.engine.sampling import Sampler

ROOT = Path(__file__).resolve().parents[2]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")

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
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
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

Wanted = str | Callable[[str], str | list[int]]
"""The answer of every prompt; or text of a prompt -> text, or token ids, of its answer."""

_CHOOSE = Sampler.next


def chatml(tokenizer: Tokenizer, template: str = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer with SPECIAL and a chat template; TAGS are added tokens that are not special."""
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=template
    )


def following(tokenizer: Any, script: Wanted, prompts: list[str]) -> Callable[..., Any]:
    """Returns a Sampler.next whose logits want an answer token by token, then the end.

    A grammar may leave them a quote or a brace instead. Each prompt is added to `prompts` as its answer begins.
    """
    quote, brace = (tokenizer.convert_tokens_to_ids(text) for text in '"}')
    answers = dict[str, list[int]]()

    def ids_of(prompt: str) -> list[int]:
        answer = script if isinstance(script, str) else script(prompt)
        return tokenizer(answer, add_special_tokens=False)["input_ids"] if isinstance(answer, str) else answer

    def next_token(self: Sampler, tokens: list[int], logits: torch.Tensor, new: int = 0) -> Any:
        prompt = tokenizer.decode(tokens[: len(tokens) - new])
        if new == 0:
            prompts.append(prompt)
            answers.pop(prompt, None)
        ids = answers[prompt] if prompt in answers else answers.setdefault(prompt, ids_of(prompt))
        scores = torch.zeros_like(logits)
        scores[quote], scores[brace] = 50.0, 45.0
        scores[ids[new] if new < len(ids) else tokenizer.eos_token_id] = 100.0
        return _CHOOSE(self, tokens, scores, new)

    return next_token


def tiny_config() -> Qwen3MoeConfig:
    """The configuration of a model of one layer with four experts."""
    return Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        max_position_embeddings=131072,
        eos_token_id=2,
        pad_token_id=0,
    )


def make_store(work: Path, config: PretrainedConfig | None = None) -> Path:
    """Makes a model with random weights, and a tokenizer of this repository's texts; returns its store.

    Args:
        work: folder for it; a store that is there is taken as it is.
        config: the model's sizes, with a vocabulary of 4,096; None: tiny_config.
    """
    from edgemoe.models.conversion.run import convert_checkpoint

    store = work / "scripted-store"
    if store.exists():
        return store
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("edgemoe/**/*.py")]
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in texts), trainer)
    torch.manual_seed(0)
    checkpoint = work / "scripted-checkpoint"
    model = AutoModelForCausalLM.from_config(config or tiny_config())
    model.to(torch.bfloat16).save_pretrained(checkpoint)
    chatml(tokenizer).save_pretrained(checkpoint)
    convert_checkpoint(checkpoint, store, max_level=8, layout="auto", dense_bits=16)
    return store


@contextmanager
def scripted_server(
    work: Path, answers: Wanted, *, context: int = 65536, parallel: int = 1
) -> Iterator[tuple[str, list[str]]]:
    """Serves the scripted model at a free port of this machine inside the block.

    Args:
        work: folder for the model.
        answers: its answers.
        context, parallel: tokens of a request, and requests that are answered at the same time.

    Yields:
        The server's address, and the prompts of its answers so far.
    """
    import edgemoe
    from edgemoe.serve.guard import Access
    from edgemoe.serve.models import models_of
    from edgemoe.serve.server import Address, Server
    from edgemoe.serve.slot import Source

    store, prompts = make_store(work), list[str]()
    listening = Address(port=0).listen()
    ready = threading.Event()

    def load(opened: ExitStack) -> Any:
        model = opened.enter_context(edgemoe.load(store, context=context, parallel=parallel))
        Sampler.next = following(model.tokenizer, answers, prompts)  # type: ignore[method-assign]
        return model

    models = models_of({"scripted": Source(load)}, 8)
    server = Server(models, Access(), lambda line: ready.set() if line == "ready" else None)
    thread = threading.Thread(target=server.serve_models, args=(listening,))
    thread.start()
    try:
        if not ready.wait(60):
            raise TimeoutError("expected a model that loads within 60 s, got none: see the error above")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", prompts
    finally:
        server.should_exit = True
        thread.join()
        Sampler.next = _CHOOSE  # type: ignore[method-assign]
