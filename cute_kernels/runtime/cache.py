"""Compiled kernels on disk: their names, and how processes share a directory of them without trusting each other.

An entry is one file, `<class>-<digest>.so`. It is self-contained and has no Python in it: loading it needs neither
cutlass nor a compiler. If no C compiler can link it, it is the object file `<class>-<digest>.o`, and loading that
imports cutlass.

- A writer works in a scratch directory and renames the finished file, so a reader sees a whole file or none.
- The last 40 bytes are a SHA-256 digest of the rest and a mark (any bytes may follow an ELF file). An entry that does
  not match its digest is built again. An entry that matches but cannot be loaded stays: each process that fails to load
  it compiles its own kernel.
- Each entry has a lock file, so the second of two builders waits for the first. The operating system drops the lock of
  a killed process; the next holder removes the scratch directory that it left. A builder that waits in vain for a
  minute builds without the lock.
- An entry is code that runs in this process. It is read, checked and loaded only where nobody but this user and root
  can have written it (runtime/trust.py). It is read once; the bytes that are checked are the bytes that are loaded.
- Entries of other sources or versions are never read. Deleting the directory is always safe.

The lock is `fcntl.flock` on a file that runtime/trust.py has opened, not the package filelock. `FileLock` of filelock
4.2 opens the path itself and accepts a lock file of another user outside of sticky directories; its `lock_descriptor`
takes an open file, but replaces this one call alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cute_kernels.runtime import arch, trust
from cute_kernels.runtime.sources import FORMATS_PACKAGE, modules_of_kernel, sources

PACKAGE = Path(__file__).resolve().parents[1]
PATIENCE_S = 60
"""Seconds that a builder waits for another one; the slowest kernels take 10 s of a core."""
_MARK = b"cutekrnl"

# The DSL's settings that change what it prints or keeps, or where it looks, but not the code. The key has the others.
_HARMLESS_SETTINGS = {
    "CUTE_DSL_" + name
    for name in (
        "ARCH",  # the option --gpu-arch has precedence, and it is in the key
        "CACHE_DIR",
        "DISABLE_FILE_CACHING",
        "DUMP_DIR",
        "ENABLE_OPTIMIZATION_WARNINGS",
        "FILTER_STACKTRACE",
        "JIT_CACHE_MAX_ELEMS",
        "JIT_TIME_PROFILING",
        "KEEP",
        "KEEP_CUBIN",
        "KEEP_IR",
        "KEEP_PTX",
        "LIBS",  # the flavour is in the key
        "LOG_LEVEL",
        "LOG_TO_CONSOLE",
        "LOG_TO_FILE",
        "NO_CACHE",
        "PRINT_AFTER_PREPROCESSOR",
        "PRINT_IR",
        "SHOW_STACKTRACE",
        "WARNINGS_IGNORE",
    )
}

_CPU_INFO = Path("/proc/cpuinfo")
# Names of instructions that LLVM chooses by itself, as /proc/cpuinfo has them; its other names change no code.
_USED_BY_COMPILERS = re.compile("abm|adx|amx|apx|avx|bmi|cx16|f16c|fma|gfni|lahf|movbe|pni|popcnt|sse|ssse|tbm|xop")

_warned_about: set[Path] = set()


class KernelSpec(Protocol):
    """Compile-time facts of a kernel: a frozen dataclass whose repr names every field, with these two members.

    It may also have `compile_options: str`, further options of `cute.compile`, and `expected`: limits of the compiled
    kernel, which tests check.
    """

    @property
    def kernel(self) -> str:
        """The kernel class as "module:class". It is imported only to compile the kernel."""

    def can_implement(self) -> list[str]:
        """Returns the reasons, in words, why this kernel cannot be built; empty when it can."""


def directory() -> Path:
    """Returns the directory: $CUTE_KERNELS_CACHE_DIR, else $XDG_CACHE_HOME/cute_kernels, else ~/.cache/cute_kernels."""
    if chosen := os.environ.get("CUTE_KERNELS_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user without a home: nothing can be stored below /dev/null, and the cache says so
        base = os.devnull
    return Path(base) / "cute_kernels"


def entry_name(spec: KernelSpec) -> str:
    """Returns the name of a spec's entry, without suffix: kernel class and digest of all that its code depends on."""
    facts = (
        repr(spec),
        spec.kernel,
        getattr(spec, "compile_options", ""),
        arch.ARCH,
        source_digest(*_modules(spec)),
        _toolchain(),
        _processor(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in _HARMLESS_SETTINGS),
    )
    return f"{spec.kernel.partition(':')[2]}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


@functools.cache
def kernel_sources(*modules: str) -> tuple[Path, ...]:
    """Returns the source files that can change the kernels of `modules`: their imports and the compiler's code."""
    compiler = (PACKAGE / "runtime" / "arch.py", PACKAGE / "runtime" / "compile.py")
    return tuple(sorted({*sources(*modules), *compiler}))


def _modules(spec: KernelSpec) -> tuple[str, ...]:
    return modules_of_kernel(spec.kernel, type(spec).__module__)


def _sha(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _package_files() -> list[Path]:
    formats = importlib.util.find_spec(FORMATS_PACKAGE)
    others = Path(formats.origin).resolve().parent.glob("*.py") if formats and formats.origin else ()
    return [*PACKAGE.rglob("*.py"), *others]


_found = {file: _sha(file) for file in _package_files()}
"""Digests of source files, as this process first found them.

The package's own files are digested now (5 ms for all): a spec is imported long before its kernel, and in between
somebody may install another version.
"""


@functools.cache
def source_digest(*modules: str) -> str:
    """Returns the SHA-256 of names and contents of `kernel_sources(*modules)`, as this process first found them."""
    digest = hashlib.sha256()
    for file in kernel_sources(*modules):
        if file not in _found:
            _found[file] = _sha(file)
        name = file.relative_to(PACKAGE) if PACKAGE in file.parents else file.name
        digest.update(f"{name}\0".encode() + _found[file])
    return digest.hexdigest()


def require_unchanged(spec: KernelSpec) -> None:
    """Checks, after a kernel is compiled, that its sources and its compiler are still those of its entry's name.

    Raises:
        RuntimeError: files were replaced while this process ran, so the kernel that it compiled belongs to no version.
    """
    # the list of files is that of the entry's name: parsing 32 syntax trees again would take 0.1 s
    changed = [str(file) for file in kernel_sources(*_modules(spec)) if _is_changed(file)]
    if _toolchain.__wrapped__() != _toolchain():
        changed.append("the compiler")
    if changed:
        raise RuntimeError(f"the package was changed under this process: restart it (changed: {', '.join(changed)})")


def _is_changed(file: Path) -> bool:
    try:
        return _found.get(file) != _sha(file)
    except OSError:
        return True  # the file is gone


@functools.cache
def _toolchain() -> tuple[str, ...]:
    versions = []
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            raise RuntimeError(f"kernels need the package {package}, which is not installed") from None
    # cu12 and cu13 have different versions of ptxas; the host code in the object is for this machine's processor
    return (*versions, runtime_library().parents[1].name, sysconfig.get_platform())


@functools.cache
def _processor() -> tuple[str, ...]:
    """Features of this machine's processor that compilers may use: the host code of an entry uses all of them."""
    try:
        info = _CPU_INFO.read_text()
    except OSError:
        return ()
    flags = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    return tuple(sorted(flag for flag in (flags[1].split() if flags else ()) if _USED_BY_COMPILERS.match(flag)))


@functools.cache
def runtime_library() -> Path:
    """Finds libcute_dsl_runtime.so of the flavour that the DSL would choose (cu12, cu13), without importing the DSL.

    Raises:
        RuntimeError: it is not installed.
    """
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(package.submodule_search_locations or ()) if package else []
    found = {int(p.parents[1].name[2:]): p for r in roots for p in Path(r).glob("cu[0-9]*/lib/libcute_dsl_runtime.so")}
    if not found:
        raise RuntimeError(f"libcute_dsl_runtime.so of nvidia-cutlass-dsl was not found below {roots or 'sys.path'}")
    if len(found) == 1:
        return next(iter(found.values()))
    newest = _driver_cuda_major()  # the DSL's rule: the newest flavour that the driver can run
    return found[max((major for major in found if newest is None or major <= newest), default=min(found))]


def _driver_cuda_major() -> int | None:
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


@dataclass(frozen=True)
class DiskCache:
    """Entries in the directory `root`, which is created by the first store."""

    root: Path

    def exists(self, name: str) -> bool:
        """Whether there is an entry, intact or not."""
        return any(os.path.lexists(self.root / (name + suffix)) for suffix in _LOADERS)

    def load(self, name: str) -> Callable[..., Any] | None:
        """Returns the kernel, or None without an intact entry. Warns if the entry cannot be trusted or loaded."""
        for path, data in self._intact(name):
            try:
                with trust.private_path(data, path.suffix, self.root) as private:
                    return _LOADERS[path.suffix](private, _symbol(name))
            except (OSError, RuntimeError, AttributeError, ValueError) as error:
                # the failure may be this process's own, such as too many open files: the entry stays
                self._warn(
                    f"{path} is intact, but cannot be loaded here ({error}), so this process compiles its own", path
                )
        return None

    def is_intact(self, name: str) -> bool:
        """Whether `load` finds something to load. Warns of a damaged entry, which the next `store` replaces."""
        return any(True for _ in self._intact(name, warn=True))

    def _intact(self, name: str, warn: bool = False) -> Iterator[tuple[Path, bytes]]:
        """Yields the files of an entry that can be trusted and match their digests, and their contents."""
        try:
            trust.check_directory(self.root)
            for suffix in _LOADERS:
                path = self.root / (name + suffix)
                try:
                    with open(trust.open_file(path, os.O_RDONLY), "rb") as file:
                        data = file.read()
                except trust.Untrusted:
                    raise
                except OSError:
                    continue  # absent, or unreadable
                if _is_sealed(data):
                    yield path, data
                elif warn:
                    self._warn(f"{path} is damaged, so it is compiled again", path)
        except trust.Untrusted as refusal:
            self._warn_untrusted(refusal)
        except OSError:
            pass  # no directory

    def is_writable(self, name: str) -> bool:
        """Whether the entry can be stored; warns once if not, as `lock` does."""
        handle = self._open_lock(name)
        if handle is None:
            return False
        handle.close()
        return self._may_replace(name)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Holds the entry's lock, after waiting for it if necessary. Yields whether the entry can be stored.

        If it cannot be stored (a read-only directory, no home, an entry or a lock that another user may have made),
        this warns once and yields False. After `PATIENCE_S` of waiting it warns and goes on without the lock: two
        processes may then build one entry, and the later one stays.
        """
        import fcntl  # only Unix has it, and only a process that compiles needs it

        handle = self._open_lock(name)
        if handle is None:
            yield False
            return
        with handle:
            held = self._acquire(handle, name)
            try:
                if held:
                    self._remove_scratch(name)
                yield self._may_replace(name)
            finally:
                if held:  # a fork of this process inherits the open file, and closing it here would not release it
                    fcntl.flock(handle, fcntl.LOCK_UN)

    def _open_lock(self, name: str) -> BinaryIO | None:
        try:
            trust.make_directory(self.root)
            return open(trust.open_file(self.root / f"{name}.lock", os.O_RDWR | os.O_CREAT), "rb")
        except trust.Untrusted as refusal:
            self._warn_untrusted(refusal)
        except OSError as error:
            self._warn_unwritable(error)
        return None

    def _acquire(self, handle: BinaryIO, name: str) -> bool:
        import fcntl

        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > give_up:
                    path = self.root / f"{name}.lock"
                    self._warn(f"{path} was not free for {PATIENCE_S} s, so this process goes on without it", path)
                    return False
                time.sleep(0.05)
            except OSError:
                return False  # a file system without locks

    def _remove_scratch(self, name: str) -> None:
        for scratch in self.root.glob(f".{name}.*"):  # scratch directories of builders that were killed
            if scratch.is_symlink():
                with contextlib.suppress(OSError):  # a directory that may only be read
                    scratch.unlink()
            else:
                shutil.rmtree(scratch, ignore_errors=True)  # rmtree follows no links

    def _may_replace(self, name: str) -> bool:
        """Whether no entry exists, or this user or root owns it. An entry of another user is left as it is."""
        for suffix in _LOADERS:
            try:
                os.close(trust.open_file(self.root / (name + suffix), os.O_RDONLY))
            except trust.Untrusted as refusal:
                self._warn_untrusted(refusal)
                return False
            except OSError:
                continue  # absent, or unreadable
        return True

    def store(self, name: str, export: Callable[[str, str], None]) -> bool:
        """Adds an entry; False, with one warning, when the directory cannot be written. Call it with the lock held.

        Args:
            name: name of the entry.
            export: called with a path and a symbol; writes an object file there that defines the kernel as that symbol.
        """
        try:
            with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=self.root) as scratch:
                object_file = Path(scratch) / "kernel.o"
                export(str(object_file), _symbol(name))
                built = _link(object_file) or object_file
                data = built.read_bytes()
                built.write_bytes(data + hashlib.sha256(data).digest() + _MARK)
                built.chmod(0o644)  # with a umask of 0 or 002 it would not be trusted
                os.replace(built, self.root / (name + built.suffix))
        except OSError as error:
            self._warn_unwritable(error)
            return False
        return True

    def _warn_unwritable(self, error: OSError) -> None:
        self._warn_once(f"compiled kernels cannot be kept in {self.root} ({error}), so every process compiles its own")

    def _warn_untrusted(self, refusal: trust.Untrusted) -> None:
        remedy = f"; mend it with `{refusal.remedy}`" if refusal.remedy else ""
        self._warn_once(
            f"{refusal}, so it is not used for compiled kernels, and every process compiles its own{remedy}"
        )

    def _warn_once(self, text: str) -> None:
        self._warn(f"{text}; CUTE_KERNELS_CACHE_DIR names another directory", self.root)

    def _warn(self, text: str, about: Path) -> None:
        """Warns once per file or directory."""
        if about not in _warned_about:
            _warned_about.add(about)
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def _symbol(name: str) -> str:
    return name.replace("-", "_")  # each entry has its own symbol: a file under another name does not load


def _is_sealed(data: bytes) -> bool:
    body, digest, mark = data[:-40], data[-40:-8], data[-8:]
    return mark == _MARK and hashlib.sha256(body).digest() == digest


def _link(object_file: Path) -> Path | None:
    """Returns a shared library made from the object file, beside it; None without a working C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    import tvm_ffi

    library = object_file.with_suffix(".so")
    needed = [str(runtime_library()), tvm_ffi.libinfo.find_libtvm_ffi()]
    result = subprocess.run([compiler, "-shared", "-o", library, object_file, *needed], capture_output=True, text=True)
    return library if result.returncode == 0 else None


def _load_shared(path: Path, symbol: str) -> Callable[..., Any]:
    import tvm_ffi

    _load_runtime_library()
    return tvm_ffi.load_module(str(path)).get_function(symbol)


def _load_object(path: Path, symbol: str) -> Callable[..., Any]:
    arch.import_dsl()
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), symbol)


@functools.cache
def _load_runtime_library() -> ctypes.CDLL:
    # an entry names the runtime library by its SONAME, which the loader resolves to a copy that is already loaded
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


_LOADERS: dict[str, Callable[[Path, str], Callable[..., Any]]] = {".so": _load_shared, ".o": _load_object}
