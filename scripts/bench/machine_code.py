"""Which machine code a spec is: digests that outlive renames and comments, and a store of them.

Two compilations of the same code, in two directories or on two machines, have the same digest: it is over instruction
words, resources, constants and launches, not over names or paths (`scripts.bench.cubin`, `scripts.bench.launch_code`).
Another compiler makes other code of the same source, so digests of two toolchains say nothing about each other.

The store holds digests by all that the code depends on: the spec, the sources that its kernel imports, and the
toolchain. What was compiled once, in whatever commit, is not compiled again.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import mmap
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripts.bench import launch_code
from scripts.bench.cubin import Kernel, find_cubins, read_kernels

if TYPE_CHECKING:
    from cute_kernels.runtime.cache import KernelSpec

# Nothing of cute_kernels is imported before it is used: `scripts/compare_machine_code.py` looks at another commit's.

NORMAL_FORM: Final = "1"
"""Raised whenever a digest covers something else than before."""
STORE: Final = Path(__file__).resolve().parents[2] / "build" / "machine_code"
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
    """What decides the machine code of a source beside the source: comparisons need it to be equal.

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


def sources(module: str) -> list[Path]:
    """The files that `module` imports, itself and those that they import among them, as far as they lie beside it.

    Read off the syntax trees, imports inside of functions included, those for types alone not. Of packages
    the `__init__.py` counts where the package itself is named.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"module: got {module}; needs one that can be imported from a source file")
    file = Path(spec.origin).resolve()
    root = file.parents[module.count(".")]
    found: set[Path] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        for file in _files(root, name):
            if file not in found:
                found.add(file)
                todo += _imports(file, name)
    return sorted(found)


def _files(root: Path, module: str) -> list[Path]:
    """A module's source, where it is below `root`."""
    path = root.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def _imports(file: Path, module: str) -> list[str]:
    """What a file names in imports; "from a import b" is a.b too, which may be a module."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names = []
    todo: list[ast.AST] = [ast.parse(file.read_bytes())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def _source_digest(module: str) -> str:
    from cute_kernels.runtime import arch, compile

    files = [*sources(module), Path(arch.__file__), Path(compile.__file__)]
    return hashlib.sha256("\n".join(sorted(map(_content_digest, files))).encode()).hexdigest()


@functools.cache
def _content_digest(file: Path) -> str:
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def store_key(spec: KernelSpec) -> str:
    """Name of a spec in the store: the kernel's class, and a digest of all that its code depends on."""
    from cute_kernels.runtime import arch

    module, _, class_name = spec.kernel.partition(":")
    facts = (
        repr(spec),
        spec.kernel,
        getattr(spec, "compile_options", ""),
        arch.ARCH,
        _source_digest(module),
        sorted(toolchain().items()),
        sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k != "CUTE_DSL_ARCH"),
    )
    return f"{class_name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


# ---- the store


@dataclass(frozen=True)
class Store:
    """Facts about compiled specs, a JSON file each, shared by processes: none compiles what another has or is at."""

    root: Path = STORE

    def get(self, spec: KernelSpec, kind: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The facts of one kind about a spec; made under a lock where they are not there, or not whole."""
        file = self.root / f"{store_key(spec)}.{kind}.json"
        known = _read(file)
        if known is None:
            with self._lock(store_key(spec)):
                known = _read(file)  # whoever had the lock may have made them
                if known is None:
                    known = dict(make())
                    self.put(spec, kind, known)
        return known

    def put(self, spec: KernelSpec, kind: str, facts: Mapping[str, Any]) -> None:
        """Keeps facts; a reader sees all of them or none."""
        self.root.mkdir(parents=True, exist_ok=True)
        file = self.root / f"{store_key(spec)}.{kind}.json"
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({**facts, "spec": repr(spec)}, indent=1) + "\n", encoding="utf-8")
        draft.replace(file)

    def has(self, spec: KernelSpec, kind: str) -> bool:
        """Whether there are facts of that kind about a spec."""
        return _read(self.root / f"{store_key(spec)}.{kind}.json") is not None

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{name}.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def digest_of_spec(spec: KernelSpec, store: Store | None = None) -> CodeDigest:
    """Digest of a spec's code; compiled where the store has none, which needs no GPU.

    Raises:
        ValueError: the spec cannot be built.
    """
    from cute_kernels.runtime.compile import compile_kernel

    facts = (store or Store()).get(spec, "digest", lambda: asdict(digest_of_compiled(compile_kernel(spec))))
    return CodeDigest(facts["sass"], facts["launch"])


def digests_of_specs(
    specs: Iterable[KernelSpec], store: Store | None = None, processes: int | None = None
) -> dict[KernelSpec, CodeDigest]:
    """`digest_of_spec` of several; what is missing is compiled in new interpreters, one per CPU core at a time.

    A script calls it under `if __name__ == "__main__"`.
    """
    store, specs = store or Store(), list(dict.fromkeys(specs))
    missing = [spec for spec in specs if not store.has(spec, "digest")]
    if missing:
        workers = min(processes or os.cpu_count() or 1, len(missing))
        context = multiprocessing.get_context("spawn")  # fork would copy the locks and threads of torch and the DSL
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            for done in [pool.submit(digest_of_spec, spec, store) for spec in missing]:
                done.result()
    return {spec: digest_of_spec(spec, store) for spec in specs}


def precompile(specs: Iterable[KernelSpec], store: Store | None = None, processes: int | None = None) -> None:
    """As `cute_kernels.runtime.compile.precompile`, and keeps the digests: each spec is compiled once for both."""
    from cute_kernels.runtime.cache import DiskCache, directory, entry_name

    store, disk = store or Store(), DiskCache(directory())
    missing = [
        spec for spec in dict.fromkeys(specs) if not disk.exists(entry_name(spec)) or not store.has(spec, "digest")
    ]
    if not missing:
        return
    workers = min(processes or os.cpu_count() or 1, len(missing))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in [pool.submit(_fill_both, spec, store) for spec in missing]:
            done.result()


def _fill_both(spec: KernelSpec, store: Store) -> None:
    from cute_kernels.runtime.cache import DiskCache, directory, entry_name
    from cute_kernels.runtime.compile import compile_kernel

    disk, name = DiskCache(directory()), entry_name(spec)
    with disk.lock(name) as writable:
        if disk.exists(name) and store.has(spec, "digest"):
            return
        compiled = compile_kernel(spec)
        store.put(spec, "digest", asdict(digest_of_compiled(compiled)))
        if writable and not disk.exists(name):
            disk.store(name, lambda path, symbol: compiled.export_to_c(path, function_name=symbol))


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
