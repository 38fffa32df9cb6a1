"""The rotation that spreads a vector over all its elements before it becomes 4-bit codes: y = H D x.

H is the Hadamard matrix of Sylvester, not normalized, and D flips signs, so that x = D H y / d. Outliers of a channel
are spread over all elements, so a code's 15 steps cover a smaller range. H and D are those of vLLM's
`int4_per_token_head`.
"""

from __future__ import annotations

import torch

from cute_kernels.gqa.codes import FLIPPED


def signs(d: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns (d,) of 1 and -1, the diagonal of D."""
    return torch.tensor([-1.0 if FLIPPED >> i & 1 else 1.0 for i in range(d)], dtype=dtype, device=device)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Returns H x over the last axis, whose size is a power of two, in x's dtype: sums of neighbours first."""
    step = 1
    while step < x.shape[-1]:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    return x


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Returns y = H D x over the last axis."""
    return hadamard(x * signs(x.shape[-1], x.dtype, x.device))


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """Returns x = D H y / d over the last axis."""
    return hadamard(y) * (signs(y.shape[-1], y.dtype, y.device) / y.shape[-1])
