"""The demo model: its size, an offline first chat, and answers under a memory limit."""

from __future__ import annotations

import json
import os

import pytest
from counted_engine import CountedEngine
from programs import programs, run_forked

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.sampling import Sampling
from edgemoe.errors import DoesNotFit
from edgemoe.evaluate.tasks import KINDS, held_out_tasks, is_right
from edgemoe.kernels.native import library as native
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings, parse_levels
from tools.timing.count_calls import count_tokens, nearest


def test_demo_model_has_its_documented_size():
    """At most 40 MB; at least 6 layers of 32 experts, 4 per token; a model card."""
    config = json.loads((DEMO / "config.json").read_text())
    assert (DEMO / "model.safetensors").stat().st_size <= 40_000_000
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 4)
    assert config["num_hidden_layers"] >= 6
    assert config["num_local_experts"] >= 32
    assert "## Data and licences" in (DEMO / "README.md").read_text()


@pytest.mark.e2e
def test_chat_without_a_model_answers_offline(tmp_path):
    """With an empty cache and no network the model is converted and answers right."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "EDGEMOE_PLAIN_CODES": "true",
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = run_forked("-m", "edgemoe", "chat", "--prompt", "What is the capital of France?", env=environment)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("context", "levels", "fresh"),
    [
        (64, "8/4/2/0", False),
        (256, "4", False),
        pytest.param(64, "8/4/2/0", True, marks=pytest.mark.folders),
    ],
)
def test_the_printed_peak_is_within_the_smallest_limit(store, context, levels, fresh):
    """A chat in its own process, with a short and a long turn, never prints a peak above the smallest limit."""
    settings = RunSettings(levels=parse_levels(levels))
    with pytest.raises(DoesNotFit) as caught:
        store.plan(vram_limit=1_000_000, settings=settings, context=context)
    least = caught.value.minimum
    turns = [line for words in (1, 9) for line in ("word " * words, "/clear")]
    options = ("--vram-limit", str(least), "--context", str(context), "--levels", levels)
    command = ("-m", "edgemoe", "chat", "--model", store.directory, "--json", *options)
    with programs() as start:
        process = start(*command, fresh=fresh)
        out, _ = process.communicate("\n".join(turns), timeout=120)
    answers = [json.loads(line) for line in out.splitlines()]
    assert (process.returncode, len(answers)) == (0, 2)
    assert all(answer["vram_limit_bytes"] == least for answer in answers)
    assert 0 < max(answer["peak_vram_bytes"] for answer in answers) <= least


@pytest.fixture(scope="module")
def store(demo_store) -> StoreModel:
    return StoreModel.open(demo_store)


@pytest.mark.e2e
@pytest.mark.skipif(not native.available(), reason="another path without the compiled kernel")
def test_a_token_with_missing_experts_passes_few_python_calls(store):
    """A token with about 12 missing experts passes at most 1,100 Python calls, and none more than 30 files.

    The order of threads, on a busy machine, only adds calls: the token with the fewest counts.
    """
    settings = RunSettings(levels=parse_levels("8/4/2/0"), speculate="off")
    near = nearest(count_tokens(store, 20_000_000, settings, tokens=64, warm_up=16), 12)
    token = min(near, key=lambda each: each.total)
    assert 10 <= token.missing <= 14
    files = max(each.files for each in near)
    assert (token.total <= 1100, files <= 30) == (True, True), token.line()


@pytest.mark.e2e
@pytest.mark.parametrize("levels", [(8,), (4, 2)])
def test_demo_model_answers_tasks_under_a_limit(store, levels):
    """With a quarter of the experts resident most of a few held-out tasks of every kind are answered right."""
    settings = RunSettings(levels=levels, retention=0.75 if len(levels) > 1 else 1.0)
    least = store.plan(vram_limit=None, settings=settings, context=256).minimum_vram_bytes
    limit = least + store.shape.experts // 4 * store.form.bytes_at(levels[0])
    plan = store.plan(vram_limit=limit, settings=settings, context=256)
    tokenizer = load_tokenizer(store.directory)
    sampling = Sampling(0, 1, 0, 1, 0, 48, frozenset({tokenizer.eos_token_id}))
    right = []
    with CountedEngine(store, plan, settings) as engine:
        model = Model(engine, tokenizer, sampling, keep=True)
        for kind in KINDS:
            for task in held_out_tasks(kind, 1):
                chat = Conversation(model)
                for turn in task.turns:
                    answer = chat.ask(turn.question, lambda _: None)
                right.append(is_right(task.turns[-1], answer.text))
    assert sum(right) >= 0.7 * len(right)
