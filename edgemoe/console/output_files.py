"""Checks that result files can be written, before a measurement of minutes begins."""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.machine.packages import install_extra


def require_folders(*files: Path | None) -> None:
    """Raises UserError for the first file that has no folder, or is one. None stands for no file."""
    for file in files:
        if file and not file.absolute().parent.is_dir():
            raise UserError(f"a folder for {file}", f"no folder {file.parent}", "create it, or name another")
        if file and file.is_dir():
            raise UserError(f"a file at {file}", "a folder", "name a file in it")


def require_plot(file: Path | None) -> None:
    """Checks that an image file can be drawn: its folder, matplotlib, and a known suffix. None stands for no file.

    Raises:
        UserError: one of them is missing.
    """
    if file is None:
        return
    require_folders(file)
    try:
        from matplotlib import backend_bases
    except ImportError as error:
        wanted = f"matplotlib, to draw {file}"
        raise UserError(wanted, "no such package", f"run {install_extra('plot')}") from error
    known = sorted(backend_bases.FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in known:
        raise UserError(f"an image file ({', '.join(known)})", str(file), "give it such a suffix, as in .png")
