"""Times grammars of JSON schemas for a vocabulary of a large model's size.

    python -m tools.timing.grammars [--words 151936] [--tokens 200] [--json]

The vocabulary is random: words of up to 14 characters that occur in JSON, merged in pairs. Prints the seconds and bytes
of its table; then of each schema the milliseconds until it is compiled, and microseconds of a mask, one a token, over
random allowed tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edgemoe.errors import EdgemoeError
from edgemoe.grammar.lark import json_answer
from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary
from edgemoe.machine.process import resident_bytes
from tools.command_line import failed, make_parser, two_or_more

END = "<|end|>"

_PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def _wide(count: int) -> dict[str, Any]:
    names = [f"property{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}


SCHEMAS: Mapping[str, Mapping[str, object]] = {
    "any object": {"type": "object"},
    "three properties": _PEOPLE,
    "1,000 required properties": _wide(1000),
    "4,000 required properties": _wide(4000),
    "10,000 constants": {"enum": [f"value {i}" for i in range(10_000)]},
    "a long pattern": {"type": "string", "pattern": "^" + ".{0,200}x" * 20 + "$"},
}


def tokenizer_of(words: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of so many words, the last of which ends an answer."""
    chosen = random.Random(0)
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    seen, merges = set(known), []
    while len(known) < words - 1:
        one, other = chosen.choice(known), chosen.choice(known)
        if len(one + other) <= 14 and one + other not in seen:
            seen.add(one + other)
            known.append(one + other)
            merges.append((one, other))
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def time_schema(words: Vocabulary, schema: Mapping[str, object], tokens: int) -> dict[str, float]:
    """Compiles a schema, and follows random answers for so many tokens."""
    start = time.perf_counter()
    grammar = Grammar(words, json_answer(words, schema))
    compiled, masks = time.perf_counter() - start, list[float]()
    chosen, matcher = random.Random(0), Matcher(grammar)
    while len(masks) < tokens:
        start = time.perf_counter()
        allowed = matcher.allowed()
        masks.append(time.perf_counter() - start)
        token = chosen.choice(np.flatnonzero(allowed).tolist())
        if words.is_end(token):
            matcher = Matcher(grammar)
        else:
            matcher.take(token)
    return {"compile_ms": 1e3 * compiled, "mask_us": 1e6 * median(masks), "slowest_mask_us": 1e6 * max(masks)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    given = _parser().parse_args(arguments)
    try:
        tokenizer = tokenizer_of(given.words)
        Vocabulary(tokenizer_of(1000), 1000, frozenset({999}))  # imports llguidance
        before, start = resident_bytes(), time.perf_counter()
        words = Vocabulary(tokenizer, given.words, frozenset({given.words - 1}))
        found: dict[str, Any] = {
            "words": given.words,
            "table_s": time.perf_counter() - start,
            "table_bytes": resident_bytes() - before,
            "schemas": {name: time_schema(words, schema, given.tokens) for name, schema in SCHEMAS.items()},
        }
    except EdgemoeError as error:
        return failed("tools.timing.grammars", error)
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"table of {given.words:,} words: {found['table_s']:.2f} s, {found['table_bytes'] / 1e6:.0f} MB")
    for name, row in found["schemas"].items():
        print(
            f"{name}: compiled in {row['compile_ms']:.1f} ms, a mask in {row['mask_us']:.0f} µs, "
            f"the slowest in {row['slowest_mask_us']:.0f}"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("tools.timing.grammars", __doc__)
    parser.add_argument("--words", type=two_or_more, default=151_936)
    parser.add_argument("--tokens", type=two_or_more, default=200)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
