"""Launches of every call of `mla_fp8_decode` but those over one cache of V3.2."""

from __future__ import annotations

import torch

from cute_kernels.mla.checks import Request, formats_of


def launch_latent(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches for the arguments of a call, or raises before any launch.

    Args:
        request: unchecked. Errors for wrong arguments may be of any kind: `launch_or_explain` replaces them.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16 and lse (batch, s_q, h_q) float32.
    """
    names = " and ".join(token_format.name for token_format in formats_of(request) if token_format is not None)
    raise NotImplementedError(f"cache_format: got {names}; needs v3.2 on a GPU, or CPU tensors")
