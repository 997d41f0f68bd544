"""The demo model, which comes with edgemoe."""

from __future__ import annotations

from pathlib import Path

DEMO = (Path(__file__).parents[1] / "demo" / "config.json").resolve().parent
"""The checkpoint, trained by tools/training/train_demo.py: the folder of its files, as an installer may link each."""


def demo_by_name(path: Path) -> Path:
    """The demo model for the name `demo`, unless there is such a path."""
    return DEMO if path == Path("demo") and not path.exists() else path
