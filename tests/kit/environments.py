"""Settings of torch that a caller may have, and that must change nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Inside the block torch makes floating-point tensors of this dtype where none is named."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
