"""Writes plots as SVG files whose bytes depend only on what they show."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any


def write(plots: Mapping[str, Callable[[Any], Any]], folder: pathlib.Path) -> list[str]:
    """Writes the plots that exist, and returns their names: none if matplotlib is missing.

    Args:
        plots: by file name, a function that makes a figure with `matplotlib.pyplot`, or None.
        folder: target folder of the files.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    drawn = []
    for name, plot in plots.items():
        # no random ids and no date; text as text, because outlines would be most of the file
        with matplotlib.rc_context({"svg.hashsalt": "cute_kernels", "svg.fonttype": "none"}):
            figure = plot(plt)
            if figure is None:
                continue
            figure.tight_layout()
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / name, format="svg", metadata={"Date": None})
            plt.close(figure)
        drawn.append(name)
    return drawn
