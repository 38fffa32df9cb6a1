"""A layout that does not ship. It shows that one `CacheLayout` adds a plain layout to reference, append and kernels."""

from typing import Final

from cute_kernels.gqa.layouts import CacheLayout

SBNH: Final = CacheLayout("SBNH", "sbhd", "sbhd")
"""Axes: tokens, batch, heads, d. Tests add this layout to `LAYOUTS` and to nothing else."""
