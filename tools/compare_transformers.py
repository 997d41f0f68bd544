"""Greedy answers of edgemoe beside transformers' bf16 ones, prompt by prompt, on small chat tasks.

    python tools/compare_transformers.py CHECKPOINT [--exact 8] [--prompts 100] [--limit-over-minimum 1.05] [--json]

edgemoe runs at a factor over the smallest limit that its plan allows, so that experts are really read while
it decodes. Prints how many answers are the same text, and exits 1 if fewer than --at-least of them are.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from edgemoe.conversation import Conversation, load_tokenizer
from edgemoe.engine import Engine, StoreModel
from edgemoe.generate import Sampling
from edgemoe.stores import resolve_store

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Canada": "Ottawa",
}
WORDS = ("cat", "house", "river", "garden", "window", "bread", "stone", "cloud", "winter", "music")
FUNCTIONS = ("adds two numbers", "squares a number", "doubles a number", "returns the larger of two numbers")


def task_prompts(count: int, seed: int) -> list[str]:
    """`count` distinct prompts of small chat tasks: capitals both ways, spelling, arithmetic, sorting, Python."""
    chance = random.Random(seed)
    digit = functools.partial(chance.randint, 2, 9)
    makers = (
        lambda: f"What is the capital of {chance.choice(list(CAPITALS))}?",
        lambda: f"{chance.choice(list(CAPITALS.values()))} is the capital of which country?",
        lambda: f"Spell the word {chance.choice(WORDS)}.",
        lambda: f"What is {digit()} + {digit()}?",
        lambda: f"What is {digit() + 9} - {digit()}?",
        lambda: f"What is {digit()} times {digit()}?",
        lambda: f"Tom has {digit()} books. Tom finds {digit()} more. How many books does Tom have?",
        lambda: f"Sort these numbers: {digit()}, {digit()}, {digit()}",
        lambda: f"Write a Python function that {chance.choice(FUNCTIONS)}.",
    )
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts.setdefault(chance.choice(makers)())
    return list(prompts)


def reference_answers(
    checkpoint: Path, tokenizer: Any, prompts: list[str], tokens: int, dtype: str = "bfloat16"
) -> list[str]:
    """transformers' own greedy answers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    answers = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(
                **ids, max_new_tokens=tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def edgemoe_answers(
    store: StoreModel, tokenizer: Any, prompts: list[str], tokens: int, *, exact: int, over_minimum: float
) -> tuple[list[str], dict[str, float]]:
    """edgemoe's greedy answers under a limit, each a conversation of its own, and what they cost."""
    smallest = store.plan(vram_limit=None, level=exact, context=512).minimum_vram_bytes
    plan = store.plan(vram_limit=int(smallest * over_minimum), level=exact, context=512)
    sampling = Sampling(0, 1, 0, 1, 0, tokens, frozenset({tokenizer.eos_token_id}))
    answers, read, peak = [], [], 0
    with Engine(store, plan, exact=True) as engine:
        sequence = engine.new_sequence()
        for prompt in prompts:
            answer = Conversation(engine, tokenizer, sampling, sequence=sequence).ask(prompt, lambda _: None)
            answers.append(answer.text)
            read.append(answer.ssd_bytes_per_token or 0.0)
            peak = max(peak, answer.peak_vram_bytes)
    cost = {
        "vram_limit_bytes": plan.vram_limit_bytes,
        "minimum_vram_bytes": smallest,
        "experts_resident": plan.vram_experts,
        "ssd_bytes_per_decoded_token": sum(read) / len(read),
        "peak_vram_bytes": peak,
    }
    return answers, cost


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--store", type=Path, help="a store of the same checkpoint, e.g. with --dense-bits 8")
    parser.add_argument("--exact", type=int, default=8, choices=(8, 4, 2))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--limit-over-minimum", type=float, default=1.05)
    parser.add_argument("--at-least", type=float, default=0.95, help="share of answers that must be the same")
    parser.add_argument(
        "--reference-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="float32 shows how often transformers' own bf16 rounding changes an answer",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    store = StoreModel.open(resolve_store(given.store or given.checkpoint))
    tokenizer = load_tokenizer(store.directory)
    prompts = task_prompts(given.prompts, given.seed)
    wanted = reference_answers(given.checkpoint, tokenizer, prompts, given.new_tokens, given.reference_dtype)
    got, cost = edgemoe_answers(
        store, tokenizer, prompts, given.new_tokens, exact=given.exact, over_minimum=given.limit_over_minimum
    )
    same = sum(a == b for a, b in zip(wanted, got, strict=True))
    if given.json:
        print(json.dumps({"exact": given.exact, "prompts": len(prompts), "same": same, **cost}))
    else:
        for prompt, reference, answer in zip(prompts, wanted, got, strict=True):
            if reference != answer:
                print(f"{prompt}\n  transformers: {reference!r}\n  edgemoe:      {answer!r}")
        print(f"{same} of {len(prompts)} answers are the same text at exact {given.exact}; {cost}")
    return 0 if same >= given.at_least * len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
