"""`edgemoe chat`: its options, and the model and conversation they open. Heavy imports happen inside."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.commands import options
from edgemoe.commands.options.groups import grouped, one_of, option
from edgemoe.console.answer_text import REASONING, Look, import_renderers
from edgemoe.console.attachments import whole_prompt
from edgemoe.console.input import open_turns
from edgemoe.console.width import say
from edgemoe.errors import UserError

if TYPE_CHECKING:
    from edgemoe.engine.sampling import Sampling
    from edgemoe.kv.prefix_cache import PrefixCache
    from edgemoe.models.store_model import StoreModel

EXAMPLES = (
    "Examples: edgemoe chat | edgemoe chat --model DIR --vram-limit 3GB --prompt 'Hello' --json "
    "| printf 'Hello\\nAnd again\\n' | edgemoe chat --model DIR"
)

PromptOption = Annotated[
    str | None, typer.Option("--prompt", "-p", help="Answer this prompt and exit. Default: turns from stdin.")
]
SystemOption = Annotated[str | None, typer.Option(help="A system message for the conversation.")]


@dataclass(frozen=True)
class TurnOptions:
    """Options of what is answered, and of how answers are printed."""

    file: Path | None = option("UTF-8 text that follows --prompt; text piped into stdin follows it too.")
    resume: bool = option(
        "Continue the last conversation. A chat at a terminal, and one with this option, is kept for it.",
        False,
        name="--continue",
    )
    stats: bool = option(
        "Print every figure after an answer, as /stats does, instead of one short line.", False
    )
    markdown: bool = option("Render answers as Markdown, at a terminal.", False)
    reasoning: str = option(
        "What is shown of <think> blocks at a terminal: dim, fold (the number of words alone) or show (as it is).",
        "dim",
        autocompletion=one_of(*REASONING),
    )
    no_wrap: bool = option("Leave the breaks of long lines to the terminal, not between words.", False)
    as_json: bool = option("One JSON object a line on stdout.", False, name="--json")
    stream: bool = option(
        'With --json: a line {"delta": TEXT} for each piece of text, before the line of the answer.', False
    )


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling. None stands for the model's own setting."""

    max_new_tokens: int = option(
        "Maximum number of tokens of an answer; 0 or -1: until the context ends.", 512, short="-n", min=-1
    )
    temperature: float | None = option("0 is greedy. Default: the model's own setting.", min=0)
    top_p: float | None = option("Default: the model's own setting.", min=0.01, max=1)
    top_k: int | None = option(
        "Keep the N likeliest tokens; 0 keeps all. Default: the model's own setting.", min=0
    )
    min_p: float | None = option(
        "Keep tokens whose probability is this fraction of the likeliest one's or more. Default: 0.",
        min=0,
        max=1,
    )
    repeat_penalty: float | None = option(
        "Above 1 the tokens so far become less likely. Default: the model's own setting.", min=0.01, max=100
    )
    stop: list[str] | None = option("End an answer before this text. Can be given several times.")
    seed: int = option("Seed of everything random.", 0)


@grouped
def chat_command(
    *,
    model: options.ModelOption = options.DEMO,
    prompt: PromptOption = None,
    system: SystemOption = None,
    limits: options.LimitOptions,
    kv: options.KVOptions,
    disk: options.PrefixCacheOptions,
    chosen: options.SettingOptions,
    context: options.ContextOption = None,
    prefill_rows: options.PrefillRowsOption = None,
    threads: options.ThreadsOption = None,
    kernel: options.KernelOption = "auto",
    wanted: SamplingOptions,
    keep_source: options.KeepSourceOption = False,
    turns: TurnOptions,
) -> None:
    """Chat with a model: one prompt, lines piped into stdin as turns, or a terminal.

    A chat at a terminal begins with the model's name and, where its checkpoint has them, a note and examples. The turn
    /help lists the commands of a chat, among them /set levels 4/2. While the chat waits for input, experts are read
    into free blocks. Ctrl-C cancels an answer and drops its turn; at an empty prompt, and in a pipe, it exits 130.
    Ctrl-D exits.

    /save, /load and --continue keep KV beside the text, so that a long conversation goes on at once: in
    --prefix-cache-dir, or in the cache's own directory `kv`, of a chat at a terminal too. --prefix-cache-limit 0 keeps
    none there.
    """
    from edgemoe.console.loading import loading, starting
    from edgemoe.models.open import open_store

    whole = _prompt(prompt, turns)
    choose = partial(options.run_settings, **vars(chosen))
    options.run_settings(8, **vars(chosen))  # rejects a wrong option before the model is opened
    store, plan, settings = open_store(
        model,
        choose,
        context=context,
        prefill_rows=prefill_rows,
        threads=threads,
        kernel=kernel,
        keep_source=keep_source,
        shrink=True,
        check_files=options.check_template,
        **vars(limits),
        **vars(kv),
    )
    if not turns.as_json:
        say("\n".join([*options.describe_levels(chosen, settings), *plan.lines()]))
    from edgemoe.machine.model_code import without_compiler

    with starting("loading transformers"), without_compiler():
        from edgemoe.api.model import Model
        from edgemoe.api.template import renderer
        from edgemoe.chat.conversation import Conversation
        from edgemoe.chat.loop import run_chat
        from edgemoe.chat.slash_commands import COMPLETIONS, refuse_command
        from edgemoe.chat.transcript import keep_last, load_last
        from edgemoe.engine.engine import Engine
        from edgemoe.models.heat import keeping_heat
        from edgemoe.models.introduction import introduction
        from edgemoe.models.tokenizer import load_tokenizer

    # Wrong options are refused before the model is loaded.
    if prompt is not None:
        refuse_command(prompt)
    messages, saved = load_last() if turns.resume else ([], None)
    renderer().start()  # runs beside loading, so that the first answer does not wait for it
    tokenizer = load_tokenizer(store.directory)
    sampling = _sampling(store.directory, tokenizer.eos_token_id, wanted)
    about = introduction(store.directory, str(model))
    kept = turns.resume or (prompt is None and sys.stdin.isatty())
    cache = _prefix_cache(store, disk, kept=kept)
    look = Look(turns.markdown, not turns.no_wrap, turns.reasoning)
    import_renderers(look)
    source = open_turns(COMPLETIONS) if whole is None else whole
    with ExitStack() as stack:
        with loading(plan.dense_bytes):
            engine = stack.enter_context(Engine(store, plan, settings))
        open_model = stack.enter_context(Model(engine, tokenizer, sampling, keep=True, disk=cache))
        if engine.damage and not turns.as_json:
            say(f"levels by damage, measured on {engine.damage.origin}")
        before, answered = stack.enter_context(keeping_heat(store.directory, store.manifest, engine.heat))
        engine.fill_first(before)
        conversation = Conversation(open_model, system)
        if messages:
            conversation.restore(messages)
            conversation.set_system(system or conversation.system)
            if (note := conversation.kv_note(saved)) and not turns.as_json:
                say(f"(continues {len(messages)} messages: {note})")
        run_chat(
            engine,
            conversation,
            source,
            as_json=turns.as_json,
            introduction=about,
            stream=turns.stream,
            stats=turns.stats,
            look=look,
            answered=partial(keep_last, conversation, answered) if kept else answered,
        )


def _prefix_cache(store: StoreModel, given: options.PrefixCacheOptions, *, kept: bool) -> PrefixCache | None:
    """Opens the KV on disk that the options name.

    Without --prefix-cache-dir that of saved conversations: from the first answer on where the conversation is `kept`
    for --continue, else from /save or /load on. None where this model or machine has none.
    """
    from edgemoe.commands.options.prefix_cache import open_prefix_cache, require_directory
    from edgemoe.models.cache import kv_directory

    directory, limit = given.prefix_cache_dir, given.prefix_cache_limit
    most = require_directory(directory or kv_directory(), limit)
    if directory:
        return open_prefix_cache(store, directory, most)
    if not most:
        return None
    try:
        return open_prefix_cache(store, kv_directory(), most, automatic=kept)
    except UserError:
        if limit is not None:
            raise
        return None


def _prompt(prompt: str | None, turns: TurnOptions) -> str | None:
    """The only prompt with its attachments; None where turns come from stdin.

    Raises:
        UserError: an option without the one that it belongs to; and from whole_prompt.
    """
    if turns.stream and not turns.as_json:
        raise UserError("--json with --stream", "--stream alone", "add --json; text is printed as it comes")
    if turns.reasoning not in REASONING:
        wanted = f"one of {', '.join(REASONING)} for --reasoning"
        raise UserError(wanted, repr(turns.reasoning), "choose one of them")
    if prompt is not None:
        return whole_prompt(prompt, turns.file)
    if turns.file is not None:
        raise UserError("a prompt for --file", "none", "add --prompt 'Summarize this text' or another one")
    return None


def _sampling(directory: Path, eos: int | None, given: SamplingOptions) -> Sampling:
    """The sampling of the model in a directory, changed by the options given.

    Raises:
        UserError: --top-p, --top-k or --min-p at temperature 0; an empty --stop.
    """
    from edgemoe.engine.sampling import UNLIMITED, Sampling
    from edgemoe.models.runnable import generation_config

    own = Sampling.of_model(
        generation_config(directory),
        eos,
        temperature=given.temperature,
        top_p=given.top_p,
        seed=given.seed,
        max_new_tokens=given.max_new_tokens if given.max_new_tokens > 0 else UNLIMITED,
    )
    for name in ("top_p", "top_k", "min_p"):
        if getattr(given, name) is not None and own.temperature == 0:
            raise UserError(
                f"a temperature above 0 for --{name.replace('_', '-')} {getattr(given, name)}",
                "temperature 0, where there is no choice",
                "give --temperature 0.7 or another one with it",
            )
    chosen: dict[str, Any] = {
        "top_k": given.top_k,
        "min_p": given.min_p,
        "repetition_penalty": given.repeat_penalty,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return replace(own, stop_strings=tuple(given.stop or ()), **chosen)
