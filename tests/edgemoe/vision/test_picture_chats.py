"""Chats with pictures: refused ones, and prompts of other requests while a picture is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from picture_models import PICTURE, a_picture, question

from edgemoe.api.pictures import picture_part
from edgemoe.chat import transcript
from edgemoe.chat.conversation import Conversation
from edgemoe.chat.session import Chat, Printing
from edgemoe.errors import ContextExceeded, UserError
from edgemoe.storage.store.dense import VISION_NAME
from edgemoe.storage.store.manifest import Manifest
from edgemoe.vision.forms import FORMS, read_vision_config
from edgemoe.vision.reader import PictureReader
from edgemoe.vision.tower import Tower

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_turn_of_a_chat_takes_a_picture_along(model, tmp_path):
    """The picture goes with one turn, is saved and loaded with it, and leaves the next turn alone."""
    conversation = Conversation(model)
    assert conversation.attach(a_picture(4)) == 1
    with pytest.raises(UserError, match="PNG, JPEG, WebP or GIF"):
        conversation.attach(b"no picture")
    answer = conversation.ask("the fox", lambda piece: None)
    prompt = [{"role": "user", "content": [picture_part(a_picture(4)), {"type": "text", "text": "the fox"}]}]
    assert answer.prompt_tokens == len(model.encode(prompt))
    transcript.save(tmp_path / "saved.json", conversation.messages)
    again = Conversation(model)
    again.restore(transcript.load(tmp_path / "saved.json"))
    assert again.messages == conversation.messages
    conversation.clear()
    assert conversation.ask("the fox", lambda piece: None).prompt_tokens == len(model.encode("the fox"))


def test_pictures_that_a_context_does_not_hold_leave_a_chat_usable(model, monkeypatch):
    """They are refused when they are attached, and a turn that is refused drops its pictures."""
    conversation = Conversation(model)
    for number in range(5):
        assert conversation.attach(a_picture(4, 128, 96)) == number + 1
    with pytest.raises(ContextExceeded, match=r"fewer than 64 tokens in one turn, .* got 72"):
        conversation.attach(a_picture(4, 128, 96))
    conversation.clear()
    conversation.attach(a_picture(4))
    with pytest.raises(ContextExceeded):
        conversation.ask("the fox " * 20, lambda piece: None)
    assert conversation.attach(a_picture(4)) == 1
    conversation.restore([])
    monkeypatch.setattr("edgemoe.api.pictures.MOST_PICTURES", 0)
    with pytest.raises(UserError, match="at most 0 pictures in a prompt"):
        conversation.attach(a_picture(4))
    assert conversation.ask("the fox", lambda piece: None).prompt_tokens == len(model.encode("the fox"))


def test_a_later_turn_decodes_no_picture_again(model, monkeypatch):
    """The second of two pictures that do not fit together is not decoded at all."""
    files, decoded = [a_picture(6, 128, 128), a_picture(7, 128, 128)], []
    own = PictureReader.pixels
    monkeypatch.setattr(PictureReader, "pixels", lambda self, data: decoded.append(data) or own(self, data))
    pictures = model.prompts.pictures
    for _ in range(2):
        with pytest.raises(ContextExceeded, match="fewer than 16 tokens in a prompt"):
            pictures.split(question(*files), 16)
    _, read = pictures.split(question(*files), 64)
    assert decoded == files
    assert [one.tokens for one in read] == [16, 16]


def test_a_chat_says_that_a_refused_turn_drops_its_pictures(model, capsys):
    """Otherwise the same question would be answered without them."""
    conversation = Conversation(model)
    chat = Chat(model.engine, conversation, Printing())
    conversation.attach(a_picture(4))
    for _ in range(2):
        with pytest.raises(ContextExceeded):
            chat.ask("the fox " * 30)
    assert capsys.readouterr().err.count("its pictures are dropped") == 1


def test_other_prompts_are_made_while_a_picture_is_computed(store, monkeypatch):
    """The positions of a prompt need nothing that the tower's run holds."""
    manifest, form = Manifest.load(store), FORMS["qwen3_vl_moe"]
    tower = Tower(store, manifest.files[VISION_NAME], form, read_vision_config(store, form)[0], None)

    def run(**inputs: object) -> SimpleNamespace:
        with ThreadPoolExecutor(1) as others:
            found = others.submit(tower.positions, [5, PICTURE, PICTURE], PICTURE, [(1, 2, 4)]).result(2)
        return SimpleNamespace(pooler_output=[found.float()])

    monkeypatch.setattr(tower._model, "get_image_features", run)
    pixels = dict.fromkeys(form.inputs, torch.zeros(1))
    assert tower.features(pixels).rows.shape == (3, 3)
