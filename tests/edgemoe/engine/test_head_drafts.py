"""Guesses by a model's head for further tokens: as transformers makes them, and without effect on the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from greedy import GREEDY, assert_right, run
from head_models import LAYERS, guesses_of, model_with_head, save_with_head, wrap

from edgemoe.engine.drafts.base import Drafter
from edgemoe.engine.drafts.drafting import Drafting
from edgemoe.engine.drafts.gate import Acceptance, DraftGate
from edgemoe.engine.drafts.head import HeadDrafter, new_drafter
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import BadManifest, DamagedData, UserError
from edgemoe.kv.pictures import FIRST_ID
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_head import HEAD_STATES, HEAD_TOKENS
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.convert.head_weights import HeadWeights
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import HEAD_NAME, Manifest
from edgemoe.storage.store.verify import verify
from edgemoe.storage.store.writer import StoreWriter

PROMPT = [5, 9, 200, 17, 3, 88, 7, 12]
NEW = 24
LATENT = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
"""Sizes of latents that the compiled kernel of attention knows."""
HYBRID = {"form": "mtp", "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
"""A hybrid whose last layer has attention, as published ones: transformers makes the head's norms as that layer's."""
OWN_ROTATIONS = {
    **{"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    **{"sliding_attention": {"rope_type": "default", "rope_theta": 20.0}},
}
WINDOWED = {
    **{"form": "mtp", "sliding_window": 32, "rope_parameters": OWN_ROTATIONS},
    **{"num_mtp_layers": 1, "mtp_layer_types": ["sliding_attention"]},
}
"""The head of Mellum rotates as layers with a window do."""


class WithHead(NamedTuple):
    """A checkpoint with a head, its store, and transformers' model and head of it."""

    checkpoint: Path
    store: Path
    model: Any
    head: Any


def make_store(
    model_type: str, directory: Path, form: str = "layer", wrapped: str = "", **changes: Any
) -> WithHead:
    model, head = model_with_head(model_type, **changes)
    checkpoint = save_with_head(model, head, directory / "checkpoint", form=form, fused=bool(wrapped))
    if wrapped:
        wrap(checkpoint, wrapped)
    convert_checkpoint(checkpoint, directory / "store", max_level=8, layout="auto", dense_bits=16)
    return WithHead(checkpoint, directory / "store", model, head)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> WithHead:
    return make_store("glm4_moe", tmp_path_factory.mktemp("glm"))


class Always(DraftGate):
    """Allows all guesses, whatever they cost."""

    def open(self, sequences):
        return True

    def counts(self, acceptances, proposed, limit, *, computed=False):
        return list(proposed)

    def observe(self, sequences, drafted, accepted, seconds):
        pass


def guessing(engine: Engine) -> Drafting:
    """Guesses as many tokens as there may be."""
    make = partial(new_drafter, engine.head)
    return Drafting(lambda: engine.most_drafts, engine.plan.decode_rows, None, make, Always())


def show_states(engine: Engine, drafter: Drafter, tokens: list[int]) -> None:
    """Shows a drafter the states of a prompt."""
    sequence = engine.sequences.new()
    context = engine.begin(Step((Segment(sequence, tuple(tokens), PromptAttention()),)))
    for _ in engine.run(context):
        pass
    engine.sequences.end(sequence)
    drafter.saw(len(tokens) - len(context.states[0]), context.states[0])


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *[("", {}), ("deepseek_v3", LATENT), ("glm4_moe_lite", LATENT)],
        *[("qwen3_next", HYBRID), ("mellum", WINDOWED)],
        ("qwen3_5_moe_text", HYBRID | {"wrapped": "qwen3_5_moe"}),
    ],
)
def test_guesses_are_those_of_transformers_in_float32(open_engine, glm, tmp_path, model_type, changes):
    """Logits of a prompt, and of two guesses after it, differ from transformers' head by the codes of 8 bits alone."""
    one = make_store(model_type, tmp_path, **changes) if model_type else glm
    engine = open_engine(one.store, drafts="mtp")
    tokens, logits = guesses_of(one.head, one.model, PROMPT, 3)
    drafter = new_drafter(engine.head)
    show_states(engine, drafter, PROMPT[:-1])
    ran, rows = drafter._runner.run, list[torch.Tensor]()

    def record_logits(*arguments: Any) -> Any:
        out = ran(*arguments)
        rows.append(out[0][0])
        return out

    drafter._runner.run = record_logits
    assert drafter.propose(PROMPT, 3) == tokens
    error = (torch.stack(rows) - logits).norm(dim=1) / logits.norm(dim=1)
    assert error.max() < 0.05


def test_guesses_after_more_tokens_and_after_another_request_are_the_same(open_engine, glm):
    """The head goes on where it was, whatever was guessed wrong; it begins anew after another request's tokens."""
    engine = open_engine(glm.store, drafts="mtp")
    longer = [*PROMPT, 40, 41, 42]
    once, other, step_by_step = (new_drafter(engine.head) for _ in range(3))
    show_states(engine, once, longer[:-1])
    want = once.propose(longer, 3)
    for end in (len(PROMPT), len(PROMPT) + 2, len(longer)):
        show_states(engine, step_by_step, [*longer[: end - 1], 99, 98])  # rows of guesses that were wrong
        step_by_step.propose(longer[:end], 2)
    assert step_by_step.propose(longer, 3) == want
    show_states(engine, other, PROMPT[:-1])
    other.propose(PROMPT, 1)
    assert step_by_step.propose(longer, 3) == want
    assert once.propose([*longer, 7, 8], 3) == []  # a state is missing


def test_guesses_begin_after_the_last_picture_of_a_prompt(open_engine, glm):
    """The head has no embeddings of pictures: it sees the words after them, as in a prompt that begins there."""
    engine, guesses = open_engine(glm.store, drafts="mtp"), list[list[int]]()
    sequence = engine.sequences.new()
    context = engine.begin(Step((Segment(sequence, tuple(PROMPT[:-1]), PromptAttention()),)))
    for _ in engine.run(context):
        pass
    engine.sequences.end(sequence)
    for first, tokens in ((2, PROMPT), (0, [*PROMPT[:2], FIRST_ID, *PROMPT[3:]])):
        drafter = new_drafter(engine.head)
        drafter.saw(first, context.states[0][first:])
        guesses.append(drafter.propose(tokens, 3))
    assert guesses[0] == guesses[1] != []


def test_guesses_of_several_answers_are_computed_together(open_engine, glm):
    """Each has the guesses that it has alone, in few steps of the head; more drafters than sequences take turns."""
    engine = open_engine(glm.store, drafts="mtp", parallel=2)
    texts = [PROMPT, [*PROMPT[::-1], 40, 41], [7, 7, 90]]
    alone, together = ([new_drafter(engine.head) for _ in texts] for _ in range(2))
    for drafters in (alone, together):
        for drafter, tokens in zip(drafters, texts, strict=True):
            show_states(engine, drafter, tokens[:-1])
    want = [drafter.propose(tokens, 3) for drafter, tokens in zip(alone, texts, strict=True)]
    engine.head.take_spent()
    parts = [(together[0], texts[0], 3), (together[1], texts[1], 2)]
    assert together[0].propose_all(parts) == [want[0], want[1][:2]]
    # 16 rows do not fit into 8; then one row each, and one of the first.
    assert engine.head.take_spent().steps == 4
    assert together[2].propose_all([(together[2], texts[2], 1), (together[0], texts[0], 0)]) == [
        want[2][:1],
        [],
    ]
    for drafter, tokens, guesses in zip(together, texts, want, strict=True):
        show_states(engine, drafter, tokens[:-1])
        assert drafter.propose(tokens, 3) == guesses


def test_states_of_a_request_are_freed_with_it(open_engine, glm):
    """The next drafter takes its keys and values, and a request that goes on keeps its own."""
    engine = open_engine(glm.store, drafts="mtp", parallel=2)
    first, second = new_drafter(engine.head), new_drafter(engine.head)
    sequences = engine.head.sequence_of(second), engine.head.sequence_of(first)
    freed = ref(first)
    del first
    assert freed() is None
    assert engine.head.sequence_of(new_drafter(engine.head)) is sequences[1]
    assert engine.head.sequence_of(second) is sequences[0]


def has_tokens(request: Request, count: int) -> bool:
    return len(request.tokens) >= count


def test_answers_at_once_are_those_without_guesses(open_engine, glm):
    """Three requests with a head's guesses, of which the second is drawn and the third comes later."""
    prompts = [PROMPT, PROMPT[::-1], [7, 7, 90]]
    sampling = [GREEDY, replace(GREEDY, temperature=0.9, seed=3), GREEDY]
    answers = dict[str, list[list[int]]]()
    for way in ("off", "mtp"):
        engine = open_engine(glm.store, drafts=way, parallel=3)
        scheduler = Scheduler(engine)
        if way == "mtp":
            scheduler.loop.drafting = guessing(engine)
        requests = [
            Request(list(prompt), Sampler(replace(each, max_new_tokens=NEW)))
            for prompt, each in zip(prompts, sampling, strict=True)
        ]
        for request in requests[:2]:
            scheduler.submit(request)
        scheduler.wait(requests[0], until=partial(has_tokens, requests[0], len(PROMPT) + 5))
        scheduler.submit(requests[2])
        for request in requests:
            scheduler.wait(request)
        answers[way] = [request.tokens for request in requests]
    assert answers["mtp"] == answers["off"]
    assert all(request.trace.drafted > NEW / 2 for request in requests)


def test_a_read_that_fails_costs_the_guesses_of_all_answers_alone(open_engine, glm, monkeypatch):
    """The head forgets what it has seen then, and guesses again afterwards as before."""
    engine = open_engine(glm.store, drafts="mtp", parallel=2)
    drafters = [new_drafter(engine.head) for _ in range(2)]
    for drafter in drafters:
        show_states(engine, drafter, PROMPT[:-1])
    want = drafters[0].propose(PROMPT, 3)
    with monkeypatch.context() as patch:
        run, calls = engine.head._decode.run, list[int]()

        def failing(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) > 2:
                raise DamagedData("an expert", "none", "verify the store")
            return run(*arguments)

        patch.setattr(engine.head._decode, "run", failing)
        assert drafters[0].propose_all([(each, PROMPT, 3) for each in drafters]) == [[], []]
    assert drafters[0].propose_all([(each, PROMPT, 3) for each in drafters]) == [want, want]


@pytest.mark.parametrize(
    "how",
    [
        {"level": 8},
        {"levels": (8, 4), "retention": 0.5, "exact": True},
        {"level": 4, "kv": "q8_0", "experts": 5},
    ],
)
def test_an_answer_is_that_without_guesses_wherever_experts_are(open_engine, glm, how):
    """Tokens and logits are equal; guesses are counted, with what the head's experts read from the disk."""
    simple = run(Scheduler(open_engine(glm.store, **how)), PROMPT, NEW)
    engine = open_engine(glm.store, drafts="mtp", **how)
    scheduler = Scheduler(engine)
    scheduler.loop.drafting = guessing(engine)
    request = run(scheduler, PROMPT, NEW)
    assert request.tokens == simple.tokens
    assert torch.equal(torch.stack(request.rows), torch.stack(simple.rows))
    assert request.trace.decode.drafted > NEW
    assert request.trace.decode.seconds < request.trace.token_times[-1] - request.trace.token_times[0] + 1
    head = {key.layer for key in engine.vram.resident()} if "experts" not in how else {LAYERS}
    assert LAYERS in head
    if "experts" in how:
        assert request.trace.decode.transfers.ssd_bytes > simple.trace.decode.transfers.ssd_bytes
    assert_right(engine, request)


def test_a_head_has_a_part_of_the_plan_where_it_is_used(open_engine, glm):
    """Without guesses by it, memory is divided as for a store that has none."""
    store = StoreModel.open(glm.store)
    plain, ngram, own = (
        store.plan(vram_limit=None, settings=RunSettings(levels=(8,), drafts=way))
        for way in ("off", "ngram", "mtp")
    )
    assert (plain.experts, ngram.experts, own.experts) == (16, 16, 24)
    added = own.dense_bytes - ngram.dense_bytes
    engine = open_engine(glm.store, drafts="mtp")
    kernel = engine.head._decode._native
    assert kernel.most_rows == 4
    held = [kernel._logits, kernel._router_logits, *kernel.buffers.tensors.values()]
    of_kernel = sum(each.nbytes for each in held)
    known = StoreModel.open(glm.store).head
    assert added >= known.dense_bytes + known.kv(store.shape.kv).bytes_for(HEAD_TOKENS) + of_kernel
    assert own.dense_bytes > ngram.dense_bytes == plain.dense_bytes
    assert own.drafts == 3
    engine = open_engine(glm.store)
    engine.fill()
    assert {key.layer for key in engine.vram.resident()} == {1, 2}


def test_a_store_says_and_verifies_its_head(glm, tmp_path):
    """Damage of its experts and of its other weights is rows; every byte counts."""
    assert describe(glm.store)["head"]["experts"] == 8
    assert describe(glm.store)["layers"] == 2
    done = list[tuple[int, int]]()
    assert not verify(glm.store, lambda *part: done.append(part)).damage
    head = Manifest.load(glm.store).head
    assert done[-1][1] > head.experts.records[-1].offset
    for name in (head.experts.file, HEAD_NAME):
        path = glm.store / name
        raw = path.read_bytes()
        path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
        try:
            assert name in str(verify(glm.store, lambda *part: None).damage)
        finally:
            path.write_bytes(raw)


def without_head(store: Path, to: Path) -> Path:
    """The store as it was before stores had heads."""
    to.mkdir()
    manifest = Manifest.load(store)
    for path in store.iterdir():
        if path.name not in (HEAD_NAME, manifest.head.experts.file):
            (to / path.name).write_bytes(path.read_bytes())
    files = {name: entry for name, entry in manifest.files.items() if name != HEAD_NAME}
    old = Manifest(**{**vars(manifest), "head": None, "files": files})
    old.save(to / "store.json")
    return to


def test_a_store_without_a_head_answers_and_gets_one_by_converting_again(
    open_engine, glm, tmp_path, monkeypatch
):
    """Its guesses are refused by name until then; afterwards both stores have the same bytes."""
    old = without_head(glm.store, tmp_path / "old")
    with open_engine(old) as engine:
        assert run(Scheduler(engine), PROMPT, 2).tokens
    with pytest.raises(UserError, match=r"--draft mtp, got one without it: convert the model again"):
        open_engine(old, drafts="mtp")

    def refuse(*arguments: Any) -> None:
        raise UserError("room", "none", "make some")

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "require_free", refuse)
        with pytest.raises(UserError, match="room"):  # before a byte is written
            convert_checkpoint(glm.checkpoint, old, max_level=8, layout="auto", dense_bits=16)
    assert not (old / HEAD_NAME).exists()
    convert_checkpoint(glm.checkpoint, old, max_level=8, layout="auto", dense_bits=16)
    with monkeypatch.context() as patch:  # another process has added the head since this one looked
        patch.setattr("edgemoe.storage.convert.run._Conversion._made", lambda *_: False)
        patch.setattr(HeadWeights, "write", refuse)
        convert_checkpoint(glm.checkpoint, old, max_level=8, layout="auto", dense_bits=16)
    assert Manifest.load(old).to_json() == Manifest.load(glm.store).to_json()
    assert (old / HEAD_NAME).read_bytes() == (glm.store / HEAD_NAME).read_bytes()
    assert isinstance(new_drafter(open_engine(old, drafts="mtp").head), HeadDrafter)


def test_what_a_head_cannot_guess_with_is_refused(open_engine, glm, tiny_store, tmp_path):
    """A family without a head, precision that moves, and a head of another layer than the config's."""
    with pytest.raises(UserError, match=r"qwen3_moe, which has none here: give --draft ngram"):
        open_engine(tiny_store, drafts="mtp")
    with pytest.raises(UserError, match=r"for --draft mtp, got --policy hotness"):
        open_engine(glm.store, levels=(8, 4), exact=False, hotness=Hotness(), drafts="mtp")
    other = without_head(glm.store, tmp_path / "other")
    content = Manifest.load(glm.store)
    wrong = content.head.__class__(LAYERS + 1, content.head.experts)
    Manifest(**{**vars(content), "head": wrong}).save(other / "store.json")
    with pytest.raises(BadManifest, match=f"a head as layer {LAYERS}"):
        StoreModel.open(other)


def test_a_drafter_keeps_few_states(open_engine, glm):
    """A long answer's old states go, and guesses begin with the ones that are left."""
    drafter = new_drafter(open_engine(glm.store, drafts="mtp", context=256).head)
    states = torch.randn(1, 64).bfloat16()
    for position in range(3 * HEAD_STATES):
        drafter.saw(position, states)
    assert sum(len(rows) for _, rows in drafter._states) == HEAD_STATES
    assert len(drafter.propose([7] * (3 * HEAD_STATES + 1), 2)) == 2


def test_the_gate_tries_computed_guesses_and_leaves_them_where_they_do_not_pay():
    """Likely guesses are made at once; wrong ones cost no more than the balance, and are tried again later."""
    gate, acceptance = DraftGate(), Acceptance(likely=True)
    for _ in range(6):
        gate.observe(1, 0, 0, 1.0)
    assert gate.counts([acceptance], [3], 3, computed=True)[0] > 0
    steps, counted = 600, list[int]()
    for _ in range(steps):
        count = gate.counts([acceptance], [3], 3, computed=True)[0]
        counted.append(count)
        gate.observe(1, count, 0, 1.0 + 0.5 * count)
        if count:
            acceptance.observe(count, 0)
    assert sum(0.5 * count for count in counted) < 0.02 * steps
    assert any(counted[100:])


def test_an_answer_of_a_hybrid_is_that_without_guesses(open_engine, tmp_path):
    """States of delta nets leave wrong guesses out, and the head's layer keeps keys and values alone."""
    store = make_store("qwen3_next", tmp_path, **HYBRID).store
    simple = run(Scheduler(open_engine(store)), PROMPT, NEW)
    engine = open_engine(store, drafts="mtp")
    scheduler = Scheduler(engine)
    scheduler.loop.drafting = guessing(engine)
    request = run(scheduler, PROMPT, NEW)
    assert torch.equal(torch.stack(request.rows), torch.stack(simple.rows))
    assert request.trace.decode.drafted > NEW
