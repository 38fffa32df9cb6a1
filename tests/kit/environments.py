"""Settings of torch that a caller may have and that must not change any result."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Sets torch's default floating-point dtype inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
