"""A tiny random Qwen3-MoE checkpoint, as transformers saves it: per expert, fused, and in shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens: the bytes, three special tokens, and merges of one sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog while another one thinks about it"
    tokenizer.train_from_iterator([text] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def tiny_model() -> Qwen3MoeForCausalLM:
    """3 layers, the middle one dense; 8 experts of 32, 2 per token; bf16. Not to be changed."""
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                # At initialisation's 0.02 the experts' share of the output would drown in rounding.
                parameter.mul_(10)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, one tensor per expert's matrix, in one file. Not to be changed."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.save_pretrained(directory)
    a_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def fused_checkpoint(tiny_model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, one tensor for all experts of a layer, in several files. Not to be changed."""
    directory = tmp_path_factory.mktemp("model") / "tiny-fused"
    tiny_model.save_pretrained(directory, save_original_format=False, max_shard_size="100KB")
    a_tokenizer().save_pretrained(directory)
    return directory
