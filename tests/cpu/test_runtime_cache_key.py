"""The name of a cache entry: what it depends on, and what happens if that changes while a process runs."""

import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from cute_kernels.merge.spec import MergeSpec
from cute_kernels.runtime import cache
from cute_kernels.runtime.cache import entry_name
from cute_kernels.runtime.sources import modules_of_kernel
from tests.cpu.tiny_spec import TinySpec
from tests.kit.kernel_place import Place

SPEC = TinySpec()
ROOT = cache.PACKAGE.parent


@dataclasses.dataclass(frozen=True)
class OptimizedSpec(TinySpec):
    """A spec with the fields, name and module of TinySpec but other options."""

    __module__ = TinySpec.__module__
    __qualname__ = "TinySpec"
    compile_options: ClassVar[str] = "--opt-level 2"


@pytest.fixture
def fresh_facts() -> Iterator[None]:
    """Clears digests and versions, which are read once per process and which these tests change."""
    caches = (cache.kernel_sources, cache.source_digest, cache._toolchain, cache.runtime_library, cache._processor)
    found = dict(cache._found)
    for cached in caches:
        cached.cache_clear()
    yield
    cache._found.clear()
    cache._found.update(found)
    for cached in caches:
        cached.cache_clear()


def read_again() -> None:
    """Makes the next lookup read the sources again, as in a new process."""
    cache._found.clear()
    cache.kernel_sources.cache_clear()
    cache.source_digest.cache_clear()


# --- the key


def test_key_follows_spec_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [entry_name(spec) for spec in (SPEC, TinySpec(64), TinySpec(fault="spill"), OptimizedSpec())]
    assert len(set(names)) == 4
    monkeypatch.setattr(OptimizedSpec, "compile_options", "")
    assert entry_name(OptimizedSpec()) == entry_name(SPEC), "not the options alone made the difference"


@pytest.mark.parametrize(
    "variable, changes",
    [
        ("CUTE_DSL_LINEINFO", True),
        ("CUTE_DSL_ENABLE_ASSERTIONS", True),
        ("CUTE_DSL_SOMETHING_NEW", True),
        ("CUTE_DSL_ARCH", False),
        ("CUTE_DSL_PRINT_IR", False),
        ("PATH", False),
    ],
)
def test_key_follows_settings_that_change_code(variable: str, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original = entry_name(SPEC)
    monkeypatch.setenv(variable, os.environ.get(variable, "") + "1")
    assert (entry_name(SPEC) != original) == changes


@pytest.mark.parametrize("package", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_key_follows_versions(package: str, monkeypatch: pytest.MonkeyPatch, fresh_facts: None) -> None:
    original = entry_name(SPEC)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == package else real(name))
    cache._toolchain.cache_clear()
    assert entry_name(SPEC) != original


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, fresh_facts: None) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(RuntimeError, match="nvidia-cutlass-dsl, which is not installed"):
        entry_name(SPEC)


def modules_of(spec: cache.KernelSpec) -> tuple[str, ...]:
    return modules_of_kernel(spec.kernel, type(spec).__module__)


SOURCES = {
    "cute_kernels.mla.kernels.decode": ("mla/spec.py", "device/wgmma.py", "merge/kernels/merge.py"),
    "cute_kernels.mla.crossover.kernels.decode": ("mla/crossover/spec.py", "mla/kernels/scheduler.py"),
    "cute_kernels.gqa.kernels.decode": ("gqa/spec.py", "gqa/kernels/scheduler.py"),
    "cute_kernels.sink.kernels.backward": ("sink/backward_spec.py", "sink/kernels/scheduler.py"),
}


@pytest.mark.parametrize("module", SOURCES)
def test_sources_are_all_that_can_reach_a_kernel(module: str) -> None:
    found = [file.relative_to(ROOT) for file in cache.kernel_sources(module)]
    names = {str(file.relative_to("cute_kernels")) for file in found if file.parts[0] == "cute_kernels"}
    assert {*SOURCES[module], "runtime/arch.py", "runtime/compile.py"} <= names
    assert Path(*module.split(".")).with_suffix(".py") in found
    assert not any(name.endswith(("op.py", "plan.py", "launch.py")) or name.startswith("compat/") for name in names)
    assert (Path("fp8_mla/formats.py") in found) == (".mla." in module), "the bytes of a token"


def test_key_follows_each_source(monkeypatch: pytest.MonkeyPatch, fresh_facts: None) -> None:
    """Each file that the kernel depends on is edited in turn, as far as the cache can tell."""
    spec = MergeSpec.for_launch(rows=64, num_states=2, d=64, in_dtype="float32", out_dtype="float32", has_sink=False)
    names = {entry_name(spec)}
    files = cache.kernel_sources(*modules_of(spec))
    assert {"merge.py", "spec.py", "compile.py"} <= {file.name for file in files}
    read = Path.read_bytes
    for edited in files:
        monkeypatch.setattr(Path, "read_bytes", lambda file, edited=edited: read(file) + b"\n#" * (file == edited))
        read_again()
        names.add(entry_name(spec))
    assert len(names) == 1 + len(files)


def test_sources_are_followed_from_import_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports inside functions count, imports for types alone do not."""
    files = {
        "sample/__init__.py": "",
        "sample/kernel.py": "import math\nfrom sample import part\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from sample.op import f\n",
        "sample/part.py": "def g():\n    from . import late\n    return late\n",
        "sample/late.py": "X = 1\n",
        "sample/op.py": "def f(): ...\n",
        "alone.py": "import sample\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [file.name for file in cache.sources("sample.kernel")] == ["__init__.py", "kernel.py", "late.py", "part.py"]
    assert [file.name for file in cache.sources("alone")] == ["alone.py"]
    sys.modules.pop("sample", None)


def test_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="got module tests.cpu.no_such_kernel"):
        cache.sources("tests.cpu.no_such_kernel")


def test_every_edit_of_a_reaching_source_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_facts: None
) -> None:
    """Names count as well as contents: a constant that moves between two files changes what is imported."""
    files = [tmp_path / name for name in ("a.py", "b.py")]
    monkeypatch.setattr(cache, "sources", lambda module: files)
    digests = set()
    for contents in (("x = 1", "y = 1"), ("x = 1", "y = 2"), ("y = 1", "x = 1"), ("x = 1y = 1", "")):
        for file, content in zip(files, contents, strict=True):
            file.write_text(content)
        read_again()
        digests.add(cache.source_digest("any"))
    assert len(digests) == 4


@pytest.mark.parametrize("driver, flavour", [(None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")])
def test_flavour_is_the_newest_that_the_driver_runs(
    driver: int | None, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_facts: None
) -> None:
    for installed in ("cu12", "cu13"):
        library = tmp_path / "nvidia_cutlass_dsl" / installed / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()
    spec = importlib.machinery.ModuleSpec("nvidia_cutlass_dsl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia_cutlass_dsl")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cache, "_driver_cuda_major", lambda: driver)
    assert cache.runtime_library().parents[1].name == flavour


def test_key_follows_the_flavour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_facts: None) -> None:
    """The packages cu12 and cu13 of one DSL version have different compilers."""
    names = set()
    for flavour in ("cu12", "cu13"):
        library = tmp_path / flavour / "lib" / "libcute_dsl_runtime.so"
        monkeypatch.setattr(cache, "runtime_library", lambda library=library: library)
        cache._toolchain.cache_clear()
        names.add(entry_name(SPEC))
    assert len(names) == 2


CPU_INFO = "processor\t: 0\nflags\t\t: fpu sse2 avx2 bmi2 {}\nbogomips\t: 4000\n\nprocessor\t: 1\nflags\t\t: fpu\n"


@pytest.mark.parametrize("flag, changes", [("avx512f", True), ("f16c", True), ("ibrs", False), ("md_clear", False)])
def test_key_follows_the_processor(
    flag: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_facts: None
) -> None:
    """An entry has host code for the processor that compiled it, and another processor may lack instructions."""
    monkeypatch.setattr(cache, "_CPU_INFO", tmp_path / "cpuinfo")
    names = set()
    for more in ("", flag):
        (tmp_path / "cpuinfo").write_text(CPU_INFO.format(more))
        cache._processor.cache_clear()
        names.add(entry_name(SPEC))
    assert (len(names) == 2) == changes


# --- sources that change under a process

FILES = {
    "changed_spec.py": """
        from dataclasses import dataclass
        from typing import ClassVar
        from tests.cpu.tiny_spec import TinySpec
        @dataclass(frozen=True)
        class Spec(TinySpec):
            kernel: ClassVar[str] = "changed.kernel:Kernel"
    """,
    "kernel.py": """
        from tests.cpu.tiny_kernel import TinyKernel
        from changed import part
        class Kernel(TinyKernel): pass
    """,
    "part.py": "import os\nif os.environ.get('BREAK'): raise ImportError('half of an update')\n",
    "__init__.py": "",
}
CHANGE = """
import pathlib, sys
from changed.changed_spec import Spec
from cute_kernels.runtime import cache, compile
def edit(name, more="# another version\\n"):
    path = pathlib.Path(sys.modules["changed"].__file__).parent / name
    path.write_text(path.read_text() + more)
def get(spec):
    try:
        compile.get_kernel(spec)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a kernel"
"""


@pytest.fixture
def changed(place: Place, tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs code beside its own package `changed` and returns the lines that it prints."""
    (tmp_path / "changed").mkdir()
    for name, text in FILES.items():
        (tmp_path / "changed" / name).write_text(textwrap.dedent(text))

    def run(code: str, **environment: str) -> list[str]:
        return place.run(CHANGE + code, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}", **environment).splitlines()

    return run


RESTART = "RuntimeError: the package was changed under this process: restart it"


def test_sources_that_are_replaced_before_a_kernel_is_imported_are_not_stored(
    place: Place, changed: Callable[[str], list[str]]
) -> None:
    """The name would be that of the old sources, the code that of the new ones. Each file has its own process."""
    files = ("kernel.py", "part.py", "changed_spec.py")
    code = f"""
import os
compile.arch.import_dsl()
for file in {files}:
    child = os.fork()
    if child == 0:
        cache.entry_name(Spec())
        edit(file)
        print(get(Spec()), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(list(cache.directory().glob("*.so")), get(Spec()))
"""
    *said, last = changed(code)
    assert all(line.startswith(RESTART) and file in line for file, line in zip(files, said, strict=True))
    assert last == "[] a kernel" and len(place.files()) == 1


def test_sources_that_are_replaced_between_two_kernels_are_not_stored(
    place: Place, changed: Callable[[str], list[str]]
) -> None:
    """The second kernel would be compiled from modules in memory, which are the old ones."""
    code = "print(get(Spec(32)))\nedit('part.py')\nprint(get(Spec(64)))\nprint(get(Spec(32)))"
    first, second, third = changed(code)
    assert (first, third) == ("a kernel", "a kernel") and second.startswith(RESTART)
    assert len(place.files()) == 1


def test_half_of_an_update_is_what_an_error_is_about(place: Place, changed: Callable[..., list[str]]) -> None:
    code = "cache.entry_name(Spec())\nedit('kernel.py', 'import changed.gone\\n')\nprint(get(Spec()))"
    (said,) = changed(code)
    assert said.startswith(RESTART) and "kernel.py" in said


def test_an_error_of_the_sources_themselves_is_raised_as_it_is(changed: Callable[..., list[str]]) -> None:
    assert changed("print(get(Spec()))", BREAK="1") == ["ImportError: half of an update"]


def test_a_compiler_that_is_replaced_stores_nothing(place: Place, changed: Callable[[str], list[str]]) -> None:
    code = """
import importlib.metadata
cache.entry_name(Spec())
importlib.metadata.version = lambda name: "99"
print(get(Spec()))
"""
    (said,) = changed(code)
    assert said.startswith(RESTART) and "the compiler" in said and place.files() == []


def test_sources_count_as_they_were_when_the_package_was_imported(tmp_path: Path) -> None:
    """A spec is imported with the package but its kernel much later, and so is the source of the first name."""
    for package in ("cute_kernels", "fp8_mla"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import pathlib
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.runtime import cache, compile
file = pathlib.Path(cache.PACKAGE / "merge" / "spec.py")
file.write_text(file.read_text() + "# another version\\n")
spec = MergeSpec.for_launch(rows=64, num_states=2, d=64, in_dtype="float32", out_dtype="float32", has_sink=False)
try:
    compile.get_kernel(spec)
except RuntimeError as error:
    print(error)
"""
    here = Place(tmp_path / "cache", tmp_path / "log")
    said = here.run(code, PYTHONPATH=str(tmp_path))
    assert "restart it" in said and f"{tmp_path}/cute_kernels/merge/spec.py" in said and here.files() == []
