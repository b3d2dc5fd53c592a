"""What is checked before a picture is computed: the options `--plot` of several subcommands."""

from __future__ import annotations

from pathlib import Path

from autopack.errors import AutopackError


class PictureImpossible(AutopackError):
    """The picture could not be drawn or written."""


def check_drawable(path: Path) -> None:
    """Raise `PictureImpossible` if a picture could not be written to the path."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise PictureImpossible(
            f"--plot needs matplotlib, which could not be imported ({error}); "
            "install it with: pip install 'autopack[plot]'"
        ) from error
    if not path.parent.is_dir():
        raise PictureImpossible(f"--plot {path}: there is no directory {path.parent}; create it or name another one")
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise PictureImpossible(f"--plot {path}: wanted a file name that ends with one of {', '.join(formats)}")
