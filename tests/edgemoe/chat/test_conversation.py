"""Conversations: reuse between turns, ends of answers, and state after an error."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.errors import ContextExceeded, UserError
from edgemoe.experts.step import StepContext
from edgemoe.kv.step import Segment, Step
from edgemoe.models.tokenizer import load_tokenizer

FIRST, SECOND = "the quick brown fox", "and the lazy dog"


@pytest.fixture(scope="module")
def tokenizer(tiny_store):
    return load_tokenizer(tiny_store)


@pytest.fixture
def converse(open_engine, tiny_store, tokenizer):
    """Opens a conversation on a new engine, by default with answers of 5 tokens."""

    def begin(
        *,
        temperature: float = 0.0,
        seed: int = 0,
        max_new_tokens: int = 5,
        stop: tuple[int, ...] = (),
        context: int = 128,
        system: str | None = None,
    ) -> Conversation:
        sampling = Sampling(temperature, 1.0, 0, 1.0, seed, max_new_tokens, frozenset(stop))
        model = Model(open_engine(tiny_store, context=context), tokenizer, sampling, keep=True)
        return Conversation(model, system)

    return begin


def ask(conversation: Conversation, prompt: str) -> Answer:
    """Answers one turn, and checks that the streamed text equals the returned text."""
    pieces: list[str] = []
    answer = conversation.ask(prompt, pieces.append)
    assert "".join(pieces) == answer.text
    return answer


def ids_of(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, with the template expanded by hand."""
    return tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]


@pytest.fixture
def greedy_ids(open_engine, tiny_store, tokenizer) -> list[int]:
    """The first six tokens of the greedy answer to FIRST, from the engine without a conversation."""
    engine = open_engine(tiny_store, context=128)
    sequence, tokens = engine.sequences.new(), []
    logits = engine.prefill(sequence, ids_of(tokenizer, FIRST))
    while len(tokens) < 6:
        tokens.append(int(logits.argmax()))
        logits = engine.step(Step((Segment(sequence, tuple(tokens[-1:])),)))[0]
    return tokens


def test_a_turn_reuses_the_common_prefix(converse, tokenizer):
    """The second turn computes a part of its prompt; its text is as in a conversation that computes all of it."""
    conversation = converse()
    first = ask(conversation, FIRST)
    assert (first.cached_tokens, first.prompt_tokens) == (0, len(ids_of(tokenizer, FIRST)))
    second = ask(conversation, SECOND)
    assert first.prompt_tokens <= second.cached_tokens < second.prompt_tokens
    fresh = converse()
    assert fresh.restore(conversation.messages[:2]) > first.prompt_tokens
    assert [message["role"] for message in fresh.messages] == ["user", "assistant"]
    again = ask(fresh, SECOND)
    assert (again.cached_tokens, again.prompt_tokens) == (0, second.prompt_tokens)
    assert again.text == second.text


def test_the_same_turns_give_the_same_answers(converse):
    """At temperature 0 the seed has no effect."""
    one, two = converse(), converse(seed=7)
    for prompt in (FIRST, SECOND):
        assert ask(one, prompt).text == ask(two, prompt).text


def test_a_system_message_comes_first(converse, tokenizer):
    """The system message is part of every prompt, and its KV is reused."""
    conversation = converse(system="be brief")
    extra = len(tokenizer("<|im_start|>system\nbe brief<|im_end|>\n")["input_ids"])
    assert ask(conversation, FIRST).prompt_tokens == len(ids_of(tokenizer, FIRST)) + extra
    assert ask(conversation, SECOND).cached_tokens > extra


def test_regenerate_replaces_the_last_answer(converse):
    """All but the last token of the prompt is reused; without an answer there is an error."""
    conversation = converse(temperature=1.0, max_new_tokens=12)
    with pytest.raises(UserError, match="nothing has been answered"):
        conversation.regenerate(lambda piece: None)
    first = ask(conversation, FIRST)
    second = conversation.regenerate(lambda piece: None)
    assert (second.prompt_tokens, second.cached_tokens) == (first.prompt_tokens, first.prompt_tokens - 1)
    assert second.text != first.text
    assert [m["content"] for m in conversation.messages] == [FIRST, second.text]


def test_an_interrupted_regenerate_keeps_the_first_answer(converse):
    """Ctrl-C during the second answer leaves the messages unchanged."""
    conversation = converse()
    ask(conversation, FIRST)
    before = conversation.messages

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.regenerate(interrupt)
    assert conversation.messages == before


def test_a_cancelled_answer_leaves_its_prompt_in_the_kv(converse):
    """A turn that is repeated after Ctrl-C reuses the KV computed before it."""
    conversation, pieces = converse(max_new_tokens=8), []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask(FIRST, interrupt)
    assert conversation.messages == ()
    again, want = ask(conversation, FIRST), ask(converse(max_new_tokens=8), FIRST)
    assert (again.cached_tokens, again.text) == (want.prompt_tokens - 1, want.text)


def test_a_system_message_can_be_set_and_removed(converse, tokenizer):
    """It precedes earlier turns, clear() keeps it, and removing it restores the prompt's length."""
    conversation = converse()
    plain = ask(conversation, FIRST).prompt_tokens
    conversation.set_system("be brief")
    conversation.set_system("be kind")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    conversation.clear()
    assert [m["content"] for m in conversation.messages] == ["be kind"]
    assert ask(conversation, FIRST).prompt_tokens > plain
    conversation.set_system(None)
    conversation.clear()
    assert ask(conversation, FIRST).prompt_tokens == plain


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
         "{{ m.content }}{% endfor %}", "by the template: no system role"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "leaves it out"),
    ],
)  # fmt: skip
def test_a_template_without_system_messages(open_engine, tiny_store, template, message):
    """A template that refuses or ignores a system message gives an error; the conversation continues without."""
    tokenizer = load_tokenizer(tiny_store)
    tokenizer.chat_template = template
    engine = open_engine(tiny_store, context=64)
    sampling = Sampling(0.0, 1.0, 0, 1.0, 0, 2, frozenset())
    with pytest.raises(UserError, match=message):
        Conversation(Model(engine, tokenizer, sampling), "be brief")
    conversation = Conversation(Model(engine, tokenizer, sampling))
    with pytest.raises(UserError, match=message):
        conversation.set_system("be brief")
    assert ask(conversation, FIRST).new_tokens == 2
    assert conversation.system is None


def test_the_oldest_turns_leave_a_full_context(converse, tokenizer):
    """Half the context is free then, the system message stays, and all messages are kept for /save."""
    conversation, left = converse(system="be brief", context=256), []
    for number in range(12):
        before = sum(left)
        answer = conversation.ask(f"{FIRST} {number}", lambda piece: None, left.append)
        if sum(left) > before:
            kept = conversation.messages[1:][sum(left) :]
            fresh = converse(system="be brief", context=256)
            fresh.restore([conversation.messages[0], *kept[:-2]])
            want = ask(fresh, f"{FIRST} {number}")
            assert (answer.prompt_tokens, answer.text) == (want.prompt_tokens, want.text)
            assert answer.prompt_tokens <= 128
        else:
            assert answer.prompt_tokens + 5 <= 256
    assert len(left) >= 2
    assert all(each > 0 and each % 2 == 0 for each in left)
    assert [m["content"] for m in conversation.messages[1::2]] == [f"{FIRST} {n}" for n in range(12)]
    again = conversation.regenerate(lambda piece: None)
    assert again.text == answer.text


def test_a_conversation_longer_than_the_context_is_restored(converse):
    """Its oldest turns leave at the next question."""
    conversation, left = converse(), []
    saved = [{"role": "user", "content": "x y " * 80}, {"role": "assistant", "content": "z"}]
    assert conversation.restore(saved) > 128
    fresh = ask(converse(), FIRST)
    assert conversation.ask(FIRST, lambda piece: None, left.append).text == fresh.text
    assert (left, conversation.messages[:2]) == ([2], tuple(saved))
    conversation.clear()
    assert ask(conversation, FIRST).prompt_tokens == fresh.prompt_tokens


@pytest.mark.parametrize(("opened", "reasons"), [("<think>\n", True), ("", False)])
def test_a_template_may_open_the_reasoning(converse, monkeypatch, opened, reasons):
    """Then the answer begins within it."""
    conversation = converse()
    monkeypatch.setattr(conversation._tokenizer, "chat_template", "{{ messages[0].content }}\n" + opened)
    ask(conversation, FIRST)
    assert conversation.reasons == reasons


@pytest.mark.e2e
def test_sampling_can_change_between_turns(converse):
    """A new seed restarts the random state; any other change continues it."""

    def after(**changes: object) -> str:
        conversation = converse(temperature=1.0, seed=1, max_new_tokens=8)
        ask(conversation, FIRST)
        conversation.set_sampling(replace(conversation.sampling, **changes))
        return ask(conversation, SECOND).text

    assert after(max_new_tokens=8) == after()
    assert after(seed=3) != after()
    assert after(seed=3) == after(seed=3)


def test_seeds_reproduce(converse):
    """An equal seed gives equal sampled answers; another seed gives different ones."""
    texts = []
    for seed in (1, 1, 2):
        conversation = converse(temperature=1.0, seed=seed, max_new_tokens=12)
        texts.append([ask(conversation, prompt).text for prompt in (FIRST, SECOND)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0]


def test_an_answer_ends_after_max_new_tokens(converse, tokenizer, greedy_ids):
    """The answer has exactly max_new_tokens tokens, and finish_reason length."""
    answer = ask(converse(max_new_tokens=6), FIRST)
    assert (answer.new_tokens, answer.finish_reason) == (6, "length")
    assert answer.text == tokenizer.decode(greedy_ids)
    assert answer.levels == {"8": answer.levels["8"], "4": 0, "2": 0, "0": 0}
    assert answer.levels["8"] > 0


def test_one_token_has_no_time_per_token(converse):
    """Measurements between tokens are None, not 0, for an answer of one token."""
    answer = ask(converse(max_new_tokens=1), FIRST)
    assert (answer.new_tokens, answer.tpot_s, answer.ssd_bytes_per_token) == (1, None, None)
    assert answer.hit_rate == {"vram": None, "dram": None}


def test_a_stop_token_ends_the_answer(converse, tokenizer, greedy_ids):
    """The stop token is counted and is no part of the text."""
    at = 2
    assert greedy_ids[at] not in greedy_ids[:at]
    answer = ask(converse(max_new_tokens=6, stop=(greedy_ids[at],)), FIRST)
    assert (answer.new_tokens, answer.finish_reason) == (at + 1, "stop")
    assert answer.text == tokenizer.decode(greedy_ids[:at])


def test_the_contexts_end_ends_the_answer(converse, tokenizer):
    """With 4 tokens of KV left the answer has 5 tokens, since the last one needs no KV."""
    prompt = len(ids_of(tokenizer, FIRST))
    answer = ask(converse(context=prompt + 4, max_new_tokens=50), FIRST)
    assert (answer.new_tokens, answer.finish_reason) == (5, "context")


def test_a_prompt_that_does_not_fit_leaves_the_conversation(converse):
    """It is refused, and the next answer is as in a conversation without it."""
    conversation, fresh = converse(), converse()
    assert ask(conversation, FIRST).text == ask(fresh, FIRST).text
    with pytest.raises(ContextExceeded, match="128"):
        ask(conversation, "x y z " * 60)
    left, want = ask(conversation, SECOND), ask(fresh, SECOND)
    assert (left.text, left.prompt_tokens) == (want.text, want.prompt_tokens)


def test_ctrl_c_leaves_the_conversation(converse, monkeypatch):
    """An interrupted answer is dropped; the next answer is as in a conversation without it."""
    conversation, fresh = converse(), converse()
    assert ask(conversation, FIRST).text == ask(fresh, FIRST).text
    run, steps = Engine.run, []

    def interrupted(self: Engine, context: StepContext) -> Generator[int, None, None]:
        steps.append(context.step.rows)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return run(self, context)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("something else", lambda piece: None)
    assert steps[1:] == [1, 1, 1]
    left, want = ask(conversation, SECOND), ask(fresh, SECOND)
    assert (left.text, left.prompt_tokens) == (want.text, want.prompt_tokens)


def test_sampling_stays_within_its_limits():
    """top_k 1 and a tiny top_p are greedy; a penalty avoids earlier tokens."""
    logits = torch.tensor([1.0, 3.0, 2.9, 0.5])

    def chosen(temperature: float, top_p: float, top_k: int, penalty: float) -> set[int]:
        sampler = Sampler(Sampling(temperature, top_p, top_k, penalty, 0, 1, frozenset()))
        return {sampler.next([1], logits) for _ in range(40)}

    assert chosen(0, 1, 0, 1) == chosen(1.0, 1, 1, 1) == chosen(1.0, 0.05, 0, 1) == {1}
    assert chosen(0, 1, 0, 1.5) == {2}
    assert chosen(1.0, 1, 2, 1) == {1, 2}
    assert len(chosen(5.0, 1, 0, 1)) > 2


def test_a_store_without_a_tokenizer_is_refused(damageable):
    """The error has the directory and the missing files."""
    for path in damageable.glob("*token*"):
        path.unlink()
    with pytest.raises(UserError, match=r"tokenizer in .*tokenizer\.json"):
        load_tokenizer(damageable)
