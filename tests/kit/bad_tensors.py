"""Tensors with a named dtype and device, and wrong variants of them, for tables of bad input."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from cute_kernels.runtime.ops import Operator

Call = dict[str, Any]
Wrong = dict[str, tuple[str, Any]]
"""For each label, the argument that the error names and its value; a dict of several changed arguments is one value."""

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, U8, I32, I64 = torch.int8, torch.uint8, torch.int32, torch.int64
FP8 = torch.float8_e4m3fn


def zeros(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


floats, ints = functools.partial(zeros, dtype=F32), functools.partial(zeros, dtype=I32)


def nans(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def sevens(device: str, *shape: int, dtype: torch.dtype = I8) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype, device=device)


def numbers(device: str, *values: float, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def every_second(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype with a last stride of 2."""
    return like.new_zeros((*like.shape[:-1], 2 * like.shape[-1]))[..., ::2]


def rows_apart(like: torch.Tensor, elements: int) -> torch.Tensor:
    """A tensor of this shape and dtype with `elements` elements between its rows."""
    return like.new_zeros((*like.shape[:-1], like.shape[-1] + elements))[..., : like.shape[-1]]


def off_by(bytes_: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype whose address is `bytes_` bytes beyond a multiple of 16."""
    size = like.numel() * like.element_size()
    storage = torch.zeros(size + 32, dtype=U8, device=like.device)
    start = (-storage.data_ptr()) % 16 + bytes_
    return storage[start : start + size].view(like.dtype).view(like.shape)


def sharing(call: Call, name: str, other: str) -> Call:
    """Two arguments that share memory: the smaller one lies in the memory of the larger one."""
    small, large = sorted((name, other), key=lambda name: call[name].nbytes)
    t = call[small]
    first_bytes = call[large].view(U8).as_strided((t.nbytes,), (1,))
    return {large: call[large], small: first_bytes.view(t.dtype).view(t.shape)}


def overlapping(call: Call, *names: str) -> Wrong:
    """Every named output with elements that share memory."""
    wrong: Wrong = {}
    for name in names:
        t = call[name]
        wrong[f"{name} expanded"] = (name, t[:1].expand(t.shape))
        wrong[f"{name} with rows that overlap"] = (name, t.as_strided(t.shape, (t.stride(0) // 2, *t.stride()[1:])))
    return wrong


def all_elsewhere(call: Call) -> Call:
    """The call's tensors on another device, for which there are no kernels."""
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def wrong_tensor(
    call: Call,
    name: str,
    *shapes: tuple[int, ...],
    dtypes: Sequence[torch.dtype] = (),
    off: int = 0,
    rows: int = 0,
    spread: bool = False,
) -> Wrong:
    """Changes that make one tensor of a call wrong.

    Args:
        call: the valid call.
        shapes: shapes that the operator refuses.
        dtypes: dtypes that the operator refuses; the bits stay if elements have the same size.
        off: offset of the address from a multiple of 16 bytes that the operator refuses.
        rows: number of elements between rows that the operator refuses.
        spread: whether its last stride must be 1.
    """
    t = call[name]
    wrong: dict[str, Any] = {f"of shape {shape}": t.new_zeros(shape) for shape in shapes}
    wrong |= {f"of {dtype}": t.view(dtype) if dtype.itemsize == t.itemsize else t.to(dtype) for dtype in dtypes}
    if off:
        wrong[f"{off} bytes off"] = off_by(off, t)
    if rows:
        wrong[f"with rows {rows} elements apart"] = rows_apart(t, rows)
    if spread:
        wrong["with a last stride of 2"] = every_second(t)
    return {f"{name} {what}": (name, value) for what, value in wrong.items()}


def wrong_anywhere(operator: Operator, call: Call) -> Wrong:
    """Changes that every operator refuses; all tensors of a call must be on the device of the first one."""
    tensors = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
    written = [name for name in operator.written if name in call]
    needed = [name for name in tensors if not operator.arguments[name].may_be_none]
    read_later = [(name, other) for n, name in enumerate(written) for other in tensors if other not in written[: n + 1]]
    return {
        **{f"{name} None": (name, None) for name in needed},
        **{f"{name} a list": (name, [0]) for name in tensors},
        **{f"{name} on another device": (name, call[name].to("meta")) for name in tensors[1:]},
        "everything on another device": (tensors[0], all_elsewhere(call)),
        **overlapping(call, *written),
        **{f"{name} in the memory of {other}": (name, sharing(call, name, other))
           for name, other in read_later if other != "q" or call[name].shape != call["q"].shape},  # may be q
        **wrong_options(**{name: values for name, values in OPTIONS.items() if name in operator.arguments}),
    }  # fmt: skip


def wrong_options(**options: Sequence[Any]) -> Wrong:
    """Every option with values that it refuses."""
    return {
        f"{name} {'a tensor' if isinstance(value, torch.Tensor) else repr(value)[:30]}": (name, value)
        for name, values in options.items()
        for value in values
    }


FLAGS = ("no", 1, None, numpy.bool_(True))
SCALES = ("1", True, math.nan, -math.inf, 2**2000, torch.ones((), dtype=F32, device="cpu", requires_grad=True))
OPTIONS: dict[str, Sequence[Any]] = {
    "causal": FLAGS,
    "deterministic": FLAGS,
    "softmax_scale": SCALES,
    "num_splits": (0, 1.5, 1.0, True, 2**70, numpy.int64(2)),
    "window": (0, -1, 4.0, True, 2**70, numpy.int64(5), (4, 0)),
    "softcap": (0.0, -30.0, math.inf, math.nan, "30", True, 10**400),
}
"""Values that options of several operators refuse."""
NAMES = ("unknown", 4, ["v4"])
"""Values that name no choice."""
