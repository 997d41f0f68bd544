"""Where results will be written, looked at before the minutes that measuring them takes."""

from __future__ import annotations

from pathlib import Path

from storage.errors import UserError


def require_folders(*files: Path | None) -> None:
    """Raises UserError for the first of these files, where one was asked for, that has no folder to lie in."""
    for file in files:
        if file and not file.absolute().parent.is_dir():
            raise UserError(
                f"a file {file} was wanted", f"there is no folder {file.parent}", "Make it, or name another"
            )
        if file and file.is_dir():
            raise UserError(f"a file {file} was wanted", "a folder is there", "Name a file in it")


def require_plot(file: Path | None) -> None:
    """The same for an image, if one was asked for, which also needs matplotlib and an ending that it knows.

    Raises:
        UserError: it could not be drawn.
    """
    if file is None:
        return
    require_folders(file)
    try:
        from matplotlib import backend_bases
    except ImportError as error:
        raise UserError(
            f"a plot {file} was wanted",
            "matplotlib is not installed",
            "Install it: pip install 'edgemoe[plot]'",
        ) from error
    known = sorted(backend_bases.FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in known:
        raise UserError(
            f"a plot {file} was wanted",
            f"its name ends in none of {', '.join(known)}",
            "Give it such an ending, as in .png",
        )
