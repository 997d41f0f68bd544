"""Small multimodal models with settings of a processor, and pictures for them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folder_models import folder_model, save_folder_model
from PIL import Image
from small_tokenizer import SPECIAL
from transformers import Qwen2VLImageProcessorPil

from edgemoe.api.pictures import picture_part
from edgemoe.engine.engine import Engine
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.vision.forms import form_of
from edgemoe.vision.prompt import Pictures

PICTURE, BEGIN, END, VIDEO = 1, 291, 292, 293
"""Token ids for a picture's tokens (a special one of the tokenizer), before and after them, and for a video's."""

SIDES = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
"""Fewest and most pixels of a picture."""


SETTINGS = RunSettings(levels=(8,), exact=True)
CONTEXT = 64

GREEDY: dict[str, Any] = {"top_p": None, "seed": 0, "max_new_tokens": 4}

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}"
    + SPECIAL[1]
    + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Writes a special token at the place of a picture."""


def a_picture(seed: int, width: int = 90, height: int = 70) -> bytes:
    """A file with a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := BytesIO(), "PNG")
    return file.getvalue()


def a_plain_picture(width: int, height: int) -> bytes:
    """A small file with a picture of one colour."""
    Image.new("1", (width, height)).save(file := BytesIO(), "PNG")
    return file.getvalue()


def picture_model(model_type: str, directory: Path) -> Path:
    """Saves a small random model that takes pictures, with a tokenizer and the settings of a processor."""
    model = folder_model(model_type)
    tokens = {"image_token_id": PICTURE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    for name, token in (tokens | {"video_token_id": VIDEO}).items():
        setattr(model.config, name, token)
    save_folder_model(model, directory)
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**sizes, size=SIDES).save_pretrained(directory)
    return directory


def pixels_of(directory: Path, files: list[bytes]) -> dict[str, Any]:
    """Makes pixels of pictures by transformers' own processor."""
    pictures = [Image.open(BytesIO(file)).convert("RGB") for file in files]
    return dict(Qwen2VLImageProcessorPil.from_pretrained(directory)(images=pictures, return_tensors="pt"))


def reference(model: Any, tokens: list[int], pixels: dict[str, Any]) -> torch.Tensor:
    """transformers' logits of all tokens, float32 [tokens, vocabulary]."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        found = model(input_ids=ids, mm_token_type_ids=(ids == PICTURE).int(), **pixels)
    return found.logits[0].float()


def opened(store: Path, parallel: int = 1) -> Engine:
    """An engine of the store for so many requests at once, with its vision tower."""
    found = StoreModel.open(store).with_vision()
    plan = found.plan(vram_limit=None, settings=SETTINGS, context=CONTEXT, parallel=parallel)
    return Engine(found, plan, SETTINGS)


def pictures_of(engine: Engine) -> Pictures:
    """The pictures of an engine's prompts."""
    form = form_of(engine.store.config)
    assert form
    return Pictures(engine.store.directory, engine.store.manifest, form, None, 0)


def question(*files: bytes) -> list[dict[str, object]]:
    """A message with pictures between two texts."""
    parts = [
        {"type": "text", "text": "the quick "},
        *map(picture_part, files),
        {"type": "text", "text": " fox"},
    ]
    return [{"role": "user", "content": parts}]
