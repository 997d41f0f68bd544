"""`edgemoe chat`: its options, and the model and conversation that they ask for. Heavy imports happen inside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options import (
    DEMO,
    ContextOption,
    CpuExpertsOption,
    DeviceOption,
    DramOption,
    EvictionOption,
    ExactOption,
    HeavyHittersOption,
    ImportanceOption,
    JsonOption,
    KeepSourceOption,
    LevelsOption,
    ModelOption,
    RetentionOption,
    SeedOption,
    SpeculateOption,
    VramOption,
    open_store,
    run_settings,
    within_memory,
)
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.engine.engine import StoreModel
    from edgemoe.engine.generate import Sampling
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.policy.settings import RunSettings

EXAMPLES = (
    "Examples: edgemoe chat | edgemoe chat --model DIR --vram-limit 3GB --prompt 'Hello' --json "
    "| printf 'Hello\\nAnd again\\n' | edgemoe chat --model DIR"
)
"""For app.command(epilog=...)."""

PromptOption = Annotated[str | None, typer.Option(help="Answer this and exit. Default: turns from stdin.")]
SystemOption = Annotated[str | None, typer.Option(help="A system message for the conversation.")]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own setting.")
]
TopPOption = Annotated[float | None, typer.Option(min=0.01, max=1, help="Default: the model's own setting.")]


def chat_command(
    model: ModelOption = DEMO,
    prompt: PromptOption = None,
    system: SystemOption = None,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    exact: ExactOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    importance: ImportanceOption = None,
    heavy_hitters: HeavyHittersOption = None,
    eviction: EvictionOption = None,
    speculate: SpeculateOption = None,
    cpu_experts: CpuExpertsOption = None,
    context: ContextOption = None,
    max_new_tokens: NewTokensOption = 512,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    keep_source: KeepSourceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Chat with a model: one prompt, lines piped into stdin as turns, or a terminal.

    A turn /help lists the commands of a chat, among them /set levels 4/2. While it waits for you, experts are read into
    free room. Ctrl-C cancels an answer and drops its turn; at an empty prompt, and in a pipe, it exits 130. Ctrl-D
    exits.
    """
    choose = partial(
        run_settings,
        exact=exact,
        levels=levels,
        retention=retention,
        importance=importance,
        heavy_hitters=heavy_hitters,
        eviction=eviction,
        speculate=speculate,
        cpu_experts=cpu_experts,
    )
    store, plan, settings = open_store(
        model,
        choose,
        vram_limit=vram_limit,
        dram_limit=dram_limit,
        device=device,
        context=context,
        keep_source=keep_source,
    )
    plan = within_memory(store, plan, settings)
    if not as_json:
        print(*plan.lines(), sep="\n", file=sys.stderr, flush=True)
    sample = partial(
        _sampling, temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens
    )
    _converse(store, plan, settings, sample, system, prompt, as_json=as_json)


def _converse(
    store: StoreModel,
    plan: MemoryPlan,
    settings: RunSettings,
    sample: Callable[[Path, int | None], Sampling],
    system: str | None,
    prompt: str | None,
    *,
    as_json: bool,
) -> None:
    """Loads the model and answers; what can be refused without it is, before.

    Args:
        sample: store's directory and end token -> how tokens are chosen.
    """
    from edgemoe.chat.conversation import Conversation, load_tokenizer
    from edgemoe.chat.loop import run_chat
    from edgemoe.chat.slash_commands import refuse_command
    from edgemoe.chat.template import renderer
    from edgemoe.console.loading import loading
    from edgemoe.engine.engine import Engine

    if prompt is not None:
        refuse_command(prompt)
    renderer().start()  # beside loading, so that the first answer does not wait for it
    tokenizer = load_tokenizer(store.directory)
    sampling = sample(store.directory, tokenizer.eos_token_id)
    with ExitStack() as stack:
        with loading(plan.dense_bytes):
            engine = stack.enter_context(Engine(store, plan, settings))
        run_chat(engine, Conversation(engine, tokenizer, sampling, system), prompt, as_json=as_json)


def _sampling(
    directory: Path,
    eos: int | None,
    *,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    max_new_tokens: int,
) -> Sampling:
    """How the model of a directory chooses tokens, with what the user asked for on top.

    Raises:
        UserError: --top-p where there is nothing to choose from.
    """
    from edgemoe.chat.conversation import generation_config
    from edgemoe.engine.generate import Sampling

    sampling = Sampling.of_model(
        generation_config(directory),
        eos,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    if top_p is not None and sampling.temperature == 0:
        raise UserError(
            f"--top-p {top_p} was wanted",
            "at temperature 0 there is no choice",
            "Give --temperature 0.7 or another one with it",
        )
    return sampling
