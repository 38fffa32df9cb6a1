"""What tracing a kernel has left, before the compiler sees it: a key that equal machine code follows from.

A trace is the DSL's module without locations and names of functions, together with the arguments it was traced from:
which of their sizes are fixed, equal or divisible is checked at each call, and is not all in the module.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_kernels.runtime.cache import KernelSpec

_NAME = re.compile(r"@[A-Za-z_]\w*")


class Known(Exception):
    """Tracing has left what is known already; `key` names it."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@dataclass
class Trace:
    """What a compilation was traced to, once it was."""

    key: str = ""


@contextlib.contextmanager
def stopped_where(known: Callable[[str], bool], spec: KernelSpec) -> Iterator[Trace]:
    """The compilation of `spec` inside of the block ends after tracing where `known` says so of its key.

    Raises:
        Known: that is so.
    """
    from cute_kernels.runtime import arch

    arch.pin()
    from cutlass.cutlass_dsl import CuTeDSL

    module, _, class_name = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), class_name)(spec)
    given = (getattr(spec, "compile_options", ""), form_of(kernel.fake_arguments()))
    trace = Trace()

    def look(owner: Any, module: Any, name: str) -> None:
        facts = (normal_form(module.operation.get_asm(enable_debug_info=False)), given)
        trace.key = hashlib.sha256(repr(facts).encode()).hexdigest()
        if known(trace.key):
            raise Known(trace.key)

    try:
        with CuTeDSL._get_dsl().trace_finalize_hooks(look):
            yield trace
    except Exception as error:
        if isinstance(error.__cause__, Known):  # the DSL wraps what a hook raises
            raise error.__cause__ from None
        raise


def normal_form(module: str) -> str:
    """The text of a module with its functions numbered in the order in which they are named."""
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda match: numbers.setdefault(match[0], f"@{len(numbers)}"), module)


def form_of(value: Any, numbers: dict[int, int] | None = None) -> Any:
    """An argument of tracing as plain values; sizes without a number are numbered, so that equal ones stay equal."""
    numbers = {} if numbers is None else numbers
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [form_of(part, numbers) for part in value]
    if isinstance(value, type):
        return value.__name__
    own = {name: form_of(part, numbers) for name, part in sorted(getattr(value, "__dict__", {}).items())}
    name = type(value).__name__
    if name == "SymInt":
        return [name, numbers.setdefault(id(value), len(numbers)), own]
    return [name, own] if own else repr(value)
