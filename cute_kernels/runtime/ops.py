"""Registration of operators with torch, so that they trace under torch.compile without a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "cute_kernels"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Registers `torch.ops.cute_kernels.<name>` for CPU and CUDA tensors and returns what callers use.

    The returned function takes the operator's arguments. It calls the implementation itself in eager mode, which saves
    the 7 us of torch's dispatcher, and the operator while torch.compile or torch.export traces.

    Args:
        name: the operator's name, without namespace.
        schema: argument and return types, such as "(Tensor q, Tensor(a!) out, float scale) -> ()". Tensors that are
            written carry an alias mark, else torch.compile drops or reorders the call. An output must not be an input.
        implementation: runs it. Called with real tensors.
        fake: the same signature; returns empty tensors of the right shape and dtype, or None for "-> ()".
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args, **kwargs)
        return implementation(*args, **kwargs)

    return call
