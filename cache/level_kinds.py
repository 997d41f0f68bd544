"""Tables of the kinds of blocks that each level of a form consists of: a tier looks them up for every expert."""

from __future__ import annotations

from edgemoe.storage.base import LEVELS, ResidentForm


class LevelKinds:
    """The kinds of a form, by level.

    Args:
        form: the form of a tier's experts.

    Attributes:
        names: level -> names of the kinds that an expert at this level has, lowest kind first.
        below: (level, kind) -> the highest level below it that needs neither the kind nor a kind above it; 0: none.
        rewritten: (level before, level after) -> names of the kinds that a promotion needs a new block of.
    """

    def __init__(self, form: ResidentForm) -> None:
        names = {level: tuple(kind.name for kind in form.kinds_at(level)) for level in LEVELS}
        self.names = names
        self.below = {
            (level, kind): next(
                low
                for low in LEVELS
                if low < level and kind not in names[low] and form.demoted(level, low) == low
            )
            for level in LEVELS
            for kind in names[level]
        }
        self.rewritten = {
            (before, level): form.rewritten(before, level)
            for level in LEVELS
            for before in LEVELS
            if before < level
        }
