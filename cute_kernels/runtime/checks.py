"""Argument checks that name the argument, what it got and what it needs.

They run before the first launch of a kind and after a refused one (runtime/launch.py), and in every call on a CPU. A
message is formatted only when a check fails: a passing `check_tensor` with every condition takes 1 us (0.9 to 1.4 us, 4
dimensions, on a busy 2-core CPU machine).
"""

from __future__ import annotations

from typing import NoReturn

import torch


def fail(name: str, got: object, needs: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raises `error` with a message in the form of all argument errors."""
    raise error(f"{name}: got {got}; needs {needs}")


def require(condition: bool, name: str, got: object, needs: object, error: type[Exception] = ValueError) -> None:
    """Raises `error` unless `condition` holds. `got` and `needs` are formatted only then."""
    if not condition:
        fail(name, got, needs, error)


def refuse_gradients(op: str, names: tuple[str, ...], *tensors: object) -> None:
    """Raises ValueError for the first of `tensors`, named by `names`, that requires gradients.

    For operators without a backward, whose results would silently be detached. Callers test `torch.is_grad_enabled()`
    first, which takes 0.04 us: serving code runs without gradients and pays no more. This function takes 0.1 us a
    tensor; keyword arguments would double that.
    """
    for i, t in enumerate(tensors):
        if t is not None and getattr(t, "requires_grad", False):
            needs = f"one that does not, or torch.no_grad(): {op} has no backward"
            fail(names[i], "a tensor that requires gradients", needs)


def check_tensor(
    name: str,
    t: object,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    ndim: int | None = None,
    shape: tuple[int | None, ...] | None = None,
    device: torch.device | None = None,
    align: int | None = None,
    unit_last_stride: bool = False,
) -> None:
    """Checks one tensor argument. Conditions that are None or False are not checked.

    Args:
        name: the argument, as the caller spells it.
        t: the value that was passed.
        dtype: the dtype, or a tuple of those that are accepted.
        ndim: number of dimensions.
        shape: sizes; None means any.
        device: the device that it must be on.
        align: bytes. The address and every stride but the last are multiples of it, so that each row starts aligned.
            Strides of dimensions of size 1 are never used and not checked.
        unit_last_stride: rows are contiguous.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: anything else.
    """
    if not isinstance(t, torch.Tensor):
        fail(name, f"{type(t).__name__}", "a torch.Tensor", TypeError)
    if dtype is not None and t.dtype is not dtype and not (isinstance(dtype, tuple) and t.dtype in dtype):
        fail(name, f"dtype {t.dtype}", _either(dtype), TypeError)
    if ndim is not None and t.dim() != ndim:
        fail(name, f"{t.dim()} dimensions, shape {tuple(t.shape)}", f"{ndim} dimensions")
    if shape is not None:
        got = t.shape
        if len(got) != len(shape):
            _fail_shape(name, got, shape)
        for size, needed in zip(got, shape):  # noqa: B905  strict=True takes 0.1 us
            if size != needed and needed is not None:
                _fail_shape(name, got, shape)
    if device is not None and t.device != device:
        fail(name, f"a tensor on {t.device}", f"one on {device}, like the other arguments")
    if unit_last_stride or align is not None:
        stride = t.stride()
        if unit_last_stride and stride and stride[-1] != 1 and t.shape[-1] > 1:
            fail(name, f"last stride {stride[-1]}", "1: contiguous rows")
        if align is not None:
            if t.data_ptr() % align:
                fail(
                    name,
                    f"an address {t.data_ptr() % align} bytes beyond a multiple of {align}",
                    f"{align}-byte alignment",
                )
            itemsize = t.element_size()
            for dim in range(len(stride) - 1):
                if stride[dim] * itemsize % align and t.shape[dim] > 1:
                    fail(name, f"stride({dim}) of {stride[dim] * itemsize} bytes", f"{align}-byte aligned rows")


def _either(dtype: torch.dtype | tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d) for d in dtype) if isinstance(dtype, tuple) else str(dtype)


def _fail_shape(name: str, got: torch.Size, needs: tuple[int | None, ...]) -> NoReturn:
    fail(name, f"shape {tuple(got)}", f"({', '.join('any' if n is None else str(n) for n in needs)})")
