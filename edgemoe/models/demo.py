"""The demo model, which comes with edgemoe."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"
"""The checkpoint, trained by tools/training/train_demo.py."""


def demo_by_name(path: Path) -> Path:
    """The demo model for the name `demo`, unless there is such a path."""
    return DEMO if path == Path("demo") and not path.exists() else path
