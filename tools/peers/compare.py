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

No row takes less than its bound, the time of the moved bytes at the best rates that any run probed ("of bound %").
`edgemoe bench` shows the same without a peer; on a quiet machine a row above 102 % ("reached %") is a fault:

    for limit in 3GB 2GB; do edgemoe bench -m w1-store --exact 4 --vram-limit $limit --runs 3; done
    edgemoe bench -m w1-store --exact 4 --runs 3

Nothing is measured unless the kernel enforces the limit: a process that takes too much must be killed first, and every
run reads back its limit and its membership. A run that fails or is killed for memory is reported and the others go on.
The JSON is rewritten after every run. Linux, as root. Needs llama-cpp-python, here or in another --llama-python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from pathlib import Path

import torch

from edgemoe.bench.environment import environment
from edgemoe.bench.prompts import text_prompts
from edgemoe.bench.quality import EvaluationRow, load_quality
from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.kv.formats import KVFormat
from edgemoe.models.demo import DEMO
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.tokenizer import load_tokenizer
from tools.command_line import failed
from tools.peers.edgemoe_child import most_tokens
from tools.peers.limited import Controller, LimitError, find_controller
from tools.peers.options import parse
from tools.peers.popularity import as_table as popularity_table
from tools.peers.popularity import compare
from tools.peers.programs import Program, edgemoe_program, peer_program
from tools.peers.report import Case, Json, as_table, plot, run_of, show_limit, summarize
from tools.peers.run import Outcome, interrupt_on_signals, prove_enforced, run_child

WARM_UP_SECONDS = 10
"""Minimum warm-up of a warm run. A host may give cores that have just become busy less memory bandwidth; a fixed time
gives a program that loads or answers sooner no advantage."""

WARM_UP_TOKENS = 512
"""Random tokens before a warm run: enough to route to nearly every expert of W1."""


@dataclass
class Comparison:
    """Runs the programs in turn and collects their runs.

    Args:
        controller: where memory cgroups are made.
        programs: the peer first, then edgemoe's rows.
        cases: limits, prompt lengths and batches.
        prompts: prompt length -> token ids, of the largest batch for each round.
        experts: of an MoE layer.
        vocabulary: tokens that the model knows.
        options: the parsed command line.
        quality: rows of an evaluation of edgemoe's store.
    """

    controller: Controller
    programs: Sequence[Program]
    cases: Sequence[Case]
    prompts: dict[int, list[list[int]]]
    experts: int
    vocabulary: int
    options: argparse.Namespace
    quality: Sequence[EvaluationRow] = ()
    runs: list[Json] = field(default_factory=list)
    popularity: dict[str, list[list[int]]] = field(default_factory=dict)
    crash: str | None = None
    """How the peer crashed with weight repacking, which is off from then on."""

    def order(self) -> Iterator[tuple[int, Case, Program]]:
        """Yields every run as (round, case, program); the programs alternate, another one first each round."""
        for number in range(self.options.rounds):
            first = number % len(self.programs)
            for case in self.cases:
                for program in [*self.programs[first:], *self.programs[:first]]:
                    yield number, case, program

    def request(self, program: Program, case: Case, number: int, *, popularity: bool = False) -> Json:
        """The request for a child. Under a limit edgemoe and accelerate may use the limit less --beside."""
        limit, most = case.limit, max(self.options.batch)
        prompts = self.prompts[case.tokens][number * most :][: case.batch]
        random = torch.Generator().manual_seed(self.options.seed)
        warm_up = torch.randint(self.vocabulary, (WARM_UP_TOKENS,), generator=random).tolist()
        request: Json = {
            "model": str(program.model),
            "prompts": prompts,
            "new_tokens": self.options.new_tokens,
            "warm_up": [] if limit is not None or popularity else [warm_up, prompts[0]],
            "warm_up_s": WARM_UP_SECONDS,
            "threads": self.options.threads,
            "capped": limit is not None,
            "repacking": limit is None and self.options.repacking and self.crash is None,
            "popularity": popularity,
            "context": self.options.context,
            "kv_cache": self.options.kv_cache,
            "experts": self.experts,
        }
        own = None if limit is None else limit - self.options.beside
        if program.settings is not None:
            own_options = {"settings": program.settings, "fill": program.fill, "kernel": self.options.kernel}
            return request | own_options | {"vram_limit": own}
        return request | {"memory": own}

    def run(self, program: Program, case: Case, number: int) -> None:
        """Runs a program once and appends the result to `runs`."""
        request = self.request(program, case, number)
        state = self._state(program, request)
        outcome = self._outcome(program, case, request, state)
        if outcome.crashed and program.settings is None and request["repacking"]:
            self.crash = f"off: {program.name} crashes with it ({outcome.failure})"
            say(f"  {self.crash}; once more without")
            outcome = self._outcome(program, case, request | {"repacking": False}, state)
        run = run_of(program.name, case, number, outcome)
        self.runs.append(run | {"ttft_s": None} if state else run)

    def _state(self, program: Program, request: Json) -> Path | None:
        """The file of the peer's state behind a request's prompt; None: the program computes the prompt."""
        if program.settings is not None or self.options.peer_states is None:
            return None
        model = program.model.stat()
        of = [model.st_size, model.st_mtime_ns, *(request[key] for key in ("model", "prompts", "kv_cache"))]
        name = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
        return Path(self.options.peer_states, f"{name}.state").absolute()

    def _outcome(self, program: Program, case: Case, request: Json, state: Path | None) -> Outcome:
        """Runs a program; the peer behind the file of its state, which is computed first where it is missing."""
        if state is None:
            return self._child(program, case, request)
        request = request | {"state": str(state), "saves_state": False}
        if not state.exists():
            say(f"  {program.name} computes {case.tokens} tokens without a limit")
            partial = state.with_suffix(".partial")
            saving = request | {"state": str(partial), "saves_state": True, "new_tokens": 1, "warm_up": []}
            outcome = self._child(program, case._replace(limit=None), saving)
            if outcome.failure:
                return outcome
            partial.replace(state)
        return self._child(program, case, request)

    def count(self) -> None:
        """Counts the experts that the peer and edgemoe's first row choose, in an untimed, unlimited run of each."""
        case = Case(None, max(self.prompts))
        for program in self.programs[:2]:
            outcome = self._child(program, case, self.request(program, case, 0, popularity=True))
            if "counts" in outcome.answer:
                self.popularity[program.name] = outcome.answer["counts"]

    def _child(self, program: Program, case: Case, request: Json) -> Outcome:
        return run_child(
            self.controller, case.limit, program.command, request, keep_cache=self.options.keep_cache
        )

    def report(self, facts: Json) -> Json:
        """The rows, popularity and runs so far, as one JSON object."""
        own = {p.name: run_settings(8, **p.settings) for p in self.programs if p.settings is not None}
        rows = summarize(self.runs, self.programs[0].name, self.quality, own)
        if self.crash or not self.options.repacking:
            facts = facts | {"repacking": self.crash or "off"}
        return {"environment": facts, "rows": rows, "popularity": self.popularity, "runs": self.runs}


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


def say(what: str) -> None:
    """Prints a line of progress on stderr."""
    print(what, file=sys.stderr, flush=True)


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


def facts_of(comparison: Comparison, store: StoreModel, source: str) -> Json:
    """The environment and conditions of a comparison; sizes in bytes."""
    options, peer = comparison.options, comparison.programs[0]
    files = [peer.model] if peer.model.is_file() else sorted(peer.model.glob("*.safetensors"))
    return environment(store) | {
        "threads": options.threads,
        "peer": peer.name,
        "peer_model_bytes": sum(file.stat().st_size for file in files),
        "store_bytes": sum(file.stat().st_size for file in store.directory.iterdir()),
        "limits_bytes": sorted(
            {case.limit for case in comparison.cases if case.limit is not None}, reverse=True
        ),
        "beside_bytes": options.beside,
        "prompts": f"{source}, by the demo model's tokenizer",
        "context": options.context,
        "kv_cache": options.kv_cache,
        "forced_kernel": options.kernel,
        "peer_states": options.peer_states is not None,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "seed": options.seed,
    }


def require_fit(
    store: StoreModel, programs: Sequence[Program], cases: Sequence[Case], options: argparse.Namespace
) -> None:
    """Prints the --vram-limit that each limit leaves to each of edgemoe's rows.

    Raises:
        DoesNotFit: a row cannot run in its --vram-limit.
    """
    for limit, length, batch in cases:
        for program in programs:
            if limit is not None:
                own, prompts = limit - options.beside, [[0] * length] * batch
                context = options.context or length + most_tokens(prompts, options.new_tokens)
                settings = run_settings(store.manifest.max_level, **(program.settings or {}))
                store.plan(vram_limit=own, settings=settings, context=context, parallel=batch)
                say(f"{program.name} inside {show_limit(limit)}: --vram-limit {format_size(own)}")


def prepare(options: argparse.Namespace) -> tuple[Comparison, Json]:
    """Makes the comparison and its facts, and finds before the first run whatever would stop a later one.

    Raises:
        UserError: a file, a module or a prompt is missing.
        DoesNotFit: edgemoe cannot run inside a limit.
        LimitError: this machine enforces no memory limit.
    """
    require_folders(options.json)
    if options.peer_states and (options.peer != "llama.cpp" or max(options.batch) > 1):
        raise UserError(
            "--peer-states with llama.cpp and --batch 1",
            f"{options.peer}, batch {max(options.batch)}",
            "leave it out",
        )
    if options.peer_states:
        options.peer_states.mkdir(parents=True, exist_ok=True)
    require_plot(options.plot)
    store = StoreModel.open(options.store)
    if options.kv_cache:
        store = store.with_kv(KVFormat(options.kv_cache, options.kv_cache))
    programs = [
        peer_program(options),
        *(edgemoe_program(levels, options.store) for levels in options.settings),
    ]
    tokenizer = load_tokenizer(DEMO)
    sets = {
        length: text_prompts(
            tokenizer, options.prompt_file, length, options.rounds * max(options.batch), options.seed
        )
        for length in options.prompt_tokens
    }
    prompts = {length: [encode() for encode in of.prompts] for length, of in sets.items()}
    highest = max(max(ids) for of in prompts.values() for ids in of)
    if highest >= store.shape.vocab:
        raise UserError(
            f"a model that knows token {highest} of the prompts",
            f"a vocabulary of {store.shape.vocab}",
            "use a model with a larger vocabulary",
        )
    cases = list(starmap(Case, product(options.limits, options.prompt_tokens, options.batch)))
    require_fit(store, programs[1:], cases, options)
    controller = find_controller(Path("/proc/mounts").read_text())
    quality, left_out = load_quality(options.quality).of(store.manifest) if options.quality else ([], ())
    for note in left_out:
        say(note)
    experts, vocabulary = store.shape.experts_per_layer, store.shape.vocab
    comparison = Comparison(controller, programs, cases, prompts, experts, vocabulary, options, quality)
    prove_enforced(controller)
    return comparison, facts_of(comparison, store, next(iter(sets.values())).source)


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
