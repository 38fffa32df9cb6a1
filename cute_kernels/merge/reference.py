"""The oracle of `merge_states`, in plain torch."""

from __future__ import annotations

import torch


def merge_states_reference(
    outs: torch.Tensor, lses: torch.Tensor, s_aux: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention states; this defines `cute_kernels.merge_states`.

    Args:
        outs: (n, ..., d) floating point.
        lses: (n, ...) natural logarithms; -inf or +inf marks an empty state.
        s_aux: (heads,), where heads is the last of the dimensions "..."; joins the denominator once.
        dtype: dtype of the computation and of the results.

    Returns:
        out (..., d) and lse (...), which leaves `s_aux` out.
    """
    lses = torch.where(lses == torch.inf, -torch.inf, lses.to(dtype))  # FlashMLA marks a query without keys by +inf
    lse = torch.logsumexp(lses, dim=0)
    denominator = lse if s_aux is None else torch.logaddexp(lse, s_aux.to(dtype).expand_as(lse))
    # -inf minus an all-empty row's -inf is NaN
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - denominator)).unsqueeze(-1)
    # 0 x NaN is NaN: the output of an empty state must not be multiplied
    values = torch.where(weights == 0, 0.0, outs.to(dtype))
    return (weights * values).sum(dim=0), lse
