"""From a spec to a callable kernel: memory, then disk, then the compiler.

Only this module, the kernel modules that it imports, and the cache (for entries that are object files) import cutlass.
A process that finds all its kernels on disk as shared libraries never pays for that import.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
import shlex
import threading
from collections.abc import Callable, Iterable
from typing import Any

from cute_kernels.runtime import arch
from cute_kernels.runtime.cache import DiskCache, KernelSpec, directory, entry_name

_kernels: dict[KernelSpec, Callable[..., Any]] = {}
_building = threading.RLock()  # the DSL's state is global, so a process compiles one kernel at a time


def get_kernel(spec: KernelSpec) -> Callable[..., Any]:
    """The compiled kernel of a spec.

    It takes torch tensors (an absent one is None) and Python numbers by position, in the order of the kernel class's
    `__call__` without the stream. It checks them against what was compiled, then launches on torch's current stream.

    The first call in a process loads it from disk (some ms), or compiles it (some seconds) and stores it on disk for
    other processes. Threads and processes that need the same kernel at the same time compile it once.

    Raises:
        ValueError: the spec cannot be built; the message has its reasons.
        RuntimeError: the DSL is not installed, or was imported for another target.
    """
    kernel = _kernels.get(spec)
    if kernel is not None:
        return kernel
    with _building:
        kernel = _kernels.get(spec)
        if kernel is None:
            kernel = _kernels[spec] = _load_or_compile(spec)
        return kernel


def compile_kernel(spec: KernelSpec, dump_dir: str | os.PathLike[str] | None = None) -> Any:
    """Compiles a spec for sm_90a from its fake arguments. Needs no GPU and reads no cache.

    Args:
        spec: the kernel to compile.
        dump_dir: an existing directory that receives the PTX and the cubin; the remarks of ptxas then go to sys.stderr.

    Returns:
        The DSL's compiled object: callable like the result of `get_kernel`, with `export_to_c`.

    Raises:
        ValueError: the spec cannot be built; the message has its reasons.
    """
    reasons = spec.can_implement()
    if reasons:
        # no text of a spec: an op that gets here has let an argument pass that it should have named
        raise ValueError(f"no kernel can be built: {'; '.join(reasons)}")
    arch.pin()
    import cutlass.cute as cute

    options = ["--gpu-arch", arch.ARCH, "--enable-tvm-ffi", getattr(spec, "compile_options", "")]
    if dump_dir is not None:
        options += [
            "--keep-cubin",
            "--keep-ptx",
            "--dump-dir",
            shlex.quote(os.fspath(dump_dir)),
            "--remark-filter ptxas",
        ]
    module, _, class_name = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), class_name)(spec)
    with _building:
        return cute.compile(kernel, *kernel.fake_arguments(), options=" ".join(options))


def missing(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """The specs without an entry on disk, each once. Needs no GPU and no cutlass."""
    disk = DiskCache(directory())
    return [spec for spec in dict.fromkeys(specs) if not disk.exists(entry_name(spec))]


def precompile(
    specs: Iterable[KernelSpec],
    processes: int | None = None,
    on_done: Callable[[KernelSpec], None] | None = None,
) -> list[KernelSpec]:
    """Fills the disk cache with the kernels of `specs`, several at a time.

    It starts new interpreters, so a script calls it under `if __name__ == "__main__"`; a daemonic process, which may
    start none, compiles them itself. It returns at once where all are on disk, and only warns where the cache cannot be
    written.

    Args:
        specs: kernels to compile; those with an entry on disk are skipped.
        processes: how many at a time; by default one per CPU core.
        on_done: called in this process with each spec that is compiled, as soon as it is.

    Returns:
        The specs that were compiled.

    Raises:
        ValueError, RuntimeError: as `get_kernel`, for the first spec that fails.
    """
    todo = missing(specs)
    if not todo:
        return []
    with DiskCache(directory()).lock(entry_name(todo[0])) as writable:
        if not writable:  # this process has warned; workers could only compile and discard
            return []
    on_done = on_done or (lambda spec: None)
    if multiprocessing.current_process().daemon:
        for spec in todo:
            _fill(spec)
            on_done(spec)
        return todo
    workers = min(processes or os.cpu_count() or 1, len(todo))
    # fork would copy the locks and threads of torch and the DSL
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(_fill, spec): spec for spec in todo}
        for done in concurrent.futures.as_completed(running):
            done.result()
            on_done(running[done])
    return todo


def _fill(spec: KernelSpec) -> None:
    get_kernel(spec)  # returns nothing: a kernel cannot be pickled


def _load_or_compile(spec: KernelSpec) -> Callable[..., Any]:
    disk, name = DiskCache(directory()), entry_name(spec)
    kernel = disk.load(name)
    if kernel is not None:
        return kernel
    with disk.lock(name) as writable:
        kernel = disk.load(name)  # the previous holder of the lock may have built it
        if kernel is not None:
            return kernel
        if writable:
            disk.discard(name)
        compiled = compile_kernel(spec)
        if writable and disk.store(name, lambda path, symbol: compiled.export_to_c(path, function_name=symbol)):
            # the loaded kernel is the one that later processes run, and its call has no layer of Python
            return disk.load(name) or compiled
        return compiled
