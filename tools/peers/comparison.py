"""The runs of a comparison: every program in every case and round."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from edgemoe.bench.quality import EvaluationRow
from edgemoe.models.options.run_settings import run_settings
from tools.peers.limited import Controller
from tools.peers.programs import Program
from tools.peers.report import Case, Json, run_of, summarize
from tools.peers.run import Outcome, run_child

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
        experts: number of experts in an MoE layer.
        vocabulary: tokens that the model knows.
        options: the parsed command line.
        quality: rows of an evaluation of edgemoe's store.
        peer_bytes: bytes of weights that the peer reads for one token; None: unknown.
    """

    controller: Controller
    programs: Sequence[Program]
    cases: Sequence[Case]
    prompts: dict[int, list[list[int]]]
    experts: int
    vocabulary: int
    options: argparse.Namespace
    quality: Sequence[EvaluationRow] = ()
    peer_bytes: float | None = None
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
        if program.settings is None and case.batch == 1:
            run["weight_bytes"] = self.peer_bytes
        self.runs.append(run | {"ttft_s": None} if state else run)

    def _state(self, program: Program, request: Json) -> Path | None:
        """The file of the peer's state after a request's prompt; None: the program computes the prompt."""
        if program.settings is not None or self.options.peer_states is None:
            return None
        model = program.model.stat()
        of = [model.st_size, model.st_mtime_ns, *(request[key] for key in ("model", "prompts", "kv_cache"))]
        name = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
        return Path(self.options.peer_states, f"{name}.state").absolute()

    def _outcome(self, program: Program, case: Case, request: Json, state: Path | None) -> Outcome:
        """Runs a program; the peer loads the file of its state, which is computed first where it is missing."""
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


def say(what: str) -> None:
    """Prints a line of progress on stderr."""
    print(what, file=sys.stderr, flush=True)
