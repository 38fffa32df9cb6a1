"""The compiler and its disk cache compile each kernel once for all processes, even if files are damaged."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import cache, compile, trust, workers
from cute_kernels.runtime.cache import DiskCache, entry_name
from tests.cpu.tiny_spec import TinySpec, fill_without_torch
from tests.kit.kernel_place import Place

SPEC = TinySpec()
ROOT = cache.PACKAGE.parent

GET = """
import sys
from cute_kernels.runtime.compile import get_kernel
from tests.cpu.tiny_spec import TinySpec
kernel = get_kernel(TinySpec())
print("cutlass" if "cutlass" in sys.modules else "no cutlass", "tests.cpu.tiny_kernel" in sys.modules, callable(kernel))
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A cache that two processes filled at the same time."""
    base = tmp_path_factory.mktemp("filled")
    here = Place(base / "cache", base / "log")
    processes = [here.start(GET) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    return here


def remember_nothing() -> None:
    compile._kernels.clear()


# --- processes


def test_processes_that_start_together_compile_once(filled: Place) -> None:
    assert filled.compilations() == 1
    assert filled.files() == [entry_name(SPEC) + ".so"]


def test_warm_start_compiles_nothing_and_imports_no_cutlass(filled: Place) -> None:
    assert filled.run(GET).split() == ["no", "cutlass", "False", "True"]
    assert filled.compilations() == 1


def test_killed_writer_leaves_nothing_that_is_read_or_kept(place: Place) -> None:
    killed = place.start("import os, signal\nos.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n" + GET)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = place.files()
    assert leftover.startswith(f".{entry_name(SPEC)}.")

    compile.get_kernel(SPEC)
    assert place.compilations() == 2
    assert place.files() == [entry_name(SPEC) + ".so"]


def test_waits_for_the_builder_that_holds_the_lock(place: Place, filled: Place) -> None:
    """The second builder compiles nothing and takes what the first one wrote while it waited."""
    disk, name = DiskCache(place.directory), entry_name(SPEC)
    found: list[Any] = []
    with disk.lock(name) as writable:
        assert writable
        waiting = threading.Thread(target=lambda: found.append(compile.get_kernel(SPEC)))
        waiting.start()
        time.sleep(0.2)
        assert not found
        (place.directory / f"{name}.so").write_bytes((filled.directory / f"{name}.so").read_bytes())
    waiting.join(timeout=60)
    assert found and place.compilations() == 0


def test_a_process_that_compiles_imports_no_torch(place: Place) -> None:
    """The import would take as long as a small kernel."""
    workers.call_each(fill_without_torch, [TinySpec(32)], 1, lambda spec: None)
    assert place.compilations() == 1


# --- locks


def test_a_fork_does_not_keep_the_lock(place: Place) -> None:
    """The child inherits the open file, as a DataLoader's worker does, and lives on."""
    disk = DiskCache(place.directory)
    with disk.lock("Kernel-1") as writable:
        assert writable
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        code = "from cute_kernels.runtime.cache import *\nwith DiskCache(directory()).lock('Kernel-1'): print('held')"
        process = place.start(code)
        assert process.communicate(timeout=30)[0] == "held\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_that_never_comes_free_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock's holder hangs, the kernel is compiled and kept, and the holder's unfinished files stay."""
    name = entry_name(SPEC)
    monkeypatch.setattr(cache, "PATIENCE_S", 0.2)
    with DiskCache(place.directory).lock(name):
        scratch = place.directory / f".{name}.begun"
        scratch.mkdir()
        with pytest.warns(RuntimeWarning, match=f"{name}.lock was not free for 0.2 s"):
            assert callable(compile.get_kernel(SPEC))
        assert scratch.exists()
    assert place.files() == [f".{name}.begun", f"{name}.so"]


# --- threads


def test_threads_compile_once(place: Place) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compile.get_kernel(SPEC))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert place.compilations() == 1
    assert len(found) == 8 and len({id(kernel) for kernel in found}) == 1


def test_second_call_looks_nowhere(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile.get_kernel(SPEC)
    monkeypatch.setattr(compile, "_load_or_compile", lambda spec: pytest.fail("the kernel was in memory"))
    assert compile.get_kernel(TinySpec()) is kernel


# --- damage

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "no checksum": lambda data: data[:-40],
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_not_loaded(place: Place, filled: Place, damage: str) -> None:
    name = entry_name(SPEC)
    assert DiskCache(filled.directory).load(name) is not None
    place.directory.mkdir()
    data = (filled.directory / f"{name}.so").read_bytes()
    (place.directory / f"{name}.so").write_bytes(DAMAGE[damage](data))
    assert DiskCache(place.directory).load(name) is None


def test_damaged_entry_is_replaced(place: Place, filled: Place) -> None:
    name = entry_name(SPEC)
    place.directory.mkdir()
    entry = place.directory / f"{name}.so"
    entry.write_bytes(DAMAGE["one bit"]((filled.directory / f"{name}.so").read_bytes()))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        compile.get_kernel(SPEC)
    assert place.compilations() == 1
    remember_nothing()
    compile.get_kernel(SPEC)
    assert place.compilations() == 1


def test_intact_entry_that_cannot_be_loaded_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have run out of file handles, lack a library, or be in a sandbox that forbids a system call."""
    compile.get_kernel(SPEC)
    (entry,) = place.directory.glob("*.so")
    before = (entry.stat().st_ino, entry.read_bytes())
    remember_nothing()

    def fail() -> int:
        raise OSError(24, "Too many open files", "memfd_create")

    with monkeypatch.context() as patch:
        patch.setattr(trust, "_memory_file", fail)
        with pytest.warns(RuntimeWarning, match=f"{entry} is intact, but cannot be loaded here .*Too many open files"):
            assert callable(compile.get_kernel(SPEC))
    assert place.compilations() == 2 and (entry.stat().st_ino, entry.read_bytes()) == before
    remember_nothing()
    compile.get_kernel(SPEC)
    assert place.compilations() == 2


@pytest.mark.parametrize("error", [RuntimeError("no symbol"), AttributeError("no function"), ValueError("no ELF file")])
def test_entry_that_the_loader_refuses_stays(
    place: Place, filled: Place, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry_name(SPEC)
    place.directory.mkdir()
    entry = place.directory / f"{name}.so"
    entry.write_bytes((filled.directory / f"{name}.so").read_bytes())

    def refuse(path: Path, symbol: str) -> Callable[..., Any]:
        raise error

    monkeypatch.setitem(cache._LOADERS, ".so", refuse)
    with pytest.warns(RuntimeWarning, match="is intact, but cannot be loaded here"):
        assert DiskCache(place.directory).load(name) is None
        assert DiskCache(place.directory).is_intact(name)


def test_entry_under_another_name_is_not_loaded(place: Place, filled: Place) -> None:
    other = entry_name(TinySpec(64))
    place.directory.mkdir()
    (place.directory / f"{other}.so").write_bytes((filled.directory / f"{entry_name(SPEC)}.so").read_bytes())
    with pytest.warns(RuntimeWarning, match="cannot be loaded here"):
        assert DiskCache(place.directory).load(other) is None


# --- places where nothing can be kept


def test_unwritable_directory_means_memory_and_one_warning(place: Place) -> None:
    place.directory.write_text("a file where the directory should be")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for width in (32, 64):
            assert callable(compile.get_kernel(TinySpec(width)))
        compile.precompile([TinySpec(96)])
    assert [w.category for w in said if "cannot be kept" in str(w.message)] == [RuntimeWarning]
    assert place.compilations() == 2
    compile.get_kernel(TinySpec(32))
    assert place.compilations() == 2


def test_directory_that_turns_read_only_means_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "TemporaryDirectory", refuse)
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert callable(compile.get_kernel(SPEC))
    assert place.files() == []


def test_read_only_directory_still_serves(place: Place, filled: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(filled.directory))
    monkeypatch.setattr(DiskCache, "lock", lambda *_: pytest.fail("a warm start takes no lock"))
    assert callable(compile.get_kernel(SPEC))
    assert place.compilations() == 0


def test_no_c_compiler_means_object_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "which", lambda name: None)
    compile.get_kernel(SPEC)
    assert place.files() == [entry_name(SPEC) + ".o"]
    remember_nothing()
    assert callable(compile.get_kernel(SPEC))
    assert place.compilations() == 1


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"CUTE_KERNELS_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"CUTE_KERNELS_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, "/b/cute_kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/x"}, "/home/x/.cache/cute_kernels"),
        ({"HOME": "/home/x"}, "/home/x/.cache/cute_kernels"),
    ],
)
def test_directory(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUTE_KERNELS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert cache.directory() == Path(expected)


def test_user_without_a_home_keeps_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match="cannot be kept in /dev/null/cute_kernels"):
        assert callable(compile.get_kernel(SPEC))


# --- compiling


def test_spec_that_cannot_be_built_says_why(place: Place) -> None:
    with pytest.raises(ValueError, match=r"no kernel can be built: width is 100") as raised:
        compile.get_kernel(TinySpec(100))
    assert "TinySpec" not in str(raised.value), "the text of a spec is not for users"
    assert place.compilations() == 0 and place.files() == []


def test_target_is_pinned_before_cutlass_is_imported(tmp_path: Path) -> None:
    here = Place(tmp_path / "cache", tmp_path / "log")
    code = """
from cute_kernels.runtime import arch
arch.pin()
from cutlass.cutlass_dsl import CuTeDSL
print(CuTeDSL._get_dsl().envar.arch)
arch.pin()
"""
    assert here.run(code, CUTE_DSL_ARCH="sm_80").split() == ["sm_90a"]


def test_cutlass_imported_for_another_target_is_an_error(tmp_path: Path) -> None:
    here = Place(tmp_path / "cache", tmp_path / "log")
    process = here.start("import cutlass\n" + GET, CUTE_DSL_ARCH="sm_100a")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RuntimeError: cutlass was imported with the target sm_100a" in err and "CUTE_DSL_ARCH=sm_90a" in err
