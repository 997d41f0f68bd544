"""`edgemoe chat`: its command. Heavy imports happen inside."""

from __future__ import annotations

from functools import partial

from edgemoe.commands.options.chat import ChatRequest, TurnOptions
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.sampling import SamplingOptions
from edgemoe.commands.options.shared import StudyOption, check_template
from edgemoe.console.answer_text import REASONING
from edgemoe.console.attachments import whole_prompt
from edgemoe.console.width import say
from edgemoe.errors import UserError
from edgemoe.models.options.groups import Opening, PrefixCacheOptions
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import RunOptions
from edgemoe.models.options.study import with_studies

EXAMPLES = (
    "Examples: edgemoe chat | edgemoe chat --model DIR --vram-limit 3GB --prompt 'Hello' --json "
    "| printf 'Hello\\nAnd again\\n' | edgemoe chat --model DIR"
)


@grouped
def chat_command(
    *,
    opening: Opening,
    disk: PrefixCacheOptions,
    chosen: RunOptions,
    study: StudyOption = None,
    sampling: SamplingOptions,
    turns: TurnOptions,
) -> None:
    """Chat with a model: one prompt, lines piped into stdin as turns, or a terminal.

    A chat at a terminal begins with the model's name and, where its checkpoint has them, a note and examples. The turn
    /help lists the commands of a chat, among them /set levels 4/2. While the chat waits for input, experts are read
    into free blocks. Ctrl-C cancels an answer and drops its turn; at an empty prompt, and in a pipe, it exits 130.
    Ctrl-D exits.

    /save, /load and --continue keep KV next to the text, so that a long conversation goes on at once: in
    --prefix-cache-dir, or in the cache's own directory `kv`, of a chat at a terminal too. --prefix-cache-limit 0 keeps
    none there.
    """
    from edgemoe.console.loading import starting
    from edgemoe.memory.describe import start_line
    from edgemoe.models.open import open_store
    from edgemoe.models.plans.division import ChooseSettings

    request = ChatRequest(opening, disk, with_studies(chosen, study), sampling, turns, _prompt(turns))
    choose: ChooseSettings = partial(run_settings, **request.settings)
    with starting("loading torch"):
        choose(8, fits=True)  # rejects a wrong option before the model is opened
    opened = open_store(opening, choose, shrink=True, check_files=check_template)
    if not turns.as_json:
        say(start_line(opened.plan))
    from edgemoe.machine.model_code import without_compiler

    with starting("loading transformers"), without_compiler():
        from edgemoe.commands.chat_turns import answer_turns

    answer_turns(request, opened)


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
