"""The demo model, which comes with edgemoe."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"
"""The checkpoint, trained by tools/training/train_demo.py."""


def demo_by_name(given: Path) -> Path:
    """The demo model for the name `demo`, unless there is such a path."""
    return DEMO if given == Path("demo") and not given.exists() else given
