"""Calls of `sink_attention` with gradients, and a hook for the tensors that its kernels write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import sink_attention
from cute_kernels.sink import op
from tests.kit.sink_cases import SinkCase


def leaves(case: SinkCase) -> dict[str, Any]:
    """The tensors of a call that have gradients."""
    given = {"q": case.q, "k": case.k, "v": case.v, "s_aux": case.s_aux}
    return {name: None if t is None else t.detach().requires_grad_() for name, t in given.items()}


def run(case: SinkCase, deterministic: bool = False) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns out, lse and the gradients of q, k, v and s_aux."""
    tensors = leaves(case)
    result = sink_attention(**{**case.arguments(), **tensors}, deterministic=deterministic, return_lse=True)
    out, lse = result
    wanted = [t for t in tensors.values() if t is not None]
    gradients = torch.autograd.grad(out, wanted, case.d_out)
    return out.detach(), lse, (*gradients, *([None] * (4 - len(wanted))))


def change_results(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Makes kernels write to `change(t)` for every result t that is allocated for them."""
    for name in ("_fake_forward", "_fake_backward"):
        allocate: Callable[..., Any] = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *a, allocate=allocate: tuple(change(t) for t in allocate(*a)))
