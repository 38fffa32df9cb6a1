"""Tensors that name their dtype and device, and the same with something wrong about them, for tables of bad input."""

import math
from typing import Any

import torch

Call = dict[str, Any]
Wrong = dict[str, tuple[str, Any]]
"""By label: the argument that the error names, and its value. A dict of several changed arguments counts as such."""

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I8, U8, I32, I64 = torch.int8, torch.uint8, torch.int32, torch.int64
FP8 = torch.float8_e4m3fn


def zeros(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def floats(device: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(device: str, *shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def nans(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def sevens(device: str, *shape: int, dtype: torch.dtype = I8) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype, device=device)


def numbers(device: str, *values: float, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def every_second(like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with a last stride of 2."""
    return like.new_zeros((*like.shape[:-1], 2 * like.shape[-1]))[..., ::2]


def rows_apart(like: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape and dtype with so many elements between rows."""
    return like.new_zeros((*like.shape[:-1], like.shape[-1] + elements))[..., : like.shape[-1]]


def off_by(bytes_: int, like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype at an address that far beyond a multiple of 16."""
    size = like.numel() * like.element_size()
    storage = torch.zeros(size + 32, dtype=U8, device=like.device)
    start = (-storage.data_ptr()) % 16 + bytes_
    return storage[start : start + size].view(like.dtype).view(like.shape)


def sharing(call: Call, name: str, other: str) -> Call:
    """Two arguments, the larger one's memory holding both."""
    small, large = sorted((name, other), key=lambda name: call[name].nbytes)
    t = call[small]
    return {large: call[large], small: call[large].flatten().view(U8)[: t.nbytes].view(t.dtype).view(t.shape)}


def overlapping(call: Call, *names: str) -> Wrong:
    """Each of these written arguments with elements that share memory."""
    wrong: Wrong = {}
    for name in names:
        t = call[name]
        wrong[f"{name} expanded"] = (name, t[:1].expand(t.shape))
        wrong[f"{name} with rows that overlap"] = (name, t.as_strided(t.shape, (t.stride(0) // 2, *t.stride()[1:])))
    return wrong


def elsewhere(call: Call, *names: str) -> Wrong:
    """Each of these arguments on another device."""
    return {f"{name} on another device": (name, call[name].to("meta")) for name in names}


def all_elsewhere(call: Call) -> Call:
    """Every tensor on another device, which has no kernels."""
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
