"""Small multimodal models with settings of a processor, and pictures for them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folder_models import folder_model, load_folder_model, save_folder_model
from PIL import Image
from small_tokenizer import SPECIAL
from transformers import Gemma4ImageProcessorPil, Glm4vImageProcessorPil, Qwen2VLImageProcessorPil

from edgemoe.api.pictures import picture_part
from edgemoe.engine.engine import Engine
from edgemoe.kv.pictures import PictureTokens
from edgemoe.kv.step import Segment, Step
from edgemoe.machine.device import Device
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.importance import PromptAttention
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

Sizes = list[tuple[int, int]]
"""Width and height of some pictures."""

SMALL: Sizes = [(90, 70), (40, 100)]

LONG = 128
"""Tokens of a context for pictures of more tokens."""

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


def opened(store: Path, parallel: int = 1, context: int = CONTEXT, device: Device | None = None) -> Engine:
    """An engine of the store for so many requests at once, with its vision tower."""
    found = StoreModel.open(store, device).with_vision()
    plan = found.plan(vram_limit=None, settings=SETTINGS, context=context, parallel=parallel)
    return Engine(found, plan, SETTINGS)


def pictures_of(engine: Engine) -> Pictures:
    """The pictures of an engine's prompts."""
    form = form_of(engine.store.config)
    assert form
    return Pictures(engine.store.directory, engine.store.manifest, form, engine.device, 0)


def question(*files: bytes) -> list[dict[str, object]]:
    """A message with pictures between two texts."""
    parts = [
        {"type": "text", "text": "the quick "},
        *map(picture_part, files),
        {"type": "text", "text": " fox"},
    ]
    return [{"role": "user", "content": parts}]


def kl(want: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Divergence of each row of softmax(logits) from softmax(want), nats."""
    p, q = want.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def divergences(
    source: Path, store: Path, sizes: Sizes, counts: list[int], device: Device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two pictures in a row, whose steps divide one of them where they may, then new tokens.

    Args:
        source, store: a checkpoint and its store.
        sizes, counts: the sizes of two pictures, and their numbers of tokens.
        device: the device that computes; None: the CPU.

    Returns:
        KL of each row from transformers' logits in bf16: of the store's logits, and of transformers' own for black
        pictures.
    """
    files, new = [a_picture(seed, *size) for seed, size in enumerate(sizes)], [11, 12, 13, 14]
    # As the published chat templates write two pictures in a row.
    text = [5, 6, 7, BEGIN, PICTURE, END, BEGIN, PICTURE, END, 8, 9]
    with opened(store, context=LONG, device=device) as engine:
        pictures = pictures_of(engine)
        read = [pictures.read(file) for file in files]
        assert [each.tokens for each in read] == counts
        # Gemma 4's template writes no tokens around a picture.
        bare = model_type_of(source) == "gemma4"
        tokens = pictures.placed([each for each in text if not (bare and each in (BEGIN, END))], read)
        tokens.pictures.prepare(range(len(tokens)))
        got = _rows_of(engine, tokens, new)
    plain = [*text[:4], *[PICTURE] * counts[0], *text[5:7], *[PICTURE] * counts[1], *text[8:], *new]
    whole, pixels = load_folder_model(model_type_of(source), source), pixels_of(source, files)
    want = reference(whole, plain, pixels)
    black = {**pixels, "pixel_values": torch.zeros_like(pixels["pixel_values"])}
    return kl(want, got), kl(want, reference(whole, plain, black))


def _rows_of(engine: Engine, tokens: PictureTokens, new: list[int]) -> torch.Tensor:
    """Logits of a prompt in two steps, and of new tokens, float32 [tokens, vocabulary]."""
    cut = tokens.pictures.whole(range(7)).stop
    assert cut == (4 if tokens.pictures.both_ways else 7)
    sequence, prompt = engine.sequences.new(), PromptAttention()
    rows = [
        engine.step(
            Step((Segment(sequence, tuple(part), prompt, pictures=tokens.pictures),)), all_rows=True
        ).clone()
        for part in (tokens[:cut], tokens[cut:])
    ]
    rows += [
        engine.step(Step((Segment(sequence, (token,), pictures=tokens.pictures),))).clone() for token in new
    ]
    return torch.cat(rows)
