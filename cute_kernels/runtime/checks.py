"""Argument checks that name the argument, what it got and what it needs.

They run before the first launch of a kind, after a refused launch (runtime/launch.py), and in every call on a CPU. A
message is formatted only when a check fails: a passing `check_tensor` with every condition takes 1 us (0.9 to 1.4 us, 4
dimensions, on a busy 2-core CPU machine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

_LARGEST = torch.finfo(torch.float32).max


def fail(name: str, got: object, needs: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raises `error` with a message in the form of all argument errors."""
    raise error(f"{name}: got {got}; needs {needs}")


def require(condition: bool, name: str, got: object, needs: object, error: type[Exception] = ValueError) -> None:
    """Raises `error` unless `condition` holds. `got` and `needs` are formatted only then."""
    if not condition:
        fail(name, got, needs, error)


def refuse_gradients(op: str, tensors: Mapping[str, object]) -> None:
    """Raises ValueError for the first of the named tensors that requires gradients.

    It serves operators without a backward, whose results would silently be detached. Callers test
    `torch.is_grad_enabled()` first.
    """
    for name, t in tensors.items():
        if t is not None and getattr(t, "requires_grad", False):
            needs = f"one that does not, or torch.no_grad(): {op} has no backward"
            fail(name, "a tensor that requires gradients", needs)


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a transform of torch.func are under way in this thread; 0.1 us."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def refuse_transformed(names: Iterable[str], tensors: Iterable[object]) -> None:
    """Raises for the first of `tensors` that has a forward-mode derivative or belongs to a transform of torch.func."""
    for name, t in zip(names, tensors, strict=False):
        if isinstance(t, torch.Tensor):
            _refuse_transformed(name, t)


def _refuse_transformed(name: str, t: torch.Tensor) -> None:
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        fail(name, "a tensor with a forward-mode derivative", "one without: there are no forward-mode derivatives here")
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        needs = "a plain tensor: batches are a dimension of it, and gradients torch.autograd's"
        fail(name, "a tensor inside a transform of torch.func, such as vmap or grad", needs)


def check_plain(name: str, t: torch.Tensor) -> None:
    """Raises unless the tensor is dense memory alone: no derivative, no batch of a transform, no conj or neg bit."""
    if t.is_nested or t.layout is not torch.strided:
        fail(name, "a nested tensor" if t.is_nested else f"layout {t.layout}", "a plain dense tensor", TypeError)
    if torch.compiler.is_compiling():
        return  # under a tracer the operator is given plain tensors
    if is_transformed():
        _refuse_transformed(name, t)
    if t.is_neg() or t.is_conj():
        how = "neg" if t.is_neg() else "conj"
        fail(name, f"a view with its {how} bit set, whose memory has the other sign", f"{name}.resolve_{how}()")


def kind(value: object) -> str:
    """Returns the type name of an argument, with its module unless it is a builtin."""
    of = type(value)
    return of.__name__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__name__}"


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless the argument is True or False."""
    if not isinstance(value, bool):
        fail(name, kind(value), f"a bool, such as bool({name})", TypeError)


def check_int(name: str, value: object, least: int, most: int = 2**63 - 1, *, needs: str = "") -> None:
    """Raises unless the argument is an int from `least` to `most`; `needs` replaces these numbers in the message."""
    if not isinstance(value, int) or isinstance(value, bool):
        fail(name, kind(value), f"an int, such as int({name})", TypeError)
    if not least <= value <= most:
        range_ = f"at least {least}" if most == 2**63 - 1 and value < least else f"{least} to {most}"
        fail(name, value, needs if needs and value < least else range_)


def check_number(name: str, value: object) -> None:
    """Raises unless the argument is an int or float that float32 can represent."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        fail(name, kind(value), f"a number, such as float({name})", TypeError)
    if not is_finite(value):
        fail(name, value, "a finite number of float32")


def check_one_of(known: tuple[str, ...]) -> Callable[[str, object], None]:
    """Returns the check of an argument that must be one of these names, or None."""

    def check(name: str, value: object) -> None:
        good = value is None or (isinstance(value, str) and value in known)
        require(good, name, repr(value), f"None or one of {known}")

    return check


def is_finite(value: float) -> bool:
    """Whether float32 represents the number as a finite value."""
    return -_LARGEST <= value <= _LARGEST


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
        fail(name, kind(t), "a torch.Tensor", TypeError)
    check_plain(name, t)
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


def check_given(arguments: Mapping[str, Any], device: torch.device, **conditions: Mapping[str, Any]) -> None:
    """Checks the tensors that are not None, each by its conditions, on one common device."""
    for name, known in conditions.items():
        if arguments[name] is not None:
            check_tensor(name, arguments[name], device=device, **known)


def _either(dtype: torch.dtype | tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d) for d in dtype) if isinstance(dtype, tuple) else str(dtype)


def _fail_shape(name: str, got: torch.Size, needs: tuple[int | None, ...]) -> NoReturn:
    fail(name, f"shape {tuple(got)}", f"({', '.join('any' if n is None else str(n) for n in needs)})")
