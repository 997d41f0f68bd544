"""Compares edgemoe with llama.cpp, or transformers with accelerate's disk offload, under the same memory limits.

    python -m tools.synthetic.gguf --like qwen3-30b-a3b --layers 16 --vocab 32000 w1.gguf
    python -m tools.synthetic.store --from-gguf w1.gguf --max-level 4 --dense-bits 8 w1-store
    python -m tools.peers.compare --gguf w1.gguf --store w1-store --limits 3GB,2GB,none --rounds 3 --json w1.json

Every answer runs in its own process and its own memory cgroup, on --threads threads; the page cache counts against the
limit and is dropped first (tools/peers/limited.py). The programs alternate. Both sides get the same token ids, another
prompt each round: conversations of the demo's tasks, or a text, tokenized by the demo model's tokenizer, so that ids
repeat as they do in text. Decoding is greedy and no token ends it. With --batch 8 eight prompts decode together; the
times are of the steps that all of them share.

Under a limit the runs are cold: the clock starts when the model is open. llama.cpp then has in memory whatever mapping
the file left there, edgemoe whatever loading filled its free blocks with (a row such as 4-empty fills none). `load s`
is the time before. Without a limit the runs are warm: random tokens and the prompt itself run first, for ten seconds,
so that the whole model is resident. --context sets aside KV for more tokens than a prompt and its answer have, and
--kv-cache stores it in another format, in both programs. llama.cpp maps its model; its weight repacking is off under a
limit, with --no-repacking, and where llama.cpp crashes with it: then the run is repeated without, which is reported.
edgemoe's --vram-limit is the limit less --beside, the memory that its process takes outside --vram-limit. With
--peer-states llama.cpp computes a prompt's keys and values once, without a limit and in pieces that attend to
themselves alone, and keeps them in a file. A measured run loads it, decodes some tokens, which attend to all of them
and leave parts of the model in memory as a prompt does, and loads it again before the clock starts.

--store may be given again: then every setting runs with every store in the same rounds, for example with dense weights
of 8 and of 4 bits. "weights MB per step" are the bytes of weights that a step multiplies with.

No row takes less than its bound, the time of the moved bytes at the best rates that any run probed ("of bound %").
`edgemoe bench` shows the same without a peer; on a quiet machine a row above 102 % ("reached %") is a fault:

    for limit in 3GB 2GB; do edgemoe bench -m w1-store --exact 4 --vram-limit $limit --runs 3; done
    edgemoe bench -m w1-store --exact 4 --runs 3

Nothing is measured unless the kernel enforces the limit: a process that takes too much must be killed first, and every
run reads back its limit and its membership. A run that fails or is killed for memory is reported and the others go on.
The JSON is rewritten after every run. Linux, as root. Needs llama-cpp-python, here or in another --llama-python.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edgemoe.errors import EdgemoeError
from tools.command_line import failed
from tools.peers.comparison import Comparison, say
from tools.peers.limited import LimitError
from tools.peers.options import parse
from tools.peers.popularity import as_table as popularity_table
from tools.peers.popularity import compare
from tools.peers.preparation import prepare
from tools.peers.report import Json, as_table, plot
from tools.peers.run import interrupt_on_signals


def measure(comparison: Comparison, facts: Json) -> None:
    """Runs every program in every case and round; rewrites the JSON after each run."""
    order = list(comparison.order())
    started = time.monotonic()
    for done, (number, case, program) in enumerate(order):
        left = (
            f", {(time.monotonic() - started) * (len(order) - done) / done / 60:.0f} min left" if done else ""
        )
        say(f"run {done + 1} of {len(order)}: {program.name}, limit {case}, round {number + 1}{left}")
        comparison.run(program, case, number)
        last = comparison.runs[-1]
        say(
            f"  {last['failure']}"
            if last["failure"]
            else f"  TTFT {_seconds(last['ttft_s'])}, TPOT {1000 * last['tpot_s']:.1f} ms"
        )
        write_report(comparison, facts)
    if comparison.options.popularity:
        say("counting the experts chosen")
        comparison.count()
        write_report(comparison, facts)


def _seconds(time_s: float | None) -> str:
    return "not measured" if time_s is None else f"{time_s:.2f} s"


def write_report(comparison: Comparison, facts: Json) -> None:
    """Replaces the file of --json, if given, by the report so far."""
    path: Path | None = comparison.options.json
    if path:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(comparison.report(facts)))
        partial.replace(path)


def show(comparison: Comparison, facts: Json) -> None:
    """Prints the tables and draws the plot of --plot, if given."""
    rows = comparison.report(facts)["rows"]
    print(as_table(rows))
    if len(comparison.popularity) == 2:
        one, other = comparison.popularity
        layers = compare(comparison.popularity[one], comparison.popularity[other])
        print("\n" + popularity_table(layers, (one, other)))
    conditions = comparison.report(facts)["environment"]
    print("\n" + "\n".join(f"- {name}: {json.dumps(value)}" for name, value in conditions.items()))
    if comparison.options.plot and rows:
        plot(rows, comparison.options.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Prints the runs so far also where a signal ends the comparison."""
    try:
        options = parse(argv, __doc__)
        interrupt_on_signals()
        comparison, facts = prepare(options)
        try:
            measure(comparison, facts)
        finally:
            if comparison.runs:
                show(comparison, facts)
    except (EdgemoeError, LimitError) as error:
        return failed("tools.peers.compare", error)
    except KeyboardInterrupt:
        say("tools.peers.compare: interrupted; no process of it still runs")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
