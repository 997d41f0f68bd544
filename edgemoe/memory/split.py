"""How many blocks of each kind the fastest tier has: the KV takes some of its bytes, and returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from edgemoe.cache.policies import is_pooled
from edgemoe.errors import UserError
from edgemoe.memory.block_counts import count_blocks, count_hot_blocks, fraction_at
from edgemoe.memory.model_shape import ModelShape
from edgemoe.policy.damage import Damage
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.settings import RunSettings, format_levels
from edgemoe.storage.base import BlockKind, ResidentForm

MINIMUM_EXPERTS = 2
"""Fewest experts that the fastest tier must have blocks for: one is computed while another arrives."""


@dataclass(frozen=True)
class BlockSplit:
    """How many blocks of each kind the fastest tier has in so many bytes.

    Args:
        fractions: kind -> blocks per block of the first kind, lowest kind first.
        experts: most blocks of a kind.
        hot: the lower level, and most experts at the higher one, where precision follows hotness; None: it does not.
    """

    fractions: Mapping[BlockKind, float]
    experts: int
    hot: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, shape: ModelShape, form: ResidentForm, settings: RunSettings, damage: Damage | None = None
    ) -> BlockSplit:
        """The split of a model under settings.

        Args:
            shape, form, settings: properties of the model.
            damage: the damage of its experts; None: it is not known yet.

        Raises:
            UserError: levels of precision by hotness take the same blocks.
        """
        experts = shape.experts_per_layer
        layers = max(shape.experts // experts, 1)
        fraction = partial(
            fraction_at, settings, layers=layers, experts=experts, top_k=shape.top_k, damage=damage
        )
        kinds = form.kinds_at(settings.levels[0])
        if settings.hotness:
            require_sizes(form, settings.levels)
        pooled = is_pooled(settings.eviction)  # kinds share the bytes of experts that are whole
        fractions = {
            kind: shape.share(kind.level) * (1.0 if pooled else fraction(kind.level)) for kind in kinds
        }
        most = shape.experts if settings.cache else max(shape.top_k, MINIMUM_EXPERTS)
        hot = (settings.levels[-1], most_hot(settings.hotness, shape)) if settings.hotness else None
        return cls(fractions, most, hot)

    def blocks(self, size: int) -> dict[str, int]:
        """Block kind's name -> blocks, together at most `size` bytes, which hold MINIMUM_EXPERTS."""
        if self.hot:
            split = count_hot_blocks(size, list(self.fractions), self.hot[0], self.experts, self.hot[1])
            if split:
                return split
        return count_blocks(size, self.fractions, self.experts, MINIMUM_EXPERTS)

    def bytes_of(self, blocks: Mapping[str, int]) -> int:
        """Bytes of so many blocks of each kind."""
        return sum(kind.size * blocks.get(kind.name, 0) for kind in self.fractions)


def least_bytes(shape: ModelShape, form: ResidentForm, settings: RunSettings, *, device: bool) -> int:
    """Fewest bytes of experts in the fastest tier.

    On a device precision by hotness needs every expert at the lower level, so that no token waits for one, and one
    expert per layer at the higher level, unless none may be hot.
    """
    high, low = (form.bytes_at(settings.levels[i]) for i in (0, -1))
    least = MINIMUM_EXPERTS * high
    if not (device and settings.hotness):
        return least
    hot = min(most_hot(settings.hotness, shape), shape.experts // shape.experts_per_layer)
    return max(least, shape.experts * low + hot * (high - low))


def require_every(
    shape: ModelShape, form: ResidentForm, settings: RunSettings, blocks: Mapping[str, int]
) -> None:
    """Refuses precision by hotness on a device whose tier has no room for all experts at the lower level.

    Args:
        shape, form, settings: properties of the model.
        blocks: block kind's name -> blocks of the tier.

    Raises:
        UserError: the memory was divided for other levels.
    """
    low = settings.levels[-1]
    room = min(blocks.get(kind.name, 0) for kind in form.kinds_at(low))
    if room < shape.experts:
        raise UserError(
            f"room for all {shape.experts} experts at {low} bits, for --policy hotness on a GPU",
            f"room for {room}",
            "start again with --policy hotness",
        )


def most_hot(hotness: Hotness, shape: ModelShape) -> int:
    """Experts of a model that a setting lets be hot at once."""
    each = shape.experts_per_layer if hotness.experts is None else hotness.experts
    return min(each * (shape.experts // shape.experts_per_layer), shape.experts)


def require_sizes(form: ResidentForm, levels: tuple[int, ...]) -> None:
    """Refuses levels of precision by hotness between which a kernel's experts have the same size.

    Raises:
        UserError: the highest level of `levels` takes the blocks of the lowest.
    """
    if all(kind.level <= levels[-1] for kind in form.kinds_at(levels[0])):
        found = f"levels {format_levels(levels)}, which take the same blocks with this kernel"
        raise UserError("levels of different size, for --policy hotness", found, "give --levels 8/4")
