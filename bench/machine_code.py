"""Which machine code a spec is: digests that outlive renames and comments, and a store of them.

Two compilations of the same code, in two directories or on two machines, have the same digest: it is over instruction
words, resources, constants and launches, not over names or paths (`bench.cubin`, `bench.launch_code`).
Another compiler makes other code of the same source, so digests of two toolchains say nothing about each other.

The store holds digests by all that the code depends on: the spec, the sources that its kernel imports, and the
toolchain. What was compiled once, in whatever commit, is not compiled again. Other sources may be traced to the same
module, names and locations aside, and the same arguments: then the compiler is not asked either, which takes a third to
a half of the time (`bench.traces`).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import mmap
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import launch_code, traces
from bench.cubin import Kernel, find_cubins, read_kernels

if TYPE_CHECKING:
    from cute_kernels.runtime.cache import KernelSpec

# Nothing of cute_kernels is imported before it is used: `scripts/compare_machine_code.py` looks at another commit's.

NORMAL_FORM: Final = "1"
"""Raised whenever a digest covers something else than before."""
STORE: Final = Path(__file__).resolve().parents[1] / "build" / "machine_code"
_COMPILER = re.compile(rb"Cuda compilation tools, release \d+\.\d+, V(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class CodeDigest:
    """SHA-256, hexadecimal, of all kernels of a spec and of how they are launched."""

    sass: str
    launch: str

    @property
    def id(self) -> str:
        """16 hexadecimal digits that name both."""
        return hashlib.sha256((self.sass + self.launch).encode()).hexdigest()[:16]


@functools.cache
def toolchain() -> dict[str, str]:
    """What decides the machine code of a source in addition to the source: comparisons need it to be equal.

    "cutlass_dsl" is the version of the DSL, "cuda" its flavour (cu12, cu13), "compilers" the versions of NVVM and ptxas
    in it, "normal_form" that of these digests.
    """
    from cute_kernels.runtime.cache import runtime_library

    flavour = runtime_library().parents[1]
    libraries = sorted(flavour.parent.rglob(f"_cutlass_ir.{flavour.name}.*.so")) or sorted(
        flavour.parent.rglob("_cutlass_ir*.so")
    )
    versions: set[str] = set()
    for library in libraries[:1]:  # one for each version of Python
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            versions = {match[1].decode() for match in _COMPILER.finditer(data)}
    return {
        "cutlass_dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "cuda": flavour.name,
        "compilers": " ".join(sorted(versions)) or "unknown",
        "normal_form": NORMAL_FORM,
    }


def sass_of_cubins(cubins: Iterable[bytes]) -> str:
    """SHA-256 over all kernels of some cubins, whatever their order and names."""
    return _sass([kernel for cubin in cubins for kernel in read_kernels(cubin)])


def sass_of_entry(path: Path) -> str:
    """`CodeDigest.sass` of an entry of the disk cache, or of any object file that embeds its cubins."""
    return sass_of_cubins(find_cubins(path.read_bytes()))


def digest_of_compiled(compiled: Any) -> CodeDigest:
    """Digest of what `cute_kernels.runtime.compile.compile_kernel` returns."""
    return digest_of_module(str(compiled.ir_module))


def digest_of_module(module: str) -> CodeDigest:
    """Digest of the text of an `ir_module`, which has the cubins and what launches them."""
    kernels = [
        kernel
        for binary in launch_code.binaries(module)
        for cubin in find_cubins(binary)
        for kernel in read_kernels(cubin)
    ]
    order = sorted({kernel.digest for kernel in kernels})  # two of the same code may change places
    names = {kernel.name: f"@kernel{order.index(kernel.digest)}" for kernel in kernels}
    launch = hashlib.sha256(launch_code.normal_form(module, names).encode()).hexdigest()
    return CodeDigest(_sass(kernels), launch)


def _sass(kernels: list[Kernel]) -> str:
    if not kernels:
        raise ValueError("kernels: got none; needs one at least")
    return hashlib.sha256("\n".join(sorted(kernel.digest for kernel in kernels)).encode()).hexdigest()


# ---- what a spec depends on


def _of_this_checkout(name: str) -> Any:
    """A module of this checkout's `cute_kernels.runtime`, also where the package of another commit is imported."""
    file = Path(__file__).resolve().parents[1] / "cute_kernels" / "runtime" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_{name}_of_kernels", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SOURCES: Final = _of_this_checkout("sources")
_WORKERS: Final = _of_this_checkout("workers")


@functools.cache
def _source_digest(*modules: str) -> str:
    from cute_kernels.runtime import arch, compile

    files = {*_SOURCES.sources(*modules), Path(arch.__file__), Path(compile.__file__)}
    return hashlib.sha256("\n".join(sorted(map(_content_digest, files))).encode()).hexdigest()


@functools.cache
def _content_digest(file: Path) -> str:
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def store_key(spec: KernelSpec) -> str:
    """Name of a spec in the store: the kernel's class, and a digest of all that its code depends on."""
    from cute_kernels.runtime import arch

    class_name = spec.kernel.partition(":")[2]
    facts = (
        repr(spec),
        spec.kernel,
        getattr(spec, "compile_options", ""),
        arch.ARCH,
        _source_digest(*_SOURCES.modules_of_kernel(spec.kernel, type(spec).__module__)),
        sorted(toolchain().items()),
        _settings(),
    )
    return f"{class_name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


# ---- the store


@dataclass(frozen=True)
class Compiled:
    """What one compilation of a spec has left."""

    digest: CodeDigest
    cubins: tuple[bytes, ...]
    said: str  # by ptxas


@dataclass(frozen=True)
class Store:
    """What compiled specs have left, on disk and shared by processes: none compiles what another has or is at.

    Digests are small and stay. Cubins are for reports on the sources at hand, so `prune` removes old ones.
    """

    root: Path = STORE

    def digest(self, spec: KernelSpec) -> CodeDigest:
        """Digest of a spec; compiled first where nothing is known of it."""
        return _digest(self._get(spec, "digest", lambda: asdict(self._digest_of_trace(spec))))

    def _digest_of_trace(self, spec: KernelSpec) -> CodeDigest:
        """As `digest`: of what is compiled already, or of an equal trace; compiled where there is neither."""
        if (kept := _read(self._file(spec, "compiled"))) is not None:
            return _digest(kept)
        try:
            with traces.stopped_where(lambda key: self._trace_file(key).exists(), spec) as trace:
                digest = self.compiled(spec).digest
        except traces.Known as known:
            return _digest(json.loads(self._trace_file(known.key).read_text(encoding="utf-8")))
        if trace.key:  # empty where another process has compiled it meanwhile
            self._put_file(self._trace_file(trace.key), spec, asdict(digest))
        return digest

    def _trace_file(self, trace: str) -> Path:
        key = hashlib.sha256(repr((trace, sorted(toolchain().items()), _settings())).encode()).hexdigest()[:32]
        return self.root / f"trace-{key}.digest.json"

    def compiled(self, spec: KernelSpec) -> Compiled:
        """All that is kept of a spec; compiled first where that is not all there."""
        facts = self._get(spec, "compiled", lambda: _facts(_compile(spec)[1]))
        cubins = tuple(zlib.decompress(base64.b64decode(text)) for text in facts["cubins"])
        return Compiled(_digest(facts), cubins, facts["said"])

    def add(self, spec: KernelSpec, compiled: Compiled) -> None:
        """Keeps what a compilation has left."""
        self._put(spec, "compiled", _facts(compiled))
        self._put(spec, "digest", asdict(compiled.digest))

    def knows(self, spec: KernelSpec) -> bool:
        """Whether the digest of a spec is known."""
        return _read(self._file(spec, "digest")) is not None

    def prune(self, days: float = 30) -> None:
        """Removes cubins, locks and drafts that are older."""
        for pattern in ("*.compiled.json", "*.lock", "*.tmp"):
            for file in self.root.glob(pattern):
                with contextlib.suppress(OSError):
                    if file.stat().st_mtime < time.time() - days * 86400:
                        file.unlink()

    def _file(self, spec: KernelSpec, kind: str) -> Path:
        return self.root / f"{store_key(spec)}.{kind}.json"

    def _get(self, spec: KernelSpec, kind: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        file = self._file(spec, kind)
        known = _read(file)
        if known is None:
            self.root.mkdir(parents=True, exist_ok=True)
            with file.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = _read(file)  # whoever had the lock may have made it
                if known is None:
                    known = dict(make())
                    self._put(spec, kind, known)
        return known

    def _put(self, spec: KernelSpec, kind: str, facts: Mapping[str, Any]) -> None:
        self._put_file(self._file(spec, kind), spec, facts)

    def _put_file(self, file: Path, spec: KernelSpec, facts: Mapping[str, Any]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"spec": repr(spec), **facts}, indent=1) + "\n", encoding="utf-8")
        draft.replace(file)  # a reader sees all of it or none


def _digest(facts: Mapping[str, Any]) -> CodeDigest:
    return CodeDigest(facts["sass"], facts["launch"])


def _settings() -> list[tuple[str, str]]:
    """Settings of the DSL that may change what it compiles."""
    return sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k != "CUTE_DSL_ARCH")


def _facts(compiled: Compiled) -> dict[str, Any]:
    cubins = [base64.b64encode(zlib.compress(cubin)).decode() for cubin in compiled.cubins]
    return {**asdict(compiled.digest), "cubins": cubins, "said": compiled.said}


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _compile(spec: KernelSpec) -> tuple[Any, Compiled]:
    """Compiles a spec: the DSL's object, and what it leaves."""
    from cute_kernels.runtime.compile import compile_kernel

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as dump, contextlib.redirect_stderr(said):
        kernel = compile_kernel(spec, dump)
    module = str(kernel.ir_module)
    cubins = tuple(cubin for binary in launch_code.binaries(module) for cubin in find_cubins(binary))
    return kernel, Compiled(digest_of_module(module), cubins, said.getvalue())


def digest_of_spec(spec: KernelSpec, store: Store | None = None) -> CodeDigest:
    """Digest of a spec's code; compiled where the store does not know it, which needs no GPU.

    Raises:
        ValueError: the spec cannot be built.
    """
    return (store or Store()).digest(spec)


def digests_of_specs(
    specs: Iterable[KernelSpec],
    store: Store | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[KernelSpec, CodeDigest]:
    """`digest_of_spec` of several; what is missing is compiled in new interpreters, one per CPU core at a time.

    Args:
        specs: to look up or compile.
        store: that keeps them.
        processes: how many at a time.
        progress: is called with how many of how many are compiled.
    """
    store, specs = store or Store(), list(dict.fromkeys(specs))
    _in_processes(_learn, [spec for spec in specs if not store.knows(spec)], store, processes, progress)
    return {spec: store.digest(spec) for spec in specs}


def precompile(
    specs: Iterable[KernelSpec],
    store: Store | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """As `cute_kernels.runtime.compile.precompile`, and keeps the digests: each spec is compiled once for both.

    `progress` is called with how many of how many are compiled.
    """
    from cute_kernels.runtime.cache import DiskCache, directory, entry_name

    store, disk = store or Store(), DiskCache(directory())
    missing = [spec for spec in dict.fromkeys(specs) if not (disk.exists(entry_name(spec)) and store.knows(spec))]
    _in_processes(_fill, missing, store, processes, progress)


def _in_processes(
    work: Callable[..., None],
    specs: list[KernelSpec],
    store: Store,
    processes: int | None,
    progress: Callable[[int, int], None],
) -> None:
    numbers = itertools.count(1)
    _WORKERS.call_each(
        functools.partial(work, store=store),
        specs,
        processes or os.cpu_count() or 1,
        lambda spec: progress(next(numbers), len(specs)),
    )


def _learn(spec: KernelSpec, store: Store) -> None:
    store.digest(spec)


def _fill(spec: KernelSpec, store: Store) -> None:
    from cute_kernels.runtime.cache import DiskCache, directory, entry_name

    disk, name = DiskCache(directory()), entry_name(spec)
    with disk.lock(name) as writable:
        if disk.exists(name) and store.knows(spec):
            return
        kernel, compiled = _compile(spec)
        store.add(spec, compiled)
        if writable and not disk.exists(name):
            disk.store(name, lambda path, symbol: kernel.export_to_c(path, function_name=symbol))


def digest_of_entry(spec: KernelSpec, store: Store | None = None) -> CodeDigest:
    """Digest of what a process loads for a spec: SASS out of its entry in the disk cache, launches as `digest_of_spec`.

    Raises:
        FileNotFoundError: there is no entry.
    """
    from cute_kernels.runtime.cache import directory, entry_name

    entries = [directory() / (entry_name(spec) + suffix) for suffix in (".so", ".o")]
    for path in entries:
        if path.exists():
            return CodeDigest(sass_of_entry(path), digest_of_spec(spec, store).launch)
    raise FileNotFoundError(f"no kernel at {entries[0]}")
