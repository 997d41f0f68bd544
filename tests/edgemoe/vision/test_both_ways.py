"""Pictures whose tokens attend to each other in both directions: steps and blocks that divide none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from availability import needs_native
from picture_models import PICTURE, a_picture, a_plain_picture, opened, picture_model, pictures_of, question

from edgemoe.api.pictures import ModelPictures
from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import ModelRefused, UserError
from edgemoe.kernels.native import library as native
from edgemoe.kv import blocks
from edgemoe.kv.pictures import Features, PictureTokens, PlacedPicture, PromptPictures
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step, StepKV
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.vision.forms import FORMS
from edgemoe.vision.prompt import Pictures
from edgemoe.vision.reader import PictureReader

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]

CONTEXT = 192


def two_pictures(*, both_ways: bool = True) -> PromptPictures:
    """A picture of tokens 3 to 6, and its neighbour of tokens 7 to 9."""
    placed = PlacedPicture(3, 4, nothing), PlacedPicture(7, 3, nothing)
    return PromptPictures(placed, both_ways=both_ways)


def nothing() -> Features:
    """A picture's features, which no test here reads."""
    return Features(torch.zeros(1, 1))


def test_a_step_divides_no_picture():
    """It ends before one, or after it; one that begins within a picture has the rest of it."""
    pictures = two_pictures()
    wholes = {range(3): 3, range(5): 3, range(7): 7, range(8): 7, range(12): 12, range(5, 9): 7}
    assert {tokens: pictures.whole(tokens).stop for tokens in wholes} == wholes
    assert two_pictures(both_ways=False).whole(range(5)) == range(5)
    with pytest.raises(UserError, match="raise --prefill-rows"):
        pictures.prepare(pictures.whole(range(3, 5)))
    assert pictures.ahead(range(2, 11)) == [0, 3, 2, 1, 0, 2, 1, 0, 0]
    assert pictures.ahead(range(5, 8)) == [1, 0, 2]


def test_a_block_of_rows_divides_no_picture(open_engine, tiny_store):
    """Also a block within a block; without pictures it has as many rows as it may have."""
    engine = open_engine(tiny_store)
    sequence = SequenceKV(engine.shape.kv, 16)
    segment = Segment(sequence, tuple(range(12)), pictures=two_pictures())
    kv = StepKV(Step((segment,)))
    assert [kv.end_of_block(range(0, end)) for end in (3, 5, 8, 12)] == [3, 3, 7, 12]
    assert kv.end_of_block(range(3, 5)) == 5  # the kernel refuses it
    with kv.block(range(3, 12)):
        assert kv.ahead.tolist() == [3, 2, 1, 0, 2, 1, 0, 0, 0]
        assert kv.end_of_block(range(0, 6)) == 4
    assert len(kv.ahead) == 12
    assert StepKV(Step((Segment(sequence, (1, 2), pictures=two_pictures(both_ways=False)),))).ahead is None


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store of Gemma 4, whose chat template writes no tokens around pictures."""
    made = tmp_path_factory.mktemp("both") / "store"
    source = picture_model("gemma4", made.parent / "model")
    convert_checkpoint(source, made, max_level=8, layout="auto", dense_bits=16)
    return made


@pytest.fixture(scope="module")
def engine(store: Path) -> Iterator[Engine]:
    """An engine for two requests at once."""
    with opened(store, parallel=2, context=CONTEXT) as made:
        yield made


@pytest.fixture(scope="module")
def pictures(engine: Engine) -> Pictures:
    """The pictures of its prompts."""
    return pictures_of(engine)


@pytest.fixture(scope="module")
def tokens(pictures: Pictures) -> PictureTokens:
    """A prompt with pictures of 35 and 45 tokens."""
    files = a_picture(1, 180, 10), a_picture(2, 10, 300)
    return pictures.placed([5, PICTURE, 6, 7, PICTURE, 8], [pictures.read(file) for file in files])


def first_logits(scheduler: Scheduler, tokens: list[int]) -> tuple[Request, list[torch.Tensor]]:
    """Runs a prompt and one new token."""
    rows = list[torch.Tensor]()

    def keep(token: int, logits: torch.Tensor) -> bool:
        rows.append(logits.clone())
        return False

    sampler = Sampler(Sampling(0, 1, 0, 1, 0, 1, frozenset()))
    own = PictureTokens(tokens, tokens.pictures) if isinstance(tokens, PictureTokens) else list(tokens)
    request = Request(own, sampler, on_token=keep)
    scheduler.run(request)
    return request, rows


@pytest.mark.folders
def test_bits_do_not_depend_on_steps_and_blocks(engine, tokens, monkeypatch):
    """A prompt in one step, in steps of about a picture, after its KV was kept, and in blocks of a step."""
    sequence = engine.sequences.new()
    want = engine.prefill(sequence, tokens)
    engine.sequences.end(sequence)
    scheduler = Scheduler(engine, Pace(chunk=48), keep=True)
    assert torch.equal(first_logits(scheduler, tokens)[1][0], want)
    request, rows = first_logits(scheduler, tokens)
    assert request.cached
    assert torch.equal(rows[0], want)
    scheduler.close()
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 48)
    sequence = engine.sequences.new()
    assert torch.equal(engine.prefill(sequence, tokens), want)
    engine.sequences.end(sequence)


@pytest.mark.folders
def test_a_picture_that_no_step_holds_is_refused(engine, tokens):
    """It ends its own request alone, and names the option."""
    scheduler = Scheduler(engine, Pace(chunk=40))
    with pytest.raises(UserError, match="raise --prefill-rows"):
        first_logits(scheduler, tokens)
    assert first_logits(scheduler, [5, 6, 7])[0].reason == "length"
    scheduler.close()


@pytest.mark.folders
def test_without_the_kernel_pictures_are_refused_by_name(store, monkeypatch):
    """The plan leaves their memory to experts then."""
    monkeypatch.setattr(native, "available", lambda: False)
    found = StoreModel.open(store).with_vision()
    assert found.shape.vision is None
    refused = ModelPictures(found, 0)
    assert not refused.taken
    with pytest.raises(UserError, match="the compiled kernel on a CPU, for pictures of gemma4, got none"):
        refused.split(question(a_picture(1)))


@pytest.mark.folders
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"boi_token_id": None}, "image_token_id, boi_token_id, eoi_token_id"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input"),
    ],
    ids=["no token before a picture", "inputs of every layer"],
)
def test_a_config_that_does_not_fit_is_refused(store, engine, tmp_path, change, error):
    """By the key of config.json."""
    whole = json.loads((store / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | change))
    with pytest.raises(ModelRefused, match=error):
        Pictures(tmp_path, engine.store.manifest, FORMS["gemma4"], None, 0)


@pytest.mark.folders
@pytest.mark.parametrize(("setting", "tokens"), [(1120, 280), (140, 140)])
def test_pictures_have_at_most_as_many_tokens_as_a_block(store, tmp_path, setting, tokens):
    """A processor's bound of more than 1,048,576 pixels is lowered to one that it accepts."""
    settings = json.loads((store / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"max_soft_tokens": setting}))
    vision = json.loads((store / "config.json").read_text())["vision_config"]
    picture = PictureReader(tmp_path, FORMS["gemma4"], vision).read(a_plain_picture(640, 480))
    assert 0.9 * tokens < picture.tokens <= tokens
