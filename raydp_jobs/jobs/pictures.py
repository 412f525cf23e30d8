"""Draws the pictures of jobs as PNG files, with matplotlib and without a display.

matplotlib is an optional dependency; a job without a picture never imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_SIZE_PX: Final = (1200, 800)
"""Width and height of a picture in pixels."""

_DPI: Final = 100


def check_picture(path: Path | None) -> None:
    """Check that a picture can be drawn and saved, before the job begins. Does nothing if `path` is None (no picture).

    Raises MissingExtraError if matplotlib is not installed. Raises InvalidArgumentError if the path's suffix is not
    .png, or if its directory does not exist or is not writable.
    """
    if path is None:
        return
    require_extra("pictures", "a picture")
    if path.suffix != ".png":
        raise InvalidArgumentError(f"a picture is a PNG file: name it {path.with_suffix('.png')}, not {path}")
    check_folder(path, "the picture")


def check_folder(path: Path, what: str) -> None:
    """Raise InvalidArgumentError if the directory of a job's result file does not exist or is not writable. `what`: the
    kind of the file, such as "the picture"."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InvalidArgumentError(f"directory {folder} for {what} does not exist; create the directory first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidArgumentError(f"directory {folder} for {what} is not writable; choose another directory")


def save_picture(path: Path, draw: Callable[[Figure], None]) -> None:
    """Create an empty figure of PICTURE_SIZE_PX, let `draw` fill it, and save it. An existing file is replaced only
    after the new picture is complete, so a failure leaves the file unchanged."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = PICTURE_SIZE_PX
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def bars_over_time(
    axes: Any, times: list[datetime], width_s: float, series: dict[str, list[float]], title: str
) -> None:
    """Draw a chart of stacked bars over time: one bar, `width_s` seconds wide, for each element of `times`. `series`:
    by name, one value for each bar."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    below = [0.0] * len(times)
    for name, values in series.items():
        axes.bar(times, values, width=width_s / 86_400, bottom=below, align="edge", label=literal(name))
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_title(title, loc="left", fontsize="medium")
    axes.xaxis_date("UTC")
    locator = AutoDateLocator(tz="UTC")
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz="UTC"))
    axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def literal(text: str) -> str:
    """Escape a text from a topic for a matplotlib label. Without the escapes, "$" would begin a formula, and a leading
    "_" would hide the label."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
