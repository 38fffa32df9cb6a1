"""The one way in which ops launch and refuse: launch first, check the arguments only where the launch is refused.

A *prepared launch* is all that stays the same while the shapes do: the plan, the compiled kernel and small constants.
The first call of a kind prepares it; later calls look it up by key, launch, and check nothing in Python.

A compiled kernel checks its own arguments before it launches: that they are tensors, their ranks, dtypes, static sizes,
strides and alignments, that sizes agree between tensors, and that all are on one CUDA device, which it makes current.
That takes 3 us for six tensors. The checks of `runtime.checks` name the argument, but take 2.6 us a tensor on the hosts
of the H200, so they run only while a launch is prepared and after one is refused.

Whatever a kernel does not check belongs in the key: that the device is an SM90, limits such as 2^31 slots, and the sign
of integers (a kernel takes int8 for uint8, and uint64 for int64). So does the neg bit of a tensor with free strides:
where rows are contiguous torch makes no such view.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from cute_kernels.runtime import memory
from cute_kernels.runtime.checks import fail, is_transformed, refuse_transformed

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Prepared = TypeVar("Prepared")

MAX_PREPARED = 4096  # about 1 MB of keys


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})
"""Types of arguments that are what they seem."""


def launch_or_explain(
    launch: Callable[..., Result], check: Callable[..., None], names: tuple[str, ...]
) -> Callable[..., Result]:
    """The function that launches, and says what is wrong with the arguments if the launch is refused.

    A tensor without memory of its own (of DTensor, or a fake one) has the address 0, which every kernel would take: it
    is refused before. To look at the types of 22 arguments takes 0.5 us. A tensor with a forward-mode derivative, or
    inside a transform of torch.func, is refused too: a kernel sees neither.

    All three take the same arguments, by position.

    Args:
        launch: looks up the prepared launch, or prepares it, and launches it. It checks nothing that the kernel checks
            itself, and may raise anything for wrong arguments as long as nothing was launched: the caller does not see
            that error.
        check: raises the error that the caller sees, which names the argument. If it finds nothing wrong, the error of
            `launch` is the kernel's own, or one of memory, and is raised as it is.
        names: of the arguments that may be tensors, by position.
    """

    def run(*arguments: Any) -> Result:
        if not PLAIN.issuperset(map(type, arguments)):
            require_memory(names, arguments)
        if is_transformed():
            refuse_transformed(names, arguments)
        try:
            return launch(*arguments)
        except Exception as error:
            refusal = error
        # outside of `except`: the user reads one error, not two
        try:
            check(*arguments)
            raise refusal
        finally:
            del refusal  # its traceback holds this frame, and with it the caller's tensors

    return run


def require_memory(names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raises TypeError for the first tensor that has elements and no memory of its own."""
    for name, value in zip(names, arguments, strict=False):
        if isinstance(value, torch.Tensor) and type(value) not in PLAIN and value.numel() and not _has_memory(value):
            fail(name, f"{type(value).__name__} without memory of its own", "a plain tensor", TypeError)


def _has_memory(t: torch.Tensor) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the address of a fake tensor
            return t.data_ptr() != 0
    except RuntimeError:
        return False


class PreparedLaunches(dict[Key, Prepared]):
    """The prepared launches of one op, by key. It starts over when it has `MAX_PREPARED`."""

    def keep(self, key: Key, prepared: Prepared, device: torch.device) -> Prepared:
        """Adds a prepared launch and returns it. Under graph capture it is not added.

        A tensor that is made under capture is of the graph's memory pool and must not outlive the capture.
        """
        if not memory.is_capturing(device):
            if len(self) >= MAX_PREPARED:
                self.clear()
            self[key] = prepared
        return prepared
