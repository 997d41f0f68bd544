"""The memory that pictures take: upper estimates, from which a plan reserves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_PIXELS = 1 << 20
"""Most pixels of a picture after its reduction. A picture of more pixels is reduced to so many."""

MOST_SOURCE_PIXELS = 16_000_000
"""Most pixels of a picture as it comes."""

_SOURCE_PIXEL = 26
"""Bytes per pixel of a picture as it comes, until the processor has its patches. Measured for 16 megapixels: 282 MB
of a PNG or JPEG, and 407 MB of a WebP with an alpha channel."""

_STATES = 2 * 8 + 4 * 8
"""Bytes per patch and number of a state in one layer: bf16 tensors, and queries and keys that rotate in float32."""

_INNER = 2 * 4
"""Bytes per patch and number within a layer's products."""

_PIXEL = 4 + 4 + 2
"""Bytes per number of a patch: as the processor makes it, as a tensor, and in bf16."""


class VisionSize(NamedTuple):
    """Bytes of a vision tower.

    Attributes:
        weights: bytes of its tensors.
        step: upper estimate of the bytes that one picture takes while it is decoded and computed.
        token: bytes of a picture's features per token, until the prompt has run.
    """

    weights: int
    step: int
    token: int

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the tower and of pictures with so many tokens in all running prompts."""
        return self.weights + self.step + self.token * tokens


def vision_size(vision: Mapping[str, Any], hidden: int, weights: int) -> VisionSize:
    """Computes the bytes of a vision tower.

    Args:
        vision: vision_config, bounded (forms.read_vision_config).
        hidden: size H of the language model's states.
        weights: bytes of the tower's tensors.
    """
    size, patch = vision["hidden_size"], vision["patch_size"]
    patches = MOST_PIXELS // patch**2
    numbers = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 1) * patch**2
    layers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    merged = layers * (size + hidden) * 2
    step = patches * (size * _STATES + vision["intermediate_size"] * _INNER + numbers * _PIXEL + merged)
    return VisionSize(weights, step + MOST_SOURCE_PIXELS * _SOURCE_PIXEL, hidden * 2 * layers)
