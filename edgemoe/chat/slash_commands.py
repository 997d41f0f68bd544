"""The slash commands of a chat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.chat import transcript
from edgemoe.chat.answer_lines import stats_lines
from edgemoe.chat.session import Chat
from edgemoe.chat.set_command import SETTINGS, Tuning, changed
from edgemoe.console.input import QUOTES, Completions, Turn
from edgemoe.console.sizes import format_size
from edgemoe.console.text_files import read_bytes
from edgemoe.errors import UserError
from edgemoe.memory.describe import LABEL, plan_lines
from edgemoe.models.options.run_settings import run_settings
from edgemoe.vision.reader import MOST_BYTES

_WORD = re.compile(r"/([A-Za-z]+|\?)(?:\s+|$)")
"""The beginning of a command; `/etc/passwd` is none."""

_SYNONYMS = {"quit": "exit", "bye": "exit", "q": "exit", "?": "help", "reset": "clear", "retry": "regen"}
"""Names in other programs, and the command that each stands for."""


_LAST_WORDS = ("exit", "quit")
"""Whole turns that end the chat without a slash."""


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        arguments: the arguments as /help prints them; "" for a command without arguments.
        help: one line.
        run: called with the text after the command's name.
    """

    arguments: str
    help: str
    run: Callable[[Chat, str], None]


def run_command(chat: Chat, turn: Turn) -> bool:
    """Runs the command of a turn; returns False for a turn that is for the model.

    Raises:
        UserError: no such command, or a wrong argument.
        EOFError: /exit.
    """
    if not turn.quoted and turn.text.strip().lower() in _LAST_WORDS:
        raise EOFError
    match = None if turn.quoted else _WORD.match(turn.text)
    if match is None:
        return False
    name, argument = match[1].lower(), turn.text[match.end() :].strip()
    name = _SYNONYMS.get(name, name)
    command = COMMANDS.get(name)
    if command is None:
        near = next(iter(get_close_matches(name, COMMANDS, 1)), "help")
        raise UserError(
            "a command of the chat",
            f"/{name}",
            f"did you mean /{near}? For the model, put a space before a turn that begins with /",
        )
    if argument and not command.arguments:
        raise UserError(f"/{name} without an argument", repr(argument), f"enter /{name}")
    if command.arguments == "FILE" and not argument:
        example = "picture.png" if name == "image" else "conversation.json"
        raise UserError(f"/{name} FILE", "no file", f"enter /{name} {example}")
    command.run(chat, argument)
    return True


def refuse_command(prompt: str) -> None:
    """Raises UserError if the only prompt is a command, which gives no answer."""
    match = _WORD.match(prompt)
    if match and match[1].lower() in {*COMMANDS, *_SYNONYMS}:
        raise UserError(
            "a prompt for the model",
            f"--prompt {prompt!r}, which is a command of the interactive chat",
            "use the option of that name, or pipe the turns into stdin, one per line",
        )


def _help(chat: Chat, argument: str) -> None:
    for name, command in COMMANDS.items():
        chat.say(f"  {f'/{name} {command.arguments}':<22}{command.help}")
    chat.say(f"  {QUOTES}                   begins a turn of several lines, and ends it")
    chat.say("  \\ at a line's end     continues the turn in the next line, as Alt-Enter does")
    chat.say("  Ctrl-C                cancels an answer and drops its turn; at an empty prompt it exits")
    chat.say("  Ctrl-D                exits")


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.cancelled = None
    chat.say("cleared" + (", except the system message" if chat.conversation.system else ""))


def _regen(chat: Chat, argument: str) -> None:
    chat.regenerate()


def _set(chat: Chat, argument: str) -> None:
    engine = chat.engine
    level = engine.store.manifest.max_level
    fits = engine.plan.experts_resident[str(level)] >= engine.plan.experts
    now = Tuning(engine.settings, chat.conversation.sampling, run_settings(level, fits=fits))
    words = argument.split(None, 1)
    if not words:
        for name, value in now.values().items():
            chat.say(f"  {name:<16}{value}")
        return
    if len(words) != 2:
        raise UserError("/set NAME VALUE", f"/set {argument}", "enter /set to list all settings")
    then = changed(now, *words)
    if then.run.doubt and then.run.doubt != now.run.doubt:
        chat.say(then.run.doubt)
    engine.configure(then.run)
    chat.conversation.set_sampling(then.sampling)
    values = then.values()
    of_levels = words[0] in ("levels", "exact", "retention") or words[0] not in values
    names = list(values)[: min(len(then.run.levels), 2)] if of_levels else [words[0]]
    chat.say(f"set: {', '.join(f'{name} {values[name]}' for name in names)}")


_THINK = {"on": "-1", "off": "0"}
"""Words for budgets of reasoning."""


def _think(chat: Chat, argument: str) -> None:
    if argument:
        _set(chat, f"thinking-budget {_THINK.get(argument, argument)}")
        return
    budget = chat.conversation.sampling.thinking_budget
    chat.say("reasoning has no limit" if budget is None else f"at most {budget} tokens of reasoning")


def _system(chat: Chat, argument: str) -> None:
    if not argument:
        chat.say(chat.conversation.system or "there is no system message")
        return
    chat.conversation.set_system(None if argument == '""' else argument)
    chat.say("system message removed" if argument == '""' else "system message set")


def _image(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    number = chat.conversation.attach(read_bytes(path, MOST_BYTES))
    chat.say(f"{path} goes with the next turn" + (f", which has {number} pictures" if number > 1 else ""))


def _save(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    kv, tokens = chat.conversation.saved_kv(write=True)
    transcript.save(path, chat.conversation.messages, kv)
    of_kv = f", and the KV of {tokens} tokens on disk" if tokens else ""
    chat.say(f"saved {len(chat.conversation.messages)} messages in {path}{of_kv}")


def _load(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    messages = transcript.load(path)
    tokens = chat.conversation.restore(messages)
    chat.cancelled = None
    note = chat.conversation.kv_note(transcript.load_kv(path))
    chat.say(f"loaded {len(messages)} messages, {tokens} tokens, from {path}" + (note and f" ({note})"))


def _stats(chat: Chat, argument: str) -> None:
    if chat.last is None:
        chat.say("nothing has been answered yet")
        return
    chat.say("\n".join(stats_lines(chat.last)), indent=LABEL)
    of = chat.totals
    chat.say(
        f"{'all answers':<{LABEL}}{of.answers}, with {of.new_tokens} tokens; {of.cached_tokens} of {of.prompt_tokens} "
        "prompt tokens were kept from earlier turns",
        indent=LABEL,
    )


def _mem(chat: Chat, argument: str) -> None:
    engine, plan = chat.engine, chat.engine.plan
    chat.say("\n".join(plan_lines(plan, engine.settings)), indent=LABEL)
    if engine.rules.damage:
        chat.say(f"{'damage':<{LABEL}}measured on {engine.rules.damage.origin}")
    chat.say(
        f"{'peak':<{LABEL}}{format_size(engine.peak.bytes)} of {format_size(plan.limit_bytes(engine.device))}, "
        f"whole process {format_size(engine.peak.process_bytes)}"
    )
    chat.say(_tier("in VRAM now" if engine.device else "in memory now", engine.vram, plan.experts))
    if engine.dram is not None:
        chat.say(_tier("in DRAM now", engine.dram, plan.experts))


def _tier(name: str, tier: PlaneTier, experts: int) -> str:
    levels = Counter(tier.resident().values())
    each = ", ".join(f"{count} at {level} bits" for level, count in sorted(levels.items(), reverse=True))
    return f"{name:<{LABEL}}{sum(levels.values())} of {experts} experts" + (f": {each}" if each else "")


def _exit(chat: Chat, argument: str) -> None:
    raise EOFError


COMMANDS = {
    "help": Command("", "this list", _help),
    "clear": Command("", "remove all turns", _clear),
    "regen": Command("", "answer the last question again", _regen),
    "set": Command("[NAME VALUE]", f"show or change settings: {', '.join(SETTINGS)}", _set),
    "think": Command(
        "[N]", "at most N tokens of reasoning before an answer; on: no limit, off: none", _think
    ),
    "system": Command("[TEXT]", 'show or set the system message; "" removes it', _system),
    "image": Command("FILE", "add a picture to the next turn, where the model takes pictures", _image),
    "save": Command("FILE", "write the conversation to a JSON file, and its KV to disk", _save),
    "load": Command("FILE", "continue a conversation from such a file", _load),
    "stats": Command("", "cost of the last answer and of all answers", _stats),
    "mem": Command("", "limits, peaks and resident experts", _mem),
    "exit": Command("", "end the chat, as the turns exit and quit do", _exit),
}
"""Every command by name, in the order of /help."""

COMPLETIONS: Completions = {f"/{name}": {} for name in COMMANDS} | {
    "/set": {name: {choice: {} for choice in setting.choices} for name, setting in SETTINGS.items()},
    "/think": {word: {} for word in _THINK},
    "/image": None,
    "/save": None,
    "/load": None,
}
"""The words that Tab completes."""
