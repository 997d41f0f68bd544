"""Times answers with guesses at further tokens (--draft) and without, in turn.

    python -m tools.timing.drafts --model STORE --prose BOOK [--draft mtp] [--resident 0.4] [--requests 4] [--rounds 5]

The tokens of every answer are given, so that a small model answers as a large one would: its routers choose experts
for them, and guesses are right or wrong as they would be there. Five kinds: the prose that follows in a book; that
prose in the model's own words, drawn at a temperature; a source file again, with one name changed; records of JSON; and
letters at random, of which three in a row come again but tell nothing of the next one, the worst case for guesses. A
head (--draft mtp) guesses what its model would say: only the model's own words show how often a good head is right.
Prints medians over rounds: the time per token without guesses over the time with them, both times, guesses that were
right, and bytes read per token.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import edgemoe
from edgemoe.bench.environment import environment
from edgemoe.bench.sample import greedy
from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.tokenizer import load_tokenizer
from tools.command_line import failed, make_parser, positive

SOURCE, OLD, NEW = Path(__file__).parents[2] / "edgemoe/kv/blocks.py", "tokens", "entries"
"""The file of the edit, and the name that is changed."""

RECORDS, GUESSING = 40, ("ngram", "mtp")

TEMPERATURE = 0.7
"""The temperature at which the model answers in its own words."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer, as tokens."""

    prompt: list[int]
    answer: list[int]


class GivenSampler(Sampler):
    """Chooses the tokens of a given answer, whatever the logits are."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(greedy(len(exchange.answer)).sampling)
        self._answer = exchange.answer

    def _chosen(self, tokens: Sequence[int], logits: Any, new: int) -> int:
        super()._chosen(tokens, logits, new)  # for its time
        return self._answer[new]


def answers(tokenizer: Any, prose: str, new: int) -> dict[str, Exchange]:
    """The kinds of answers, each of at most `new` tokens."""

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    chance, book = random.Random(0), encoded(prose)
    if len(book) < 200 + new:
        raise UserError(
            f"a text of {200 + new} tokens or more for --prose", f"{len(book)}", "give a longer one"
        )
    source = SOURCE.read_text(encoding="utf-8")
    records = [
        {
            "name": f"item {chance.randrange(1000)}",
            "count": chance.randrange(100),
            "open": chance.random() < 0.5,
        }
        for _ in range(RECORDS)
    ]
    letters = encoded(" ".join(chance.choice("abcde") for _ in range(200 + 2 * new)))
    pairs = {
        "prose": (book[:200], book[200:]),
        "edit": (
            encoded(f"Change {OLD} to {NEW} in this file:\n{source}\n"),
            encoded(source.replace(OLD, NEW)),
        ),
        "json": (
            encoded("Forty items with a name and a count, as JSON:\n"),
            encoded(json.dumps(records, indent=1)),
        ),
        "worst": (letters[:200], letters[200:]),
    }
    return {name: Exchange(prompt, answer[:new]) for name, (prompt, answer) in pairs.items()}


def own_words(model: edgemoe.Model, prompt: list[int], new: int) -> list[int]:
    """The tokens of an answer by the model itself, without guesses."""
    sampling = replace(greedy(new).sampling, temperature=TEMPERATURE)
    request, scheduler = Request(list(prompt), Sampler(sampling)), Scheduler(model.engine)
    scheduler.submit(request)
    scheduler.wait(request)
    return request.tokens[len(prompt) :]


def timed(engine: Engine, scheduler: Scheduler, exchange: Exchange, count: int) -> dict[str, float]:
    """One answer, or several at once; experts are as after a start that has filled free memory.

    Prompts of several answers differ in their last token. Time counts from the end of the last prompt.
    """
    engine.forget_experts()
    engine.fill()
    before = scheduler.loop.decode
    requests = [Request([*exchange.prompt[:-1], 5 + i], GivenSampler(exchange)) for i in range(count)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
    decode, times = scheduler.loop.decode, [request.trace.token_times for request in requests]
    tokens, steps = decode.tokens - before.tokens, decode.steps - before.steps
    seconds = max(each[-1] for each in times) - max(each[0] for each in times)
    left = sum(sum(at > max(one[0] for one in times) for at in each) for each in times)
    return {
        "ms_per_token": 1000 * seconds / left,
        "bytes_per_token": (decode.transfers.ssd_bytes - before.transfers.ssd_bytes) / tokens,
        "tokens_per_step": tokens / steps,
        "drafted": decode.drafted - before.drafted,
        "accepted": decode.accepted - before.accepted,
    }


def opened(options: argparse.Namespace, way: str) -> edgemoe.Model:
    """The model for answers with guesses as --draft has them.

    A share of its experts below 1 is in memory without guesses. With them the limit is the same, so that a head and its
    experts take memory from the model's.
    """
    how = {"exact": options.exact, "context": options.context, "parallel": options.requests}
    model, limit = str(options.model), None
    if options.resident < 1:
        with edgemoe.load(model, draft="off", **how) as whole:
            plan = whole.engine.plan
        limit = plan.vram_limit_bytes - int((1 - options.resident) * plan.plane_bytes)
    return edgemoe.load(model, vram_limit=limit, draft=way, **how)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs every kind of answer `rounds` times in each way.

    Raises:
        UserError: the prose is too short. EdgemoeError: the model cannot be opened.
    """
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    ways = "off", options.draft
    with opened(options, "off") as plain, opened(options, options.draft) as guessing:
        engines = dict(zip(ways, (plain.engine, guessing.engine), strict=True))
        tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else plain.tokenizer
        given = answers(tokenizer, options.prose.read_text(encoding="utf-8"), options.new_tokens)
        words = own_words(plain, given["prose"].prompt, options.new_tokens)
        for name, one in (given | {"own": Exchange(given["prose"].prompt, words)}).items():
            schedulers = {way: Scheduler(engine) for way, engine in engines.items()}
            samples[name] = {way: [] for way in ways}
            for round_ in range(options.rounds):
                for way in ways if round_ % 2 else ways[::-1]:
                    samples[name][way].append(timed(engines[way], schedulers[way], one, options.requests))
        return {
            "environment": environment(plain.engine.store),
            "draft": options.draft,
            "resident": options.resident,
            "requests": options.requests,
            "rows": {name: row(of) for name, of in samples.items()},
            "samples": samples,
        }


def row(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Medians of one kind of answer, and the gain by guesses.

    Args:
        samples: rounds without guesses, and as many with them, in this order.
    """
    without, with_ = ({key: median(one[key] for one in of) for key in of[0]} for of in samples.values())
    pairs = zip(*samples.values(), strict=True)
    return {
        "gain": median(one["ms_per_token"] / other["ms_per_token"] for one, other in pairs),
        "ms_without": without["ms_per_token"],
        "ms_with": with_["ms_per_token"],
        "kb_without": without["bytes_per_token"] / 1000,
        "kb_with": with_["bytes_per_token"] / 1000,
        **{key: with_[key] for key in ("tokens_per_step", "drafted", "accepted")},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("tools.timing.drafts", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a store")
    parser.add_argument("--prose", type=Path, required=True, help="a text")
    parser.add_argument("--draft", choices=GUESSING, default="ngram", help="what guesses")
    parser.add_argument("--tokenizer", type=Path, help="a directory, for a store without a tokenizer")
    parser.add_argument("--resident", type=float, default=1.0, help="share of the experts in memory")
    parser.add_argument("--exact", type=positive, default=8, help="as `edgemoe chat --exact`")
    parser.add_argument("--context", type=positive, default=2048)
    parser.add_argument("--requests", type=positive, default=1, help="answers at once")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--new-tokens", type=positive, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        report = measure(given)
    except EdgemoeError as error:
        return failed("tools.timing.drafts", error)
    if given.json:
        print(json.dumps(report))
    else:
        for name, values in report["rows"].items():
            print(f"{name:6}", " ".join(f"{key} {value:.3g}" for key, value in values.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
