"""How every op launches and refuses: it launches first, and checks the arguments only if the launch is refused.

A *prepared launch* is all that stays the same while the shapes do: the plan, the compiled kernel and small constants.
The first call with new shapes prepares it; later ones look it up by key, launch, and check nothing in Python.

A compiled kernel checks its own arguments before it launches: that they are tensors, their ranks, dtypes, static sizes,
strides and alignments, that sizes agree between tensors, and that all are on one CUDA device, which it makes current.
That takes 3 us for six tensors. The checks of `runtime.checks` name the argument, but take 2.6 us a tensor on the hosts
of the H200, so they run only while a launch is prepared and after one is refused.

Whatever a kernel does not check belongs in the key: that the device is an SM90, limits such as 2^31 slots, and the sign
of integers (a kernel takes int8 for uint8, and uint64 for int64). The neg bit of a tensor with free strides belongs
there too; torch makes no such view of rows that are contiguous and have several elements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from cute_kernels.runtime import memory
from cute_kernels.runtime.checks import fail, is_transformed, refuse_transformed
from cute_kernels.runtime.ops import Operator, compiled
from cute_kernels.runtime.sources import parameters

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Prepared = TypeVar("Prepared")

MAX_PREPARED = 4096  # the keys take about 1 MB


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
"""Types of tensor arguments that have no behaviour of their own."""


def launch_or_explain(
    op: Operator, launch: Callable[[Any], Result], check: Callable[[Any], object]
) -> Callable[[Any], Result]:
    """Returns the function that launches a request, and that says what is wrong with it if the launch is refused.

    A tensor without memory of its own (a DTensor or a fake tensor) has the address 0, which every kernel would take, so
    it is refused before. Looking at the types of 13 tensors takes 0.4 us. A tensor with a forward-mode derivative, or
    inside a transform of torch.func, is refused too, because a kernel sees neither.

    Args:
        op: the operator whose arguments a request has.
        launch: looks up the prepared launch, or prepares it, and launches it. It checks nothing that the kernel checks
            itself, and may raise anything for wrong arguments as long as nothing was launched: the caller does not see
            that error.
        check: raises the error that the caller sees, which names the argument. If it finds nothing wrong, the error of
            `launch` is the kernel's own, or one of memory, and is raised as it is.
    """
    types_of = op.types_of

    def run(request: Any) -> Result:
        if not types_of(request) <= PLAIN:
            require_memory(op.tensors, op.tensors_of(request))
        if is_transformed():
            refuse_transformed(op.tensors, op.tensors_of(request))
        try:
            return launch(request)
        except Exception as error:
            refusal = error
        # outside of `except`: the user reads one error, not two
        try:
            check(request)
            raise refusal
        finally:
            del refusal  # its traceback holds this frame, and with it the caller's tensors

    return run


def require_memory(names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raises TypeError for the first tensor that has elements but no memory of its own."""
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


def by_name(op: Operator, kernel: Callable[..., None], spec_kernel: str, **constants: Any) -> Callable[..., None]:
    """Returns the launch of a compiled kernel that takes its arguments by name; their positions are found once, here.

    Args:
        op: the operator whose requests the launch is given.
        kernel: what `get_kernel` returns.
        spec_kernel: the kernel class as "module:class", whose `__call__` has the names.
        constants: arguments that stay the same while the launch is prepared. If one is also an option of `op`, it
            replaces an option that is None. Names that the kernel does not have are left out.

    Returns:
        launch(request, **others): the request has the options, `others` all that is neither an option nor constant.
    """
    known, places, others = dict[str, Any](kernel=kernel), [], []
    for name in parameters(spec_kernel):
        option = op.arguments[name].option if name in op.arguments else None
        if option is not None:
            value = f"given_{name}(r[{name!r}])" if option.given else f"r[{name!r}]"
            known |= {f"given_{name}": option.given, f"default_{name}": constants.get(name)}
            is_flag = isinstance(option.default, bool)
            places.append(f"1 if {value} else 0" if is_flag else f"default_{name} if r[{name!r}] is None else {value}")
        elif name in constants:
            known[f"constant_{name}"] = constants[name]
            places.append(f"constant_{name}")
        else:
            others.append(name)
            places.append(name)
    return compiled(f"lambda {', '.join(['r', *others])}: kernel({', '.join(places)})", **known)


def do_nothing(*arguments: Any, **tensors: Any) -> None:
    """Replaces a kernel where there is nothing to write. It checks nothing, so it is not kept as a prepared launch."""


class PreparedLaunches(dict[Key, Prepared]):
    """The prepared launches of one op, by key. At `MAX_PREPARED` entries the dictionary is cleared."""

    def keep(self, key: Key, prepared: Prepared, device: torch.device) -> Prepared:
        """Adds a prepared launch and returns it. Under graph capture it is not added.

        A tensor that is made under capture belongs to the graph's memory pool and must not outlive the capture.
        """
        if not memory.is_capturing(device):
            if len(self) >= MAX_PREPARED:
                self.clear()
            self[key] = prepared
        return prepared
