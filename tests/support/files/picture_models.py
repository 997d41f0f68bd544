"""Small multimodal models with settings of a processor, and pictures for them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folder_models import folder_model, save_folder_model
from PIL import Image
from small_tokenizer import SPECIAL
from transformers import Gemma4ImageProcessorPil, Glm4vImageProcessorPil, Qwen2VLImageProcessorPil

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
    tokens |= {"video_token_id": VIDEO, "boi_token_id": BEGIN, "eoi_token_id": END}
    for name, token in tokens.items():
        setattr(model.config, name, token)
    if model_type == "gemma4":
        model.config.text_config.use_bidirectional_attention = "vision"
    save_folder_model(model, directory)
    _processors()[model_type].save_pretrained(directory)
    return directory


def _processors() -> dict[str, Any]:
    """Processors of the small models' pictures, by model_type."""
    merged = {"merge_size": 2, "temporal_patch_size": 2}
    twice = {name: 2 * pixels for name, pixels in SIDES.items()}  # a pixel counts for each of two frames
    qwen = Qwen2VLImageProcessorPil(patch_size=16, size=SIDES, **merged)
    return {
        "qwen3_vl_moe": qwen,
        "qwen3_5_moe": qwen,
        "glm4v_moe": Glm4vImageProcessorPil(patch_size=14, size=twice, **merged),
        "gemma4": Gemma4ImageProcessorPil(max_soft_tokens=70),
    }


def pixels_of(directory: Path, files: list[bytes]) -> dict[str, Any]:
    """Makes pixels of pictures by transformers' own processor."""
    pictures = [Image.open(BytesIO(file)).convert("RGB") for file in files]
    processor = type(_processors()[model_type_of(directory)]).from_pretrained(directory)
    made = dict(processor(images=pictures, return_tensors="pt"))
    made.pop("num_soft_tokens_per_image", None)
    return made


def model_type_of(directory: Path) -> str:
    """The model_type of a checkpoint."""
    return str(json.loads((directory / "config.json").read_text())["model_type"])


def reference(model: Any, tokens: list[int], pixels: dict[str, Any]) -> torch.Tensor:
    """transformers' logits of all tokens, float32 [tokens, vocabulary]."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        found = model(input_ids=ids, mm_token_type_ids=(ids == PICTURE).int(), **pixels)
    return found.logits[0].float()


def opened(store: Path, parallel: int = 1, context: int = CONTEXT) -> Engine:
    """An engine of the store for so many requests at once, with its vision tower."""
    found = StoreModel.open(store).with_vision()
    plan = found.plan(vram_limit=None, settings=SETTINGS, context=context, parallel=parallel)
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
