"""Compile the kernels of a model before it is served: in parallel, into the disk cache that all processes share.

    import cute_kernels
    cute_kernels.warm(cute_kernels.warm.MlaShape(heads=128))        # this module can be called: it is `warm` below
    python -m cute_kernels.warm --heads 128 --mla                   # the same from a shell

It needs no GPU: the kernels and the names of their entries follow from shapes, sources and compiler versions.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.runtime.cache import KernelSpec, directory
from cute_kernels.runtime.compile import missing, precompile
from cute_kernels.warm import shapes
from cute_kernels.warm.shapes import H100_SMS, GqaShape, IndexShape, MlaShape, PrefillShape, PromptShape, Shape

__all__ = ["GqaShape", "IndexShape", "MlaShape", "PrefillShape", "PromptShape", "WarmReport", "kernel_specs", "warm"]

BATCH_SIZES = range(1, 257)


@dataclass(frozen=True)
class WarmReport:
    """The result of a warm start; `print` it.

    specs      the kernels that the calls need, each once
    compiled   the needed kernels that were compiled now
    missing    the needed kernels that are not on disk afterwards: the cache cannot be written, and a warning said so
    seconds    duration of the warm start
    directory  directory of the entries
    """

    specs: tuple[KernelSpec, ...]
    compiled: tuple[KernelSpec, ...]
    missing: tuple[KernelSpec, ...]
    seconds: float
    directory: Path

    def __str__(self) -> str:
        found = len(self.specs) - len(self.compiled) - len(self.missing)
        text = f"{len(self.specs)} kernels in {self.directory}: {len(self.compiled)} compiled in {self.seconds:.1f} s"
        text += f", {found} found"
        return f"{text}, {len(self.missing)} could not be kept" if self.missing else text


def kernel_specs(
    *shapes: Shape,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    query_tokens: Iterable[int] = (1,),
    num_sms: int = H100_SMS,
) -> list[KernelSpec]:
    """Returns the kernels that calls of these shapes ask for, each once; arguments as of `warm`."""
    for name, given in (("batch_sizes", batch_sizes), ("query_tokens", query_tokens)):
        if not isinstance(given, Iterable):
            raise TypeError(f"{name}: got {given!r}; needs several numbers")
    batches, tokens = tuple(batch_sizes), tuple(query_tokens)
    for name, numbers in (("batch_sizes", batches), ("query_tokens", tokens), ("num_sms", (num_sms,))):
        if not numbers or any(n < 1 for n in numbers):
            raise ValueError(f"{name}: got {list(numbers) or 'nothing'}; needs numbers from 1 on")
    specs = dict.fromkeys(spec for shape in shapes for spec in shape.specs(batches, tokens, num_sms))
    for spec in specs:
        if reasons := spec.can_implement():
            raise ValueError(f"shapes: got one that no kernel takes: {'; '.join(reasons)}")
    return list(specs)


def warm(
    *shapes: Shape,
    batch_sizes: Iterable[int] = BATCH_SIZES,
    query_tokens: Iterable[int] = (1,),
    num_sms: int = H100_SMS,
    processes: int | None = None,
    progress: bool = True,
) -> WarmReport:
    """Compile the kernels that calls of these shapes will ask for, unless they are on disk.

    It compiles in new interpreters, which end with this process.

    Args:
        shapes: `MlaShape`, `GqaShape`, `IndexShape`, `PrefillShape` and `PromptShape`, which have the facts that are
            fixed for all calls of a model.
        batch_sizes: batch sizes of its decode calls; default 1 to 256.
        query_tokens: query tokens of each request in a decode call: 1, and more for speculative decoding.
        num_sms: streaming multiprocessors of the GPU that will run the kernels. Plans depend on it: with another number
            a call may ask for a kernel that is not there, and compile it.
        processes: number of compilations at a time; default one per CPU core.
        progress: whether to show a progress bar on stderr, if rich is installed.

    Returns:
        The kernels that are needed and those that were compiled, how long it took, and the directory of the entries.

    Raises:
        ValueError: no kernel has such a shape; the message says why.
        RuntimeError: the compiler is not installed.
    """
    start = time.perf_counter()
    specs = kernel_specs(*shapes, batch_sizes=batch_sizes, query_tokens=query_tokens, num_sms=num_sms)
    with _progress_bar(len(missing(specs)), progress) as advance:
        compiled = precompile(specs, processes, advance)
    seconds = time.perf_counter() - start
    return WarmReport(tuple(specs), tuple(compiled), tuple(missing(specs)), seconds, directory())


@contextlib.contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[KernelSpec], None]]:
    """Yields a function that counts a compiled kernel; without rich, or with nothing to compile, it does nothing."""
    try:
        if not (wanted and total):
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda spec: None
        return
    columns = (TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=total)
        yield lambda spec: bar.advance(task)


class CallableModule(types.ModuleType):
    """A module that is called as its function `warm`.

    `cute_kernels.warm` names this module once anything imports it, so the module itself must be what users call. Type
    checkers see `cute_kernels.warm` as an object of this class, so the class repeats the names.
    """

    GqaShape = shapes.GqaShape
    IndexShape = shapes.IndexShape
    MlaShape = shapes.MlaShape
    PrefillShape = shapes.PrefillShape
    PromptShape = shapes.PromptShape
    kernel_specs = staticmethod(kernel_specs)
    warm = __call__ = staticmethod(warm)


sys.modules[__name__].__class__ = CallableModule
