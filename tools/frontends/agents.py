"""Replays coding agents' conversations: which tokens are computed again, and how long the first one takes.

    python -m tools.frontends.agents --work DIR [--hybrid] [--client NAME] [--json FILE]

Each of four clients (tools.frontends.agent_clients) has a system prompt of 8,000 tokens and a conversation of 20
requests, in which a model of the demo's sizes with random weights answers by a script: it calls a tool three times,
then says what it did, each after a thought. After that the user changes an earlier message, and the next day the system
prompt has another date; at last two agents work in turn.

With --hybrid the model is smaller, and two of its three layers have linear attention, as in Qwen3-Next, whose states
cannot be cropped (docs/decisions/0081).

A token is needed if no earlier prompt, with its answer, begins with the same tokens up to it. What is computed beyond
that is printed as "again". A prompt's last token is always computed, as its logits are wanted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PretrainedConfig, Qwen3MoeConfig, Qwen3NextConfig

from tools.frontends.agent_clients import Agent, Answered, Chat, Files, Messages, Responses, Tool
from tools.frontends.conformance import call
from tools.frontends.scripted import ROOT, make_store, scripted_server

CLIENTS = (Messages, Responses, Chat, Files)
CALLS, SYSTEM, RESULT = 3, 8000, 400
"""Calls before an answer in words; tokens of a system prompt, and of a result."""

TASKS = (
    "Find where a key is hashed.",
    "Rename the function.",
    "Add a test for it.",
    "Run it.",
    "Say it in the docs.",
)
TOOLS = [Tool(name, f"{name.replace('_', ' ')}: {'what it does, and when. ' * 12}") for name in (
    "read_file", "write_file", "list_files", "search", "run_command", "fetch_page"
)]  # fmt: skip


def answer(prompt: str) -> str:
    """The script: a call until CALLS results have followed the user's last message, then words."""
    begun = [part.startswith("<tool_response>") for part in prompt.split("<|im_start|>user\n")]
    results = len(begun) - 1 - max(number for number, result in enumerate(begun) if not result)
    if not prompt.startswith("<|im_start|>system\ntools:") or results == CALLS:
        return (
            "<think>\nAll results are there.\n</think>\n\nIt is done: the file has the change, and its test passes."
            + " Nothing else is other than before." * 4
        )
    path = f"src/part_{len(begun)}.py"
    return f"<think>\nThe file {path} is next.\n</think>\n\n{call('read_file', path=path, first_line=1)}"


@dataclass(frozen=True)
class Sample:
    """One request.

    Args:
        client: the client's name.
        part: the part of its conversation.
        prompt: tokens of the prompt.
        new: tokens that no earlier request has computed.
        computed: tokens that the server computed.
        first_ms: milliseconds until the answer's first part.
    """

    client: str
    part: str
    prompt: int
    new: int
    computed: int
    first_ms: float


class Replay:
    """Sends requests, and compares each prompt's tokens with the ones before.

    Args:
        tokenizer: the model's tokenizer.
        prompts: the server's prompts so far (scripted_server).
    """

    def __init__(self, tokenizer: Any, prompts: list[str]) -> None:
        self._tokenizer, self._prompts = tokenizer, prompts
        self._earlier = list[list[int]]()
        self.samples = list[Sample]()

    def ask(self, agent: Agent, part: str) -> Answered:
        """Sends an agent's conversation, and notes what was computed for it."""
        answered = agent.ask()
        prompt = self._prompts[-1]
        tokens = self._tokens(prompt)
        if len(tokens) != answered.prompt:
            raise ValueError(
                f"expected a prompt of {len(tokens)} tokens, and the server counts {answered.prompt}"
            )
        known = max((shared(tokens, earlier) for earlier in self._earlier), default=0)
        needed = max(len(tokens) - known, 1)
        computed = answered.prompt - answered.cached
        self.samples.append(Sample(agent.name, part, len(tokens), needed, computed, answered.first_ms))
        # The answer's last token is not computed: the request ends with it.
        self._earlier.append(tokens + self._tokens(answer(prompt)))
        return answered

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def shared(tokens: list[int], others: list[int]) -> int:
    """The number of tokens with which both lists begin."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def texts(tokenizer: Any, size: int) -> Iterator[str]:
    """Yields pieces of this repository's programs of about so many tokens."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("edgemoe/[a-k]*/**/*.py")))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for start in range(0, len(tokens) - size, size):
        yield tokenizer.decode(tokens[start : start + size])


def requests(
    replay: Replay, agent: Agent, pieces: Iterator[str], part: str, tasks: tuple[str, ...]
) -> Iterator[None]:
    """Has an agent do tasks; yields after each request."""
    for task in tasks:
        if isinstance(agent, Files):
            path = f"src/part_{len(agent.files) % 4}.py"
            agent.files = {name: text for name, text in agent.files.items() if name != path} | {
                path: next(pieces)
            }
        agent.say(task)
        while True:
            answered = replay.ask(agent, part)
            yield
            if not answered.calls:
                break
            for one in answered.calls:
                agent.give(one, next(pieces))


def replay_client(
    replay: Replay, kind: type[Agent], url: str, system: str, pieces: Iterator[str], tasks: int
) -> None:
    """Replays a client's conversation, an edit in it, a new date, and two of it in turn."""

    def written(about: str) -> Callable[[str], str]:
        return lambda date: f"{about}{system}" + (f"\nToday is {date}." if date else "")

    every = [TASKS[number % len(TASKS)] for number in range(tasks)]
    if kind is Files:  # a request each: as many requests as the others have
        every = [task for task in every for _ in range(CALLS + 1)]
    agent = kind(url, written("One. "), TOOLS)
    marks = []
    for task in every:
        marks.append(len(agent.history))
        for _ in requests(replay, agent, pieces, "a conversation", (task,)):
            pass
    del agent.history[marks[len(marks) // 2] :]
    for _ in requests(
        replay, agent, pieces, "an earlier message changed", ("Undo that, and do it otherwise.",)
    ):
        pass
    agent.date = "2026-11-28"
    for _ in requests(replay, agent, pieces, "the next day", ("Go on.",)):
        pass
    pair = [kind(url, written(about), TOOLS) for about in ("Two. ", "Three. ")]
    running = [
        requests(replay, agent, pieces, "two agents in turn", tuple(every[: max(len(every) // 2, 1)]))
        for agent in pair
    ]
    while running:
        running = [each for each in running if next(each, running) is None]


HEAD = (
    "| client | part | requests | prompt | needed | computed | again | ms to the first token |",
    "|---|---|---|---|---|---|---|---|",
)
"""The first lines of a table. Tokens are means of a request."""


def rows(samples: list[Sample]) -> Iterator[str]:
    """The lines of a table of samples, one for each client and part."""
    for client, part in dict.fromkeys((sample.client, sample.part) for sample in samples):
        mine = [sample for sample in samples if (sample.client, sample.part) == (client, part)]
        prompt, needed, computed = (
            sum(getattr(sample, name) for sample in mine) / len(mine)
            for name in ("prompt", "new", "computed")
        )
        times = f"{median(sample.first_ms for sample in mine):.0f} (most {max(s.first_ms for s in mine):.0f})"
        tokens = f"{prompt:,.0f} | {needed:,.0f} | {computed:,.0f} | {computed - needed:,.0f}"
        yield f"| {client} | {part} | {len(mine)} | {tokens} | {times} |"


def demo_config() -> Qwen3MoeConfig:
    """The demo model's sizes, for a context of 131,072."""
    config = json.loads((ROOT / "edgemoe" / "demo" / "config.json").read_text(encoding="utf-8"))
    return Qwen3MoeConfig(
        **config | {"max_position_embeddings": 131072, "eos_token_id": 2, "pad_token_id": 0}
    )


def hybrid_config() -> Qwen3NextConfig:
    """A model of three layers, two of them with linear attention."""
    return Qwen3NextConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=131072,
        eos_token_id=2,
        pad_token_id=0,
    )


def main() -> int:
    """Replays the clients, prints the table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--tasks", type=int, default=5, help="tasks of a conversation, four requests each (default 5)"
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens of a conversation (default 32768)")
    parser.add_argument(
        "--parallel", type=int, default=2, help="conversations that the memory holds (default 2)"
    )
    parser.add_argument("--hybrid", action="store_true", help="a model with linear attention")
    names = {kind.__name__: kind for kind in CLIENTS}
    parser.add_argument(
        "--client", choices=names, action="append", help="this client; may be repeated (default all)"
    )
    parser.add_argument("--json", type=Path, help="file for every request")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    config: PretrainedConfig = hybrid_config() if options.hybrid else demo_config()
    tokenizer = AutoTokenizer.from_pretrained(make_store(options.work, config))
    with scripted_server(options.work, answer, context=options.context, parallel=options.parallel) as (
        url,
        prompts,
    ):
        replay, pieces = Replay(tokenizer, prompts), texts(tokenizer, RESULT)
        system = next(texts(tokenizer, SYSTEM))
        print("\n".join(HEAD), flush=True)
        for name in options.client or names:
            before = len(replay.samples)
            replay_client(replay, names[name], url, system, pieces, options.tasks)
            print("\n".join(rows(replay.samples[before:])), flush=True)
            if options.json:
                written = json.dumps([asdict(sample) for sample in replay.samples], indent=1)
                options.json.write_text(written + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
