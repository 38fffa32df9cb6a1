"""Registration of operators with torch: they trace under torch.compile without a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_kernels.runtime.checks import refuse_transformed

NAMESPACE = __name__.partition(".")[0]
"""The package's name: cute_kernels, or what a loader of kernels has called a copy of it."""
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Registers `torch.ops.cute_kernels.<name>` for CPU and CUDA tensors and returns the function that callers use.

    That function takes the operator's arguments, all by position if the operator is differentiable. In eager mode it
    calls the implementation directly, which saves the 7 us of torch's dispatcher. It calls the operator while something
    traces (see `is_traced`), and where autograd must record the call.

    Args:
        name: the operator's name, without namespace.
        schema: argument and return types, such as "(Tensor q, Tensor(a!) out, float scale) -> ()". A tensor that is
            written needs an alias mark, else torch.compile drops or reorders the call. An output must not be an input.
        implementation: the operator itself, called with real tensors.
        fake: has the same signature; returns empty tensors of the right shape and dtype, or None for "-> ()".
        backward: backward(ctx, *gradients of the results) returns a gradient, or None, for each argument. It is traced
            too, so it calls operators (`torch.ops`), never an implementation. Not for operators that write to tensors.
        setup_context: setup_context(ctx, inputs, output) saves what `backward` needs.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if backward is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)

    names = [argument.name for argument in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:  # of what is traced the operator would lose derivatives
            refuse_transformed((*names[: len(args)], *kwargs), (*args, *kwargs.values()))
        if is_traced() or (backward is not None and needs_grad(*args)):
            return op(*args, **kwargs)
        return implementation(*args, **kwargs)

    return call


def is_traced() -> bool:
    """Whether calls must go through torch's dispatcher.

    torch.compile and torch.export record them; a dispatch mode, such as FakeTensorMode, computes shapes without memory
    or counts. It takes 0.2 us.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def needs_grad(*args: Any) -> bool:
    """Whether autograd would record an operation on these arguments."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args)
