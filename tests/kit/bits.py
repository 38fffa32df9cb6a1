"""Comparison of results bit by bit, including the bits of NaNs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def require_same_bits(got: Any, expected: Any) -> None:
    """Raises AssertionError unless two tensors, or two sequences of tensors and None, have the same bits."""
    if isinstance(got, torch.Tensor):
        got, expected = [got], [expected]
    for place, (ours, want) in enumerate(zip(got, expected, strict=True)):
        assert (ours is None) == (want is None)
        assert ours is None or same_bits(ours, want), f"result {place} has other bits"


def require_same_bits_each_time(case: Any, call: Callable[..., Any], runs: int = 20) -> None:
    """Raises AssertionError unless `call(out=, lse=)` writes the same bits over the poisoned outputs of a case."""
    out, lse = case.outputs(padded=True)
    first = None
    for _ in range(runs):
        out.poison()
        lse.poison()
        call(out=out.tensor, lse=lse.tensor)
        results = (out.tensor.clone(), lse.tensor.clone())
        first = first or results
        require_same_bits(results, first)
