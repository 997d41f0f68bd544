"""`edgemoe chat`: its command. Heavy imports happen inside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from edgemoe.commands.options.chat import ChatRequest, TurnOptions
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.sampling import SamplingOptions
from edgemoe.commands.options.shared import StudyOption, check_template
from edgemoe.console.answer_text import REASONING
from edgemoe.console.attachments import whole_prompt
from edgemoe.console.width import say
from edgemoe.errors import UserError
from edgemoe.models.options.effects import require_several
from edgemoe.models.options.groups import Opening, PrefixCacheOptions
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import RunOptions
from edgemoe.models.options.study import with_studies

EXAMPLES = (
    "Examples: edgemoe chat | edgemoe chat qwen3 --vram-limit 6GB | edgemoe chat qwen3 'Why is the sky blue?' --json "
    "| printf 'Hello\\nAnd again\\n' | edgemoe chat --model DIR"
)


QuestionArgument = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.")]


@grouped
def chat_command(
    *,
    question: QuestionArgument = None,
    opening: Opening,
    disk: PrefixCacheOptions,
    run: RunOptions,
    study: StudyOption = None,
    sampling: SamplingOptions,
    turns: TurnOptions,
) -> None:
    """Talk to a model. Type `edgemoe chat` for the small model that comes with edgemoe, `edgemoe chat qwen3` for a real
    one, which is downloaded first.

    With a prompt the answer is printed and the command ends. Otherwise a conversation begins at the terminal; lines
    that are piped into stdin are its turns. In a conversation /help lists the commands, Ctrl-C cancels an answer, and
    exit or Ctrl-D ends it.

    What the model has read of a conversation (its KV) is kept on the disk by /save, /load and --continue, so that a
    long one goes on at once: in the cache's directory `kv`, or in the directory of --prefix-cache-dir.
    """
    from edgemoe.console.loading import starting
    from edgemoe.memory.describe import start_line
    from edgemoe.models.open import open_store
    from edgemoe.models.plans.division import ChooseSettings

    turns = _with_question(turns, question)
    request = ChatRequest(opening, disk, with_studies(run, study), sampling, turns, _prompt(turns))
    choose: ChooseSettings = partial(run_settings, **request.settings)
    with starting("loading torch"):
        require_several(choose(8, fits=True), 1)  # rejects a wrong option before the model is opened
    opened = open_store(opening, choose, shrink=True, check_files=check_template)
    if not turns.as_json:
        say(start_line(opened.plan))
    from edgemoe.machine.model_code import without_compiler

    with starting("loading transformers"), without_compiler():
        from edgemoe.commands.chat_turns import answer_turns

    answer_turns(request, opened)


def _with_question(turns: TurnOptions, question: str | None) -> TurnOptions:
    """The options with the prompt that was given without an option's name; raises UserError for two prompts."""
    if question is None:
        return turns
    if turns.prompt is not None:
        raise UserError("one prompt", "a prompt and --prompt", "leave one of the two out")
    return replace(turns, prompt=question)


def _prompt(turns: TurnOptions) -> str | None:
    """The only prompt with its attachments; None where turns come from stdin.

    Raises:
        UserError: an option without the one that it belongs to; and from whole_prompt.
    """
    if turns.stream and not turns.as_json:
        raise UserError("--json with --stream", "--stream alone", "add --json; text is printed as it comes")
    if turns.reasoning not in REASONING:
        wanted = f"one of {', '.join(REASONING)} for --reasoning"
        raise UserError(wanted, repr(turns.reasoning), "choose one of them")
    if turns.prompt is not None:
        return whole_prompt(turns.prompt, turns.file)
    if turns.file is not None:
        raise UserError("a prompt for --file", "none", "add --prompt 'Summarize this text' or another one")
    return None
