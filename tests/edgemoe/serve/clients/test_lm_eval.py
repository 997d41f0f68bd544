"""lm-eval over HTTP and by our adapter: log-likelihoods of transformers, the same ones by both, each context once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from servers import server_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import edgemoe
from edgemoe.evaluate.tasks import held_out_tasks
from edgemoe.models.demo import DEMO

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

pytestmark = pytest.mark.e2e

MEAN_ERROR, MOST_ERROR = 0.03, 0.15
"""Nats a token between bf16 in transformers and level 8, over all choices and of one; wrong ones have -2 a token."""


@pytest.fixture(scope="module")
def questions() -> list[tuple[str, list[str], int]]:
    """(context, choices, the right one's place) of the demo's capitals, in its chat template."""
    turns = [task.turns[0] for task in held_out_tasks("capitals", 10)]
    answers = [turn.answer for turn in turns]
    found = []
    for i, turn in enumerate(turns):
        wrong = [answer for answer in dict.fromkeys(answers) if answer != turn.answer][:3]
        choices = sorted([turn.answer, *wrong])
        context = f"<|user|>{turn.question}<|end|><|assistant|>"
        found.append((context, choices, choices.index(turn.answer)))
        assert len(choices) == 4, i
    return found


@pytest.fixture(scope="module")
def model() -> Iterator[edgemoe.Model]:
    with edgemoe.load(exact=8, context=256, parallel=4) as one:
        yield one


def instances(questions) -> list[object]:
    from lm_eval.api.instance import Instance

    pairs = [(context, choice) for context, choices, _ in questions for choice in choices]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def accuracy(questions, scores: list[float]) -> float:
    rows = torch.tensor(scores).view(len(questions), 4)
    right = torch.tensor([place for _, _, place in questions])
    return float((rows.argmax(1) == right).double().mean())


@pytest.fixture(scope="module")
def reference(questions) -> list[tuple[float, bool, int]]:
    """(log-likelihood, greedy, tokens) of each choice, by transformers in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    found = []
    for context, choices, _ in questions:
        for choice in choices:
            ids, first = tokenizer(context + choice)["input_ids"], len(tokenizer(context)["input_ids"])
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            rows = logprobs[first - 1 : -1]
            wanted = torch.tensor(ids[first:])
            greedy = bool((rows.argmax(-1) == wanted).all())
            found.append((float(rows.gather(1, wanted[:, None]).sum()), greedy, len(wanted)))
    return found


def assert_close(scores: list[tuple[float, bool]], reference) -> None:
    errors = []
    for (score, greedy), (want, want_greedy, tokens) in zip(scores, reference, strict=True):
        errors.append(abs(score - want) / tokens)
        assert greedy == want_greedy
    assert max(errors) < MOST_ERROR
    assert sum(errors) / len(errors) < MEAN_ERROR


def test_the_adapter_has_the_scores_of_transformers(model, questions, reference):
    """Each choice within level 8's error, the accuracy of bf16, which is far from chance; contexts come once."""
    from edgemoe.lm_eval import EdgemoeLM

    model.forget()
    before = model.status().moved.requests
    adapter = EdgemoeLM(model=model)
    found = adapter.loglikelihood(instances(questions), disable_tqdm=True)
    assert_close(found, reference)
    scores = [score for score, _ in found]
    assert accuracy(questions, scores) == accuracy(questions, [score for score, *_ in reference]) >= 0.7
    reused = model.status().moved.requests - before
    model.forget()
    other = edgemoe.api.model.Model(model.engine, model.tokenizer, model.sampling)
    again = EdgemoeLM(model=other).loglikelihood(instances(questions), disable_tqdm=True)
    assert again == found
    assert reused < other.status().moved.requests


def test_over_http(model, questions, reference, monkeypatch):
    """`local-completions`, with the server's tokenizer, has the adapter's scores to the last bit."""
    from lm_eval.api.registry import get_model

    from edgemoe.lm_eval import EdgemoeLM

    want = EdgemoeLM(model=model).loglikelihood(instances(questions), disable_tqdm=True)
    monkeypatch.setattr(model, "close", lambda: None)  # other tests use it
    with server_of(model) as server:
        client = get_model("local-completions")(
            model="demo", base_url=f"{server.url}/v1/completions", tokenizer_backend="remote", batch_size=4
        )
        found = client.loglikelihood(instances(questions), disable_tqdm=True)
    assert_close(found, reference)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in want], abs=1e-5)


def request(*arguments: object) -> object:
    return SimpleNamespace(args=arguments)


def test_answers_and_rolling_windows(model):
    """Answers end at their stop strings; a text longer than the context is scored once a token, by windows."""
    from edgemoe.lm_eval import EdgemoeLM

    adapter = EdgemoeLM(model=model)
    question = adapter.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    answers = adapter.generate_until(
        [request(question, {"until": ["."], "max_gen_toks": 20}), request(question, {"until": " is"})]
    )
    assert answers == ["The capital of France is Paris", "The capital of France"]
    text = "What is the capital of France? " * 60
    tokens = adapter.tok_encode(text)
    assert len(tokens) > 1.5 * adapter.max_length
    (score,) = adapter.loglikelihood_rolling([request(text)])
    size, begin = adapter.max_length - 1, adapter.prefix_token_id
    want, at = 0.0, 0
    while at < len(tokens):
        end = min(at + size, len(tokens))
        window = [begin, *tokens[:end]] if at == 0 else tokens[max(end - size - 1, 0) : end]
        (scores,) = model.logprobs([window])
        want += sum(each.logprob for each in scores[len(window) - 1 - (end - at) :])
        at = end
    assert score == pytest.approx(want, rel=1e-3)


def test_a_task_of_lm_eval(model, tmp_path):
    """A multiple-choice task in a file, through simple_evaluate: the accuracy of the scores."""
    from lm_eval.tasks import TaskManager

    from edgemoe.lm_eval import EdgemoeLM

    rows = [
        {"question": task.turns[0].question, "choices": [task.turns[0].answer, "horse"], "label": 0}
        for task in held_out_tasks("capitals", 6)
    ]
    (tmp_path / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "capitals.yaml").write_text(
        "task: edgemoe_capitals\ndataset_path: json\noutput_type: multiple_choice\ntest_split: train\n"
        f"dataset_kwargs: {{data_files: {tmp_path / 'capitals.jsonl'}, cache_dir: {tmp_path / 'cache'}}}\n"
        "doc_to_text: '<|user|>{{question}}<|end|><|assistant|>'\ntarget_delimiter: ''\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    result = lm_eval.simple_evaluate(
        model=EdgemoeLM(model=model),
        tasks=["edgemoe_capitals"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    assert result["results"]["edgemoe_capitals"]["acc,none"] == 1.0
