"""Makes a callable kernel of a spec: found in memory, then on disk, else compiled.

Only this module, the kernel modules that it imports, and the cache (for entries that are object files) import cutlass.
A process that finds all its kernels on disk as shared libraries never pays for that import.
"""

from __future__ import annotations

import contextvars
import importlib
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from cute_kernels.runtime import arch, workers
from cute_kernels.runtime.cache import DiskCache, KernelSpec, directory, entry_name, require_unchanged
from cute_kernels.runtime.threads import compiling, in_new_thread

_kernels: dict[KernelSpec, Callable[..., Any]] = {}
_looking = threading.RLock()  # one thread at a time looks for kernels, so that all get the same one


def _renew_lock() -> None:
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that does not exist in the child may hold the lock


def get_kernel(spec: KernelSpec) -> Callable[..., Any]:
    """Returns the compiled kernel of a spec.

    It takes torch tensors (an absent one is None) and Python numbers by position, in the order of the kernel class's
    `__call__` without the stream. It checks them against what was compiled, then launches on torch's current stream.

    The first call in a process loads it from disk (some ms), or compiles it (some seconds) and stores it on disk for
    other processes. Threads and processes that need the same kernel at the same time compile it once. An interrupt ends
    the call, not the compilation, which goes on in a thread of its own and stores the kernel.

    Raises:
        ValueError: the spec cannot be built; the message has its reasons.
        RuntimeError: the DSL is not installed, or was imported for another target, or files of the package or of the
            DSL were replaced since this process imported them.
    """
    kernel = _kernels.get(spec)
    if kernel is not None:
        return kernel
    with _looking:
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
        The DSL's compiled object, with `export_to_c`. Without a dump_dir it is called as a result of `get_kernel` is.

    Raises:
        ValueError: the spec cannot be built; the message has its reasons.
    """
    context = contextvars.copy_context()  # a caller may have set hooks of the DSL in its own
    return in_new_thread(lambda: context.run(_compile, spec, dump_dir, is_called=dump_dir is None))


def _compile(spec: KernelSpec, dump_dir: str | os.PathLike[str] | None = None, *, is_called: bool) -> Any:
    """Compiles a spec. Unless the result `is_called`, it needs no host code, which is 0.9 of the time here."""
    reasons = spec.can_implement()
    if reasons:
        # no text of the spec: the op has let an argument pass that it should have named
        raise ValueError(f"no kernel can be built: {'; '.join(reasons)}")
    options = ["--gpu-arch", arch.ARCH, "--enable-tvm-ffi", getattr(spec, "compile_options", "")]
    if dump_dir is not None:
        options += [
            "--keep-cubin",
            "--keep-ptx",
            "--dump-dir",
            shlex.quote(os.fspath(dump_dir)),
            "--remark-filter ptxas",
        ]
    entry_name(spec)  # reads the sources before they are imported
    with compiling:
        arch.pin()
        import cutlass.cute as cute

        module, _, class_name = spec.kernel.partition(":")
        try:
            kernel = getattr(importlib.import_module(module), class_name)(spec)
            arguments = kernel.fake_arguments()
            return cute.compile(kernel, *arguments, options=" ".join(options), no_jit_engine=not is_called)
        finally:
            require_unchanged(spec)  # after an error too: a mix of two versions' files can cause any error


def missing(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Returns the specs without an entry on disk, each once. Needs no GPU and no cutlass."""
    disk = DiskCache(directory())
    return [spec for spec in dict.fromkeys(specs) if not disk.exists(entry_name(spec))]


def precompile(
    specs: Iterable[KernelSpec],
    processes: int | None = None,
    on_done: Callable[[KernelSpec], None] | None = None,
    timeout_s: float | None = None,
) -> list[KernelSpec]:
    """Fills the disk cache with the kernels of `specs`, several at a time, in processes that end with this one.

    It returns at once if all are on disk, and only warns if the cache cannot be written.

    Args:
        specs: kernels to compile; those with an entry on disk are skipped.
        processes: how many at a time; by default one per CPU core.
        on_done: called in this process with each spec that is compiled, as soon as it is.
        timeout_s: seconds after which it returns, even if kernels are missing.

    Returns:
        The specs that were compiled.

    Raises:
        ValueError, RuntimeError: as `get_kernel`, for the first spec that fails.
    """
    todo = missing(specs)
    if not todo or not DiskCache(directory()).is_writable(entry_name(todo[0])):
        return []  # nothing to do; or this process has warned, and workers could only compile and discard
    compiled: list[KernelSpec] = []

    def note(spec: KernelSpec) -> None:
        compiled.append(spec)
        if on_done is not None:
            on_done(spec)

    workers.call_each(_fill, todo, processes or os.cpu_count() or 1, note, timeout_s)
    return compiled


def _fill(spec: KernelSpec) -> None:
    # tvm_ffi imports torch where it can, which takes 1.2 s; a process that compiles, and calls nothing, needs none
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    get_kernel(spec)


def _load_or_compile(spec: KernelSpec) -> Callable[..., Any]:
    disk, name = DiskCache(directory()), entry_name(spec)
    kernel = disk.load(name)
    if kernel is not None:
        return kernel
    in_new_thread(lambda: _build(spec, disk, name))
    # load the kernel as later processes do: its call has no layer of Python
    return disk.load(name) or compile_kernel(spec)


def _build(spec: KernelSpec, disk: DiskCache, name: str) -> None:
    """Compiles and stores a kernel, if it can be stored and no other thread or process has stored an intact entry."""
    with disk.lock(name) as writable, compiling:
        if writable and not disk.is_intact(name):
            compiled = _compile(spec, is_called=False)
            disk.store(name, lambda path, symbol: compiled.export_to_c(path, function_name=symbol))
