"""The Python API: every line of its page, requests of several threads, and the state after each end."""

from __future__ import annotations

import asyncio
import doctest
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from integrity import check_integrity

import edgemoe
from edgemoe.api.model import Model
from edgemoe.engine.sampling import Sampler, Sampling, TokenLogprobs
from edgemoe.engine.text import StopString, TextStream
from edgemoe.errors import UserError
from edgemoe.models.tokenizer import load_tokenizer

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
GREEDY = Sampling(0, 1, 0, 1, 0, 6, frozenset())
PROMPT = "the quick brown fox"


@pytest.fixture
def model(open_engine, tiny_store) -> Iterator[Model]:
    engine = open_engine(tiny_store, context=128, parallel=4)
    with Model(engine, load_tokenizer(tiny_store), GREEDY) as model:
        yield model


@pytest.mark.e2e
def test_every_line_of_the_page_runs(monkeypatch, tmp_path):
    """Each example prints what the page shows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = re.sub(r"^```.*$", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, "api.md", str(PAGE), 0)
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert attempted > 25
    assert failed == 0


def test_the_page_names_all_that_is_exported():
    """Every exported name but the argument's types stands on the page, and resolves."""
    page = PAGE.read_text(encoding="utf-8")
    for name in edgemoe.__all__:
        assert getattr(edgemoe, name) is not None
        assert name in page or name in ("Answer", "AnswerStream", "Choices", "Model", "Prompt")
    with pytest.raises(AttributeError, match="no attribute 'engine_of'"):
        _ = edgemoe.engine_of


@pytest.mark.e2e
def test_a_stream_a_future_and_a_call_agree(model):
    """A prompt gives one text by every road, and the stream's pieces are its text."""
    want = model.generate(PROMPT)
    with model.stream(PROMPT) as stream:
        assert "".join(stream) == want.text
    assert stream.answer.tokens == want.tokens
    assert model.submit(PROMPT).result(60).text == want.text
    assert model.generate(model.encode(PROMPT)).text == want.text

    async def both() -> tuple[str, str]:
        answer = await model.agenerate(PROMPT)
        return answer.text, "".join([piece async for piece in model.astream(PROMPT)])

    assert asyncio.run(both()) == (want.text, want.text)


@pytest.mark.e2e
def test_many_threads_have_the_answers_of_one(model):
    """Eight threads with all kinds of calls at once: the answers that one thread has, and no thread is left."""
    prompts = [PROMPT + " jumps" * i for i in range(8)]
    want = [model.generate(prompt).tokens for prompt in prompts]
    got: dict[int, list[int]] = {}

    def call(i: int) -> None:
        if i % 3 == 0:
            got[i] = model.generate(prompts[i]).tokens
        elif i % 3 == 1:
            got[i] = model.submit(prompts[i]).result(60).tokens
        else:
            stream = model.stream(prompts[i])
            list(stream)
            got[i] = stream.answer.tokens

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(8)] == want
    model.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "edgemoe-scheduler"]


def test_left_streams_and_cancelled_futures_free_their_kv(model):
    """A closed stream, a dropped one, a cancelled future and a cancelled task leave no KV and no lease."""
    used = model.engine.budget.used_bytes
    stream = model.stream(PROMPT, max_new_tokens=60)
    next(stream)
    assert model.engine.budget.used_bytes > used
    stream.close()
    assert model.engine.budget.used_bytes == used
    assert list(stream) == []
    next(model.stream(PROMPT, max_new_tokens=60))
    future = model.submit(PROMPT, max_new_tokens=60)
    assert future.cancel()

    async def leave() -> None:
        async for _ in model.astream(PROMPT, max_new_tokens=60):
            break

    asyncio.run(leave())
    model.generate(PROMPT, max_new_tokens=2)
    model.close()
    assert model.engine.budget.used_bytes == used
    check_integrity(model.engine.vram)
    assert not model.engine.vram.residents.leases


def test_a_closed_model_ends_what_is_under_way(model):
    """Futures get the error of a closed model, and so do later calls; closing again does nothing."""
    futures = [model.submit(PROMPT, max_new_tokens=100) for _ in range(6)]
    model.close()
    model.close()
    ended = [future.exception(60) for future in futures]
    assert all(error is None or "an open model" in str(error) for error in ended)
    for call in (model.generate, model.stream, model.submit):
        with pytest.raises(UserError, match="an open model"):
            call(PROMPT)


def test_scores_are_the_log_probabilities_of_single_steps(model):
    """Each token's score follows from the logits after its prefix; the top ones come in order."""
    tokens = model.encode(PROMPT)
    (scores,) = model.logprobs([PROMPT], top=3)
    assert [score.token for score in scores] == tokens[1:]
    engine = model.engine
    for end, score in enumerate(scores, 1):
        sequence = engine.sequences.new()
        logprobs = engine.prefill(sequence, tokens[:end]).double().log_softmax(-1)
        engine.sequences.end(sequence)
        assert score.logprob == pytest.approx(float(logprobs[score.token]), abs=0.05)
        assert [value for _, value in score.top] == sorted((v for _, v in score.top), reverse=True)
        assert len(score.top) == 3
    assert model.logprobs([PROMPT, PROMPT], first=[3, 1]) == [
        [replace(score, top=()) for score in scores[2:]],
        [replace(score, top=()) for score in scores],
    ]
    with pytest.raises(UserError, match="two tokens or more"):
        model.logprobs([[5]])
    with pytest.raises(UserError, match=f"1 to {len(tokens) - 1}"):
        model.logprobs([PROMPT], first=[len(tokens)])


def test_a_prompt_is_scored_and_answered_at_once(model):
    """The prompt's log probabilities are as from `logprobs`, and the answer is an unscored prompt's."""
    want, (scores,) = model.generate(PROMPT), model.logprobs([PROMPT], top=2)
    answer = model.generate(PROMPT, prompt_logprobs=2)
    assert answer.tokens == want.tokens
    assert answer.prompt_logprobs == scores
    assert (want.prompt_logprobs, want.logprobs) == (None, None)


def test_progress_counts_the_tokens_of_an_answer(model):
    """At each piece the prompt is done; at the end, new tokens are the answer's, and times are in order."""
    seen, ready = [], threading.Event()

    def note(piece: str) -> None:
        assert ready.wait(30)
        seen.append(future.progress)

    future = model.submit(PROMPT, note, logprobs=0)
    ready.set()
    answer = future.result(60)
    prompt = len(model.encode(PROMPT))
    assert {(now.state, now.prompt_tokens, now.done_tokens) for now in seen} <= {
        ("decoding", prompt, prompt),
        ("ended", prompt, prompt),
    }
    assert [now.new_tokens for now in seen] == sorted(now.new_tokens for now in seen)
    assert future.progress.state == "ended"
    assert future.progress.new_tokens == answer.new_tokens == len(future.logprobs)
    assert 0 <= answer.queue_s <= answer.ttft_s <= answer.total_s


def test_the_status_adds_up(model):
    """KV is reserved while a request runs only; resident experts are the tier's; steps move what answers count."""
    before, stream = model.status(), model.stream(PROMPT)
    assert (before.running, before.memory["kv"]) == (0, 0)
    assert model.status().waiting == 1
    next(stream)
    during = model.status()
    stream.close()
    after = model.status()
    assert (during.running, during.memory["kv"] > 0) == (1, True)
    assert (after.running, after.waiting, after.memory) == (0, 0, before.memory)
    assert sum(after.resident["vram"].values()) == len(model.engine.vram.resident())
    assert after.moved.requests > before.moved.requests
    assert sum(after.use.experts.values()) > 0


def test_variables_reach_the_chat_template(model):
    """A variable of a request changes what the template writes; it cannot replace the messages."""
    messages = [{"role": "user", "content": "fox"}]
    model.tokenizer.chat_template = "{{ messages[0].content }}{% if loud %} over{% endif %}"
    assert model.encode(messages) == model.encode("fox")
    assert model.encode(messages, loud=True, messages=[]) == model.encode("fox over")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"temperature": -1}, "temperature of 0 or more"),
        ({"top_p": 1.5}, "top_p of 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty of -2 to 2"),
        ({"max_new_tokens": 0}, "max_new_tokens of 1 or more"),
        ({"stop": ""}, "stop strings"),
        ({"logprobs": -1}, "0 or more top logprobs"),
        ({"logit_bias": {300: 1.0}}, "token ids of 0 to 299"),
        ({"logit_bias": {30: 1e5}}, "logit biases of -10000 to 10000"),
        ({"logit_bias": {30: float("nan")}}, "logit biases of"),
        ({"stop_token_ids": [300]}, "token ids of 0 to 299 in stop_token_ids"),
        ({"min_new_tokens": -1}, "min_new_tokens of 0 or more"),
        ({"tempereture": 1}, "'tempereture'"),
        ({"temperature": "hot"}, "expected a number for temperature, got 'hot', of type str"),
        ({"stop": [3]}, "expected a string or a list of strings for stop, got [3]"),
        ({"max_new_tokens": 2.5}, "expected a whole number for max_new_tokens, got 2.5"),
    ],
)
def test_wrong_choices_are_named(model, choices, words):
    """A choice out of its range, or an unknown one, is refused before anything runs."""
    with pytest.raises(UserError, match=re.escape(words)):
        model.generate(PROMPT, **choices)


@pytest.mark.parametrize("prompt", [3, {"role": "user"}, ["fox", 3], ["fox"]])
def test_a_prompt_of_another_type_is_named(model, prompt):
    """Neither text nor messages nor token ids: refused with what it is."""
    with pytest.raises(UserError, match=r"a list of token ids as the prompt, got .*of type"):
        model.encode(prompt)


@pytest.fixture(scope="module")
def tokenizer(tiny_store):
    return load_tokenizer(tiny_store)


@pytest.mark.parametrize("stop", ["brown", "k b", "fox jumps", "wn f", "x"])
def test_stop_strings_across_token_borders(tokenizer, stop: str):
    """The text ends before the first stop string wherever tokens begin, and no part of it is shown before."""
    text = "the quick brown fox jumps over"
    stream, pieces = TextStream(tokenizer, (stop, "over")), []
    for token in tokenizer(text)["input_ids"]:
        pieces.append(stream.add(token))
        if stream.stop:
            break
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text == text[: text.index(stop)]
    assert stream.stop


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_end|>", "the quick"),
        ("quick<|im_end|>", "the "),
        ("<|im_end|> fox", "the quick"),
        ("k<", "the quic"),
    ],
)
def test_stop_strings_of_special_tokens(tokenizer, shows, stop, text):
    """A special token ends an answer where a stop string has it, whether the answer shows special tokens or not."""
    stream = TextStream(tokenizer, ("never", stop), special_tokens=shows)
    tokens = tokenizer("the quick<|im_end|> fox", add_special_tokens=False)["input_ids"]
    shown_text = ""
    for token in tokens:
        shown_text += "" if stream.stop else stream.add(token)
    assert shown_text + stream.end() == text
    assert (stream.text, stream.stop) == (text, stop)
    other = TextStream(tokenizer, ("<|im_end|> dog",), special_tokens=shows)
    whole = "".join(map(other.add, tokens)) + other.end()
    assert whole == tokenizer.decode(tokens, skip_special_tokens=not shows)


def test_a_long_stop_string_takes_linear_time():
    """Text that begins a stop string again and again: a naive search would compare 10 billion characters."""
    stop, start = StopString("a" * 50_000 + "b"), time.perf_counter()
    assert stop.find("a" * 200_000) == 0
    assert (stop.overlap, stop.find("ab")) == (50_000, 2)
    assert time.perf_counter() - start < 5


def test_the_begin_of_a_stop_string_comes_at_the_end(tokenizer):
    """Text that is withheld because a stop string may follow is shown when the answer ends without it."""
    stream = TextStream(tokenizer, ("fox runs",))
    shown = "".join(map(stream.add, tokenizer("the quick fox")["input_ids"]))
    assert shown == "the quick "
    assert shown + stream.end() == "the quick fox"


def sampled(logits: list[float], answer: list[int], **choices: object) -> int:
    sampling = Sampling(
        **{"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "seed": 0}
        | {"max_new_tokens": 1, "stop": frozenset()}
        | choices
    )
    return Sampler(sampling).next([9 % len(logits), *answer], torch.tensor(logits), len(answer))


def test_ends_of_an_answer_by_hand(model):
    """Own ends that do not end it, another token that does, and a least number of tokens."""
    whole = model.generate(PROMPT, max_new_tokens=6, ignore_ends=True).tokens
    assert len(whole) == 6
    stop = whole[2]
    first = whole.index(stop)
    found = model.generate(PROMPT, max_new_tokens=6, ignore_ends=True, stop_token_ids=[stop])
    assert (found.tokens, found.finish_reason) == (whole[:first], "stop")
    later = model.generate(
        PROMPT, max_new_tokens=6, ignore_ends=True, stop_token_ids=[stop], min_new_tokens=6
    )
    assert len(later.tokens) == 6
    assert stop not in later.tokens
    assert sampled([0.0, 3.0, 2.0], [], stop=frozenset({1}), min_new_tokens=1) == 2
    assert sampled([0.0, 3.0, 2.0], [2], stop=frozenset({1}), min_new_tokens=1) == 1


def test_penalties_and_biases_by_hand():
    """Presence counts a token of the answer once, frequency each time; a bias adds; the prompt counts in neither."""
    logits = [1.0, 1.9, 2.0]
    assert sampled(logits, []) == 2
    assert sampled(logits, [2], presence_penalty=0.2) == 1
    assert sampled(logits, [1, 2, 2], frequency_penalty=0.2) == 1
    assert sampled(logits, [2, 2], presence_penalty=0.05) == 2
    assert sampled(logits, [], logit_bias=((0, 1.5),)) == 0
    assert sampled(logits, [], presence_penalty=2.0) == 2


def test_extreme_settings_still_choose_a_token():
    """The least and the largest temperature, biases and penalties of float64 leave finite probabilities."""
    for temperature in (5e-324, 1e-308, 1e-5, 2e-4, 1e30, 1.7e308):
        assert sampled([1.0, 3e3, -3e3], [1], temperature=temperature, top_p=5e-324, min_p=0.999) in (0, 1, 2)
        extreme = {"logit_bias": ((0, 1e4), (1, -1e4)), "presence_penalty": 2.0, "repetition_penalty": 0.01}
        assert sampled([1.0, 2.0, 3.0], [1], temperature=temperature, **extreme) in (0, 1, 2)
    assert sampled([1.0, 2.0], [], temperature=5e-5, seed=3) == 1


def test_min_p_keeps_the_likely_tokens_only():
    """Tokens below a tenth of the largest probability never come; without min_p they do."""
    logits = torch.tensor([5.0, 4.5, 1.0, 1.0, 1.0]).tolist()
    chosen = {
        min_p: {sampled(logits, [], temperature=1.5, seed=seed, min_p=min_p) for seed in range(200)}
        for min_p in (0.0, 0.1)
    }
    assert chosen[0.1] == {0, 1}
    assert chosen[0.0] > {0, 1}


@pytest.mark.parametrize("one", [{"top_k": 1}, {"min_p": 1.0}])
def test_one_of_equal_logits_is_kept(one):
    """The one that a temperature of 0 takes, whatever the seed."""
    logits = [1.0, 2.0, 2.0]
    assert {sampled(logits, [], temperature=1, seed=seed, **one) for seed in range(40)} == {
        sampled(logits, [])
    }


def test_logprobs_by_hand():
    """Natural logarithms of a softmax over all tokens."""
    logits = torch.tensor([0.0, 1.0, 2.0])
    total = float(logits.exp().sum())
    got = TokenLogprobs.of(logits, 1, 2)
    want = [float(logits[i].exp() / total) for i in range(3)]
    assert torch.tensor(got.logprob).exp().item() == pytest.approx(want[1])
    assert [token for token, _ in got.top] == [2, 1]
