"""Loads the model that `edgemoe chat` has opened, and answers its turns."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from edgemoe.api.model import Model
from edgemoe.api.template import renderer
from edgemoe.chat.loop import run_chat
from edgemoe.chat.session import Chat, Printing
from edgemoe.chat.slash_commands import COMPLETIONS, refuse_command
from edgemoe.chat.transcript import continued, keep_last, load_last
from edgemoe.commands.options.sampling import chosen_sampling
from edgemoe.console.answer_text import Look, import_renderers
from edgemoe.console.input import open_turns
from edgemoe.console.loading import loading
from edgemoe.console.width import say
from edgemoe.engine.engine import Engine
from edgemoe.models.heat import keeping_heat
from edgemoe.models.introduction import introduction
from edgemoe.models.options.prefix_cache import conversation_cache
from edgemoe.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from edgemoe.commands.options.chat import ChatRequest
    from edgemoe.models.open import Opened


def answer_turns(request: ChatRequest, opened: Opened) -> None:
    """Loads a model and answers one prompt or the turns of stdin.

    Args:
        request: the options.
        opened: the model, its plan and its settings.

    Raises:
        UserError: a wrong option, before the model is loaded; and from run_chat.
    """
    turns, store = request.turns, opened.store
    if turns.prompt is not None:
        refuse_command(turns.prompt)
    before = load_last() if turns.resume else ([], None)
    renderer().start()  # runs during loading, so that the first answer does not wait for it
    tokenizer = load_tokenizer(store.directory)
    sampling = chosen_sampling(store.directory, tokenizer, request.sampling)
    about = introduction(store.directory, str(request.opening.model))
    cache = conversation_cache(store, request.disk, keeps=request.kept)
    look = Look(turns.markdown, not turns.no_wrap, turns.reasoning)
    import_renderers(look)
    source = open_turns(COMPLETIONS) if request.whole is None else request.whole
    with ExitStack() as stack:
        with loading(opened.plan.dense_bytes):
            engine = stack.enter_context(Engine(*opened))
        model = stack.enter_context(Model(engine, tokenizer, sampling, keep=True, disk=cache))
        heat, answered = stack.enter_context(keeping_heat(store.directory, store.manifest, engine.heat))
        engine.fill_first(heat)
        conversation, note = continued(model, turns.system, *before)
        if note and not turns.as_json:
            say(note)
        keep = partial(keep_last, conversation, answered) if request.kept else answered
        printing = Printing(turns.as_json, turns.stream, turns.stats, look)
        run_chat(Chat(engine, conversation, printing, on_answer=keep), source, about)
