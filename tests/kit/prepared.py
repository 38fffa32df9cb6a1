"""Launches that are prepared before a test, as if by an earlier call on a GPU, and stand-ins for compiled kernels."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pytest
import torch

from cute_kernels.runtime.launch import PreparedLaunches


class _Learning(dict[Any, Any]):
    """Returns the same value for every key, and records the keys."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get(self, key: Any, default: Any = None) -> Any:
        self[key] = self._value
        return self._value


def prepare(monkeypatch: pytest.MonkeyPatch, module: Any, launch: Any, *requests: Mapping[str, Any]) -> None:
    """Prepares `launch` in a module for the given requests, and for no other.

    It makes each request once to learn its key.
    """
    learned = _Learning(launch)
    monkeypatch.setattr(module, "_prepared", learned)
    for request in requests:
        launch_of(module)(request)
    prepared: PreparedLaunches[Any, Any] = PreparedLaunches(learned)
    assert len(prepared) == len(requests)
    monkeypatch.setattr(module, "_prepared", prepared)


def launch_of(module: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The function of a module that looks up prepared launches."""
    return module.launch if hasattr(module, "launch") else module._launch


NUMBERS: Final = {"Float32": float, "Int32": int, "Int64": int, "NoneType": type(None)}


def refusal(declared: Sequence[Any], arguments: Sequence[Any]) -> str:
    """Why a compiled kernel would refuse arguments: kinds, dtypes, sizes and their equality, strides or addresses.

    Integer dtypes of equal size pass for each other, as in compiled kernels. Empty if the kernel would take them.
    """
    if len(arguments) != len(declared):
        return f"{len(arguments)} arguments"
    sizes: dict[int, int] = {}
    for place, (got, fake) in enumerate(zip(arguments, declared, strict=True)):
        shape = getattr(fake, "shape", None)
        if shape is None or not isinstance(got, torch.Tensor):
            if shape is not None or type(got) is not NUMBERS[type(fake).__name__]:
                return f"argument {place}: {got!r}"
            continue
        wanted = getattr(torch, fake.element_type.__name__.lower())
        same = got.dtype is wanted or (
            got.dtype.itemsize == wanted.itemsize and not got.is_floating_point() and not wanted.is_floating_point
        )
        align = min(fake._assumed_align, 64)  # memory of a CPU has no larger alignment
        if not same or got.data_ptr() % align or got.dim() != len(shape):
            return f"argument {place}: {got.dtype} {got.dim()}, {got.data_ptr() % align} beyond"
        for size, stride, n, step in zip(shape, fake.stride, got.shape, got.stride(), strict=True):
            known = size if isinstance(size, int) else sizes.setdefault(id(size), n)
            fits = step == stride if isinstance(stride, int) else step > 0 and step % stride.divisibility == 0
            if n != known or n == 0 or not fits:
                return f"argument {place}: {tuple(got.shape)} by {got.stride()}"
    return ""


def declared_by(spec: Any) -> tuple[Any, ...]:
    """The arguments that the kernel of a spec is compiled for, without the stream."""
    module, _, name = spec.kernel.partition(":")
    arguments: tuple[Any, ...] = getattr(importlib.import_module(module), name)(spec).fake_arguments()[:-1]
    return arguments


class DeclaredKernel:
    """Stands for the compiled kernels of some specs: records arguments that one of them takes, refuses others."""

    def __init__(self, *specs: Any, device: str = "cpu", run: Callable[..., None] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._device, self._run = device, run
        self._declared = [declared_by(spec) for spec in specs]

    def __call__(self, *arguments: Any) -> None:
        elsewhere = [t for t in arguments if isinstance(t, torch.Tensor) and t.device.type != self._device]
        refusals = [refusal(declared, arguments) for declared in self._declared]
        if elsewhere or all(refusals):
            raise ValueError(f"Mismatched Tensor: {elsewhere or refusals}")
        self.calls.append(arguments)
        if self._run is not None:
            self._run(*arguments)
