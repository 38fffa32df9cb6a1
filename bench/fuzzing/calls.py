"""A call of any public operator: its arguments, the memory that it may write, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import cute_kernels
from bench.fuzzing.memory import Image
from tests.kit.compare import bits

Oracle = Callable[[Mapping[str, torch.Tensor]], list[str]]


class Mode(NamedTuple):
    """A way to make a call.

    given    outputs that the caller passes in; the operator allocates the others
    returns  results that it returns, in order
    """

    given: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call with its arguments.

    op         name of the public function
    arguments  arguments by name, without outputs and caches that are written
    image      memory of outputs (poisoned) or caches that a caller may pass in
    modes      ways to make the call; the first passes in and returns every result
    oracle     takes results by name, returns in words what is wrong with them
    d_out      gradient of the output, of differentiable calls
    unstable   results whose bits may differ from call to call
    capturable whether a CUDA graph can hold the call
    """

    op: str
    arguments: dict[str, Any]
    image: Image
    modes: tuple[Mode, ...]
    oracle: Oracle
    d_out: torch.Tensor | None = None
    unstable: frozenset[str] = field(default_factory=frozenset)
    capturable: bool = True

    @property
    def shape(self) -> tuple[str, ...]:
        """The facts that a plan depends on; calls of one shape are counted once."""
        named = ((name, _shape(value)) for name, value in self.arguments.items() if value is not None)
        return (self.op, *(f"{name} {shape}" for name, shape in named))

    def __repr__(self) -> str:
        return " ".join(self.shape)

    def run(self, mode: Mode, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Makes the call with `views` as the outputs that the mode passes in, and returns all results by name.

        Raises:
            WrongResult: the operator returned another tensor than the output that it got, or another number of results.
        """
        result = self._invoke({**self.arguments, **views}, mode)
        if len(result) != len(mode.returns):
            raise WrongResult(f"{len(result)} results, needs {len(mode.returns)}")
        values = dict(zip(mode.returns, result, strict=True))
        for name, view in views.items():
            if values.setdefault(name, view) is not view:
                raise WrongResult(f"{name}: returned another tensor than the one that was given")
        return values

    def _invoke(self, options: dict[str, Any], mode: Mode) -> tuple[Any, ...]:
        """Calls the public function and returns its results, a tuple whatever their number."""
        function = getattr(cute_kernels, self.op)
        if "lse" in mode.returns and self.op != "merge_states":
            options["return_lse"] = True
        if self.d_out is None:
            result = function(**options)
            return () if result is None else result if isinstance(result, tuple) else (result,)
        leaves = [name for name in ("q", "k", "v", "s_aux") if options[name] is not None]
        for name in leaves:
            options[name] = options[name].detach().requires_grad_()
        out = function(**options)
        return (out.detach(), *torch.autograd.grad(out, [options[name] for name in leaves], self.d_out))


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


class WrongResult(Exception):
    """A result is wrong whatever its numbers: another tensor, another dtype or shape, too many or too few results."""


class Expected:
    """The bits that a call's results must have: the bits of a run without other threads.

    values  contiguous integers by name
    """

    def __init__(self, call: Call, values: Mapping[str, torch.Tensor]) -> None:
        self._call = call
        self.dtypes = {name: (t.dtype, t.shape) for name, t in values.items()}
        self.values = {name: bits(t).contiguous() for name, t in values.items()}
        given = {mode.given for mode in call.modes}
        self._blocks = {names: call.image.after({name: values[name] for name in names}) for names in given}

    def count_wrong(
        self, mode: Mode, block: torch.Tensor | None, values: Mapping[str, torch.Tensor], wrong: torch.Tensor
    ) -> None:
        """Adds 1 to a counter on the device if a bit differs, in the results or around them. Does not synchronize.

        Raises:
            WrongResult: a dtype or a shape is wrong.
        """
        if block is not None:
            wrong.add_((block != self._blocks[mode.given]).any())
        for name, value in values.items():
            if name in mode.given or name in self._call.unstable:
                continue
            if (value.dtype, value.shape) != self.dtypes[name]:
                raise WrongResult(f"{name}: {value.dtype} {tuple(value.shape)}, needs {self.dtypes[name]}")
            wrong.add_((bits(value) != self.values[name]).any())
