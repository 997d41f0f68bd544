"""The prompts of a comparison, which both programs get as the same token ids."""

from __future__ import annotations

import argparse

from edgemoe.bench.prompts import text_prompts
from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer


def prompts_of(options: argparse.Namespace, vocabulary: int) -> tuple[dict[int, list[list[int]]], str]:
    """Encodes enough prompts of each length for every round and the largest batch, by the demo model's tokenizer.

    Returns:
        prompt length -> token ids of each prompt, and where the text came from.

    Raises:
        UserError: the text is too short, or the models do not know one of its tokens.
    """
    tokenizer, count = load_tokenizer(DEMO), options.rounds * max(options.batch)
    sets = {
        length: text_prompts(tokenizer, options.prompt_file, length, count, options.seed)
        for length in options.prompt_tokens
    }
    prompts = {length: [encode() for encode in of.prompts] for length, of in sets.items()}
    highest = max(max(ids) for of in prompts.values() for ids in of)
    if highest >= vocabulary:
        raise UserError(
            f"a model that knows token {highest} of the prompts",
            f"a vocabulary of {vocabulary}",
            "use a model with a larger vocabulary",
        )
    return prompts, next(iter(sets.values())).source
