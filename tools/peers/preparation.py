"""Finds, before the first run of a comparison, whatever would stop a later one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product, starmap
from pathlib import Path

from edgemoe.bench.environment import environment
from edgemoe.bench.quality import load_quality
from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from tools.peers.comparison import Comparison, say
from tools.peers.limited import find_controller
from tools.peers.programs import Program, own_programs, peer_bytes, peer_program
from tools.peers.prompts import prompts_of
from tools.peers.report import Case, Json, show_limit
from tools.peers.run import prove_enforced
from tools.peers.stores import open_stores, sizes_of
from tools.peers.together import most_tokens


def facts_of(comparison: Comparison, stores: Mapping[Path, StoreModel], source: str) -> Json:
    """The environment and conditions of a comparison; sizes in bytes. The environment is the first store's."""
    options, peer = comparison.options, comparison.programs[0]
    files = [peer.model] if peer.model.is_file() else sorted(peer.model.glob("*.safetensors"))
    store = next(iter(stores.values()))
    return environment(store) | {
        "threads": options.threads,
        "peer": peer.name,
        "peer_model_bytes": sum(file.stat().st_size for file in files),
        "stores": sizes_of(stores),
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
    stores: Mapping[Path, StoreModel],
    programs: Sequence[Program],
    cases: Sequence[Case],
    options: argparse.Namespace,
) -> None:
    """Prints the --vram-limit that each limit leaves to each of edgemoe's rows.

    Raises:
        DoesNotFit: a row cannot run in its --vram-limit.
    """
    for limit, length, batch in cases:
        for program in programs:
            if limit is not None:
                store, own, prompts = stores[program.model], limit - options.beside, [[0] * length] * batch
                context = options.context or length + most_tokens(prompts, options.new_tokens)
                settings = run_settings(store.manifest.max_level, **(program.settings or {}))
                store.plan(vram_limit=own, settings=settings, context=context, parallel=batch)
                say(f"{program.name} inside {show_limit(limit)}: --vram-limit {format_size(own)}")


def require_options(options: argparse.Namespace) -> None:
    """Refuses options that exclude one another or name folders that are missing; makes the folder of --peer-states.

    Raises:
        UserError: there is such an option, or --plot without matplotlib.
    """
    require_folders(options.json)
    if options.peer_states and (options.peer != "llama.cpp" or max(options.batch) > 1):
        raise UserError(
            "--peer-states with llama.cpp and --batch 1",
            f"{options.peer}, batch {max(options.batch)}",
            "leave it out",
        )
    names = [store.name for store in options.store]
    if len(set(names)) < len(names):
        raise UserError("stores whose folders have different names", ", ".join(names), "rename one of them")
    if options.quality and len(names) > 1:
        raise UserError("--quality with one --store", f"{len(names)} stores", "leave --quality out")
    if options.peer_states:
        options.peer_states.mkdir(parents=True, exist_ok=True)
    require_plot(options.plot)


def prepare(options: argparse.Namespace) -> tuple[Comparison, Json]:
    """Makes the comparison and its facts, and finds before the first run whatever would stop a later one.

    Raises:
        UserError: a file, a module or a prompt is missing.
        DoesNotFit: edgemoe cannot run inside a limit.
        LimitError: this machine enforces no memory limit.
    """
    require_options(options)
    stores = open_stores(options)
    store = next(iter(stores.values()))
    programs = [peer_program(options), *own_programs(options)]
    prompts, source = prompts_of(options, store.shape.vocab)
    cases = list(starmap(Case, product(options.limits, options.prompt_tokens, options.batch)))
    require_fit(stores, programs[1:], cases, options)
    controller = find_controller(Path("/proc/mounts").read_text())
    quality, left_out = load_quality(options.quality).of(store.manifest) if options.quality else ([], ())
    for note in left_out:
        say(note)
    experts, vocabulary = store.shape.experts_per_layer, store.shape.vocab
    read = peer_bytes(options)
    comparison = Comparison(controller, programs, cases, prompts, experts, vocabulary, options, quality, read)
    prove_enforced(controller)
    return comparison, facts_of(comparison, stores, source)
