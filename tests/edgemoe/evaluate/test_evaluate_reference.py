"""The bf16 reference: transformers' own numbers, kept without loss; unsuitable checkpoints are refused."""

from __future__ import annotations

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgemoe.cache.arena import Arena
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit, MissingTensor, UserError
from edgemoe.evaluate import reference as reference_module
from edgemoe.evaluate.accuracy import ChatTasks, reference_conversations, task_accuracy
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.tasks import Task, Turn
from edgemoe.storage.base import ExpertKey, Plane
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.reader import RecordReader

pytestmark = pytest.mark.e2e

VOCAB = 300


@pytest.fixture(scope="module")
def reference(checkpoint) -> Reference:
    return Reference(checkpoint, VOCAB, Checkpoint.open(checkpoint).fingerprint())


def test_logits_are_the_models_own(reference, tiny_model):
    """bf16, and equal to the saved model's up to the rotary frequencies, which that one rounded to bf16."""
    tokens = [5, 17, 200, 3, 3, 40]
    with torch.inference_mode():
        expected = tiny_model(torch.tensor([tokens])).logits[0]
    logits = reference.logits(tokens)
    assert (logits.dtype, logits.shape) == (torch.bfloat16, (6, VOCAB))
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0)


def test_continuation_is_greedy(reference):
    """Every token is the likeliest continuation; a stop token ends the answer and is not part of it."""
    tokens = [5, 17, 200]
    for _ in range(6):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    answer = tokens[3:]
    assert reference.continuation(tokens[:3], [], 6) == answer
    stop = answer[3]
    assert reference.continuation(tokens[:3], [stop], 6) == answer[: answer.index(stop)]


def test_the_checkpoints_own_generation_config_is_ignored(reference, checkpoint, tmp_path):
    """Answers stay greedy where the checkpoint sets a repetition penalty and sampling."""
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    own = {"repetition_penalty": 9.0, "do_sample": True, "temperature": 3.0, "top_k": 0}
    (copy / "generation_config.json").write_text(json.dumps(own))
    other = Reference(copy, VOCAB, Checkpoint.open(copy).fingerprint())
    assert other.continuation([5, 17, 200], [], 12) == reference.continuation([5, 17, 200], [], 12)


def test_the_logit_file_keeps_every_bit():
    """Windows read back, in any order, equal the windows written."""
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randn(rows, 7, generator=generator).bfloat16() for rows in (3, 1, 5)]
    with LogitFile(9, 7) as file:
        for window in windows:
            file.append(window)
        for number in (2, 0, 1, 2):
            assert torch.equal(file.read(number), windows[number])


def test_a_disk_too_small_for_logits(free_disk):
    """DoesNotFit, when the file is opened, with the bytes that are needed."""
    free_disk(9)
    with pytest.raises(DoesNotFit, match=r"expected 2KB free in .*, got 9 B: use fewer --tokens") as raised:
        LogitFile(rows=10, vocab=100)
    assert raised.value.minimum == 10 * 100 * 2


def test_another_vocabulary_is_refused(checkpoint):
    """A checkpoint with another vocabulary is a user error with both sizes."""
    with pytest.raises(UserError, match="301"):
        Reference(checkpoint, 301, "")


def test_another_source_is_logged(checkpoint, caplog):
    """A checkpoint other than the store's source is used, with a warning."""
    Reference(checkpoint, VOCAB, "of another model")
    assert "is not the checkpoint" in caplog.text


def test_a_missing_tensor_is_fatal(checkpoint, tmp_path):
    """transformers would initialise the tensor at random; here it is an error that names it."""
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    lost = "model.layers.2.mlp.gate.weight"
    del tensors[lost]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=lost):
        Reference(copy, VOCAB, "")


def test_reference_conversations_remember(reference):
    """A later turn's prompt contains the earlier turns with their answers; a new conversation's does not."""

    class Words:
        """An id for each character; decodes to a fixed word. The template writes roles and texts."""

        chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
        special_tokens_map: ClassVar[dict[str, str]] = {}

        def __init__(self) -> None:
            self.prompts: list[list[str]] = []

        def get_chat_template(self, tools=None) -> str:
            return self.chat_template

        def __call__(self, text, *, add_special_tokens, verbose=True):
            assert not add_special_tokens
            self.prompts.append(text.rstrip("|").split("|"))
            return {"input_ids": [ord(character) % 50 for character in text]}

        def decode(self, ids, **options):
            return "so"

    words = Words()
    start = reference_conversations(reference, ChatTasks({}, words, frozenset({2})))
    answer = start()
    assert [answer("one?"), answer("two?")] == ["so", "so"]
    start()("three?")
    assert words.prompts == [["user: one?"], ["user: one?", "assistant: so", "user: two?"], ["user: three?"]]


def test_accuracy_counts_turns():
    """Two of three turns right in one kind, none of one in the other; both kinds weigh the same in the mean."""
    answers = {"a": "1", "b": "2", "c": "wrong", "d": "wrong"}
    tasks = {
        "first": [Task("first", (Turn("a", "1"), Turn("b", "2"))), Task("first", (Turn("c", "3"),))],
        "second": [Task("second", (Turn("d", "4"),))],
    }
    conversations: list[list[str]] = []
    finished: list[int] = []

    def start():
        questions: list[str] = []
        conversations.append(questions)

        def answer(question: str) -> str:
            questions.append(question)
            return answers[question]

        return answer

    by_kind = task_accuracy(tasks, start, lambda: finished.append(1))
    assert by_kind == {"first": pytest.approx(2 / 3), "second": 0.0}
    assert conversations == [["a", "b"], ["c"], ["d"]]
    assert len(finished) == 3


def test_one_layer_is_lowered_for_a_while(reference, checkpoint, tiny_store):
    """Inside, logits are a model's whose layer 2 has the store's 2-bit weights; after it they are as before."""
    store = StoreModel.open(tiny_store).manifest
    geometry, tokens = store.geometry, [5, 17, 200, 3, 3, 40]
    size = geometry.prefix_bytes(2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    experts = model.model.layers[2].mlp.experts
    with RecordReader.open(tiny_store, store) as reader, torch.no_grad():
        for expert in range(8):
            record = Arena(1, size)
            reader.read(ExpertKey(2, expert), Plane.BASE, Plane.BASE, [record.views[0]])
            codes = np.frombuffer(bytes(record.views[0]), np.uint8)
            gate_up, down = decode(codes, geometry, LAYOUTS[store.layout], 2)
            experts.gate_up_proj[expert], experts.down_proj[expert] = gate_up, down
            record.close()
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    before = reference.logits(tokens)
    with reference.lowered(2, 2):
        assert torch.equal(reference.logits(tokens), want)
    assert not torch.equal(want, before)
    assert torch.equal(reference.logits(tokens), before)


def test_transposed_experts_are_lowered_by_their_inputs():
    """Groups lie along the inputs: a transposed matrix has the same weights as the plain one, transposed."""
    weights = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = reference_module._at_level(weights, 2, transposed=False)
    turned = reference_module._at_level(weights.mT.contiguous(), 2, transposed=True)
    assert torch.equal(turned.mT, plain)
    assert [len(row.unique()) for row in plain[0]] == [4] * 48
