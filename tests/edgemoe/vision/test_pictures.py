"""Prompts with pictures, compared with transformers' own multimodal model of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from availability import needs_native
from folder_models import load_folder_model
from picture_models import (
    CONTEXT,
    PICTURE,
    SETTINGS,
    SIDES,
    SMALL,
    Sizes,
    a_picture,
    a_plain_picture,
    divergences,
    model_type_of,
    picture_model,
    pixels_of,
    question,
    reference,
)
from small_tokenizer import SPECIAL

from edgemoe.api.chat_prompt import ChatPrompts
from edgemoe.api.pictures import ModelPictures, picture_part
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.families.table import family_of
from edgemoe.kv.pictures import FIRST_ID
from edgemoe.kv.pictures import pictures_of as pictures_within
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.dense import VISION_NAME
from edgemoe.storage.store.dense_choice import DenseChoice
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.manifest_updates import save_dense
from edgemoe.vision.forms import FORMS, read_vision_config
from edgemoe.vision.reader import PictureReader

pytestmark = pytest.mark.filterwarnings("ignore")


def test_logits_are_transformers(source, store):
    """Two pictures in a row, whose steps divide one of them, then new tokens: as transformers' model in bf16."""
    compare(source, store, SMALL, [6, 3])


@pytest.mark.folders
@pytest.mark.parametrize(
    ("model_type", "sizes", "tokens"),
    [
        ("qwen3_5_moe", SMALL, [6, 3]),
        ("glm4v_moe", SMALL, [6, 4]),
        # A picture is enlarged up to 70 tokens; long ones have fewer, and more than the window.
        pytest.param("gemma4", [(180, 10), (10, 300)], [35, 45], marks=needs_native),
    ],
)
def test_logits_of_other_families_are_transformers(tmp_path, model_type, sizes, tokens):
    """Other families as well."""
    found = picture_model(model_type, tmp_path / "model")
    convert_checkpoint(found, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    compare(found, tmp_path / "store", sizes, tokens)


def compare(source: Path, store: Path, sizes: Sizes, counts: list[int]) -> None:
    """Compares logits of a store with transformers' own, for pictures of these sizes and numbers of tokens."""
    own, black = divergences(source, store, sizes, counts)
    assert float(own.median()) < 0.0005
    assert float(black.mean()) > 0.01


def test_answers_are_transformers_greedy_tokens(source, model):
    """A conversation with a picture is answered by transformers' likeliest tokens, also after its KV was kept."""
    file = a_picture(3)
    answer = model.generate(question(file))
    text = [token if token < FIRST_ID else PICTURE for token in model.encode(question(file))]
    whole, pixels = load_folder_model(model_type_of(source), source), pixels_of(source, [file])
    want = reference(whole, [*text, *answer.tokens], pixels)[len(text) - 1 : -1]
    # Tokens that rounding makes equally likely are a few hundredths apart.
    chosen = want.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert float((want.amax(1) - chosen).max()) < 0.05
    again = model.generate(question(file))
    assert (again.tokens, again.cached_tokens) == (answer.tokens, len(text) - 1)


def test_a_chat_of_a_server_has_the_prompt_of_the_api(model):
    """The prompts that all protocols' chats become have their pictures."""
    made = ChatPrompts(model).make(question(a_picture(4)), {})
    assert made.tokens == model.encode(question(a_picture(4)))
    assert pictures_within(made.tokens)


def test_another_picture_of_equal_size_shares_no_kv(model):
    """A prompt that differs in its picture alone keeps at most the tokens before the picture."""
    one, two = (model.encode(question(a_picture(seed))) for seed in (4, 5))
    first = next(number for number, token in enumerate(one) if token >= FIRST_ID)
    assert len(one) == len(two)
    assert one[:first] == two[:first]
    assert not {*one[first:]} & {token for token in two if token >= FIRST_ID}
    model.generate(question(a_picture(4)))
    assert model.generate(question(a_picture(4))).cached_tokens == len(one) - 1
    assert model.generate(question(a_picture(5))).cached_tokens <= first


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (picture_part(b"no picture"), "PNG, JPEG, WebP or GIF"),
        (picture_part(a_picture(1)[:-900]), "PNG, JPEG, WebP or GIF"),
        (picture_part(a_plain_picture(4100, 4000)), "at most 16000000 pixels, got 4100 x 4000"),
        (picture_part(a_plain_picture(201, 1)), "sides of at most 200 to 1, got 201 x 1"),
        ({"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}, "addresses are not opened"),
        ({"type": "image", "image": "a.png"}, "the text 'a.png': send its bytes, or in Python its path"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "a picture in base64"),
        ({"type": "image", "image": b"x" * 20_000_001}, "at most 20000000 bytes"),
        ({"type": "image", "image": Path("/no/such/file")}, "got no such file"),
        ({"type": "image"}, "as bytes, as a path"),
    ],
    ids=["no picture", "cut", "pixels", "sides", "address", "text", "base64", "bytes", "path", "nothing"],
)
def test_a_picture_that_cannot_be_read_is_refused(model, part, error):
    """Each fault by a sentence, before anything is computed."""
    with pytest.raises(UserError, match=error):
        model.generate([{"role": "user", "content": [part]}])


def test_a_text_with_the_token_of_a_picture_is_refused(model):
    """It would be taken for a place of a picture."""
    message = {"role": "user", "content": [{"type": "text", "text": SPECIAL[1]}, picture_part(a_picture(1))]}
    with pytest.raises(UserError, match="one place for each of 1 pictures, got 2 places"):
        model.generate([message])


def test_ids_of_pictures_alone_are_refused(model):
    """Token ids of a client give no access to the KV of others' pictures."""
    tokens = list(model.encode(question(a_picture(4))))
    with pytest.raises(UserError, match="token ids of 0 or more below 300"):
        model.generate(tokens)
    with pytest.raises(UserError, match="a prompt of text alone"):
        model.generate(question(a_picture(4)), prompt_logprobs=0)


def test_a_store_without_its_tower_says_how_to_add_it(source, store, tmp_path):
    """A conversion with --no-vision leaves it out, and the next one adds it to the finished store."""
    made = tmp_path / "store"
    how = {"max_level": 8, "layout": "auto", "dense_bits": 16}
    before = convert_checkpoint(source, made, no_vision=True, **how)
    found = StoreModel.open(made).with_vision()
    assert VISION_NAME not in before.files
    assert found.shape.vision is None
    with pytest.raises(UserError, match=r"without its vision tower: .*edgemoe convert CHECKPOINT STORE"):
        ModelPictures(found, 0).split(question(a_picture(1)))
    save_dense(made, replace(before, dense_choice=(choice := DenseChoice(0.1, {8: 0.1}, 100))))
    after = convert_checkpoint(source, made, **how)
    assert after == Manifest.load(made) == replace(Manifest.load(store), dense_choice=choice)
    with StoreLock(made, exclusive=False):
        assert convert_checkpoint(source, made, no_vision=True, **how) == after
    with pytest.raises(UserError, match="got --no-vision"):
        ModelPictures(StoreModel.open(made), 0).split(question(a_picture(1)))


class Arriving:
    """Records what a conversion fetches of a download."""

    peak_bytes, contents = 0, dict[str, str]()

    def __init__(self) -> None:
        self.events: list[object] = []

    def release(self, layer: int | None, keep: Collection[str]) -> None:
        self.events.append((layer, {name.split(".")[1] for name in keep}))

    def require(self, layer: int | None) -> None:
        self.events.append(layer)


def test_a_tower_is_added_without_the_rest_of_a_download(source, store, tmp_path):
    """Only its own shards are fetched, once the disk has room for the largest."""
    made = Path(shutil.copytree(store, tmp_path / "store"))
    present = Manifest.load(made)
    files = {name: entry for name, entry in present.files.items() if name != VISION_NAME}
    replace(present, files=files).save(made / MANIFEST_NAME)
    family, arriving = family_of(Checkpoint.open(source).config), Arriving()
    how = {"max_level": 8, "layout": LAYOUTS[present.layout], "dense_bits": 16, "arrivals": arriving}
    add = partial(convert, source, made, family, progress=lambda *bytes: None, vision=("visual",), **how)
    arriving.peak_bytes = 1 << 60
    with pytest.raises(DoesNotFit):
        add()
    arriving.peak_bytes = 0
    assert add().files.keys() == present.files.keys()
    assert arriving.events == [(None, {"visual"}), (None, {"visual"}), None]


def test_a_plan_counts_the_tower(store):
    """Its weights, one picture and all features are a part of the limit; a damaged file is refused by its name."""
    found = StoreModel.open(store)
    plans = [
        each.plan(vram_limit=None, settings=SETTINGS, context=CONTEXT)
        for each in (found, found.with_vision())
    ]
    assert found.vision
    file = (store / VISION_NAME).stat().st_size
    assert 0 < file - found.vision.weights < 8192
    assert plans[0].vision_bytes == 0
    assert plans[1].vision_bytes == found.vision.bytes_for(CONTEXT)
    assert plans[1].minimum_vram_bytes - plans[0].minimum_vram_bytes == plans[1].vision_bytes


def test_a_model_of_text_alone_refuses_pictures(tiny_store):
    """By its name."""
    pictures = ModelPictures(StoreModel.open(tiny_store), 0)
    with pytest.raises(UserError, match="this model takes text alone"):
        pictures.split(question(a_picture(1)))


def test_settings_of_a_checkpoint_do_not_lift_the_bound_of_a_picture(source, tmp_path):
    """A large picture is reduced although the checkpoint's processor leaves pictures as they are."""
    path = shutil.copytree(source, tmp_path / "model") / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_resize": False}))
    whole, vision = read_vision_config(path.parent, FORMS["qwen3_vl_moe"])
    reader = PictureReader(path.parent, FORMS[whole["model_type"]], vision)
    time, height, width = reader.read(a_plain_picture(640, 480)).grid
    assert time * height * width * 16 * 16 <= SIDES["longest_edge"]
