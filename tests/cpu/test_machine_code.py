"""Digests of machine code outlive whatever changes no instruction, and nothing else."""

import functools
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import launch_code, machine_code
from bench.cubin import _Elf, find_cubins, read_kernels
from bench.machine_code import CodeDigest, Store
from cute_kernels.runtime import cache
from tests.cpu.tiny_spec import TinySpec

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).with_name("tiny_kernel.py").read_text()


@dataclass(frozen=True)
class CopiedSpec(TinySpec):
    """Of a kernel whose source a test has changed."""

    place: str = "copied_kernel:TinyKernel"

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.place


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compiles a changed source of the tiny kernel, out of a directory and a module of its own."""
    made: list[str] = []
    cache.source_digest.cache_clear()  # another test has had other modules of these names

    def digest(source: str, class_name: str = "TinyKernel", **facts: Any) -> CodeDigest:
        name = f"copied_kernel_{len(made)}"
        folder = tmp_path / "somewhere" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        made.append(name)
        spec = CopiedSpec(**facts, place=f"{name}:{class_name}")
        return Store(tmp_path / "store").digest(spec)

    yield digest
    for name in made:
        sys.modules.pop(name, None)


@functools.cache
def tiny() -> machine_code.Compiled:
    return Store().compiled(TinySpec())


def changed(*changes: tuple[str, str]) -> str:
    source = TINY
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def test_names_lines_and_directories_change_no_digest(digest_of: Any) -> None:
    renamed = changed(
        ("class TinyKernel", "# a comment, which moves all lines below\n\n\nclass Renamed"),
        ("tid, _, _", "thread, _, _"),
        ("tid]", "thread]"),
        ("tid)", "thread)"),
        ("tid %", "thread %"),
        ("_kernel(", "_device_code("),
        ("alpha", "factor"),
        ("mY", "mOut"),
    )
    assert digest_of(renamed, "Renamed") == tiny().digest


@pytest.mark.parametrize(
    "changes, sass, launch",
    [
        ([("mX[row, tid] * alpha", "mX[row, tid] * alpha * 3.0")], True, False),
        ([("mX[row, tid] * alpha", "mX[row, 5] * alpha")], True, False),
        ([("stream=stream)", "stream=stream, use_pdl=True)")], False, True),
        ([("stream=stream)", "stream=stream, smem=4096)")], False, True),
        ([("grid=[mX.shape[0], 1, 1]", "grid=[1, mX.shape[0], 1]")], False, True),
        ([("self._kernel(mX, mY, alpha)", "self._kernel(mY, mX, alpha)")], False, True),
        ([("divisibility=4), 1), assumed_align=16", "divisibility=4), 1), assumed_align=4")], None, True),
    ],
    ids=["constant", "address", "dependent launch", "shared memory", "grid", "order of arguments", "what is checked"],
)
def test_what_is_executed_or_launched_changes_a_digest(
    changes: list[tuple[str, str]], sass: bool | None, launch: bool, digest_of: Any
) -> None:
    found = digest_of(changed(*changes))
    if sass is not None:
        assert (found.sass != tiny().digest.sass) is sass
    assert (found.launch != tiny().digest.launch) is launch


def test_a_block_is_in_both(digest_of: Any) -> None:
    found = digest_of(TINY, width=64)
    assert found.sass != tiny().digest.sass and found.launch != tiny().digest.launch


def test_an_object_file_has_the_digest_of_what_it_was_made_from(tmp_path: Path) -> None:
    kernel, compiled = machine_code._compile(TinySpec())
    kernel.export_to_c(str(tmp_path / "kernel.o"), function_name="tiny")
    assert machine_code.sass_of_entry(tmp_path / "kernel.o") == compiled.digest.sass == tiny().digest.sass


def test_one_compilation_fills_both_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TINY_KERNEL_LOG", str(log))
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    store = Store(tmp_path / "store")
    machine_code._fill(TinySpec(), store)
    assert machine_code.digest_of_entry(TinySpec(), store) == tiny().digest
    machine_code._fill(TinySpec(), store)
    store.compiled(TinySpec())
    assert len(log.read_text().split()) == 1
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="no kernel at"):
        machine_code.digest_of_entry(TinySpec(), store)


# --- cubins


def test_every_word_of_the_code_counts() -> None:
    (cubin,) = tiny().cubins
    (kernel,) = read_kernels(cubin)
    code = _Elf(cubin).section(f".text.{kernel.name}")
    assert code is not None
    start = cubin.index(code.data)
    for place in (start, start + code.size - 1):
        damaged = bytearray(cubin)
        damaged[place] ^= 1
        (other,) = read_kernels(bytes(damaged))
        assert other.name == kernel.name and other.digest != kernel.digest


def test_cubins_are_found_in_what_embeds_them() -> None:
    (cubin,) = tiny().cubins
    assert find_cubins(b"before" + cubin + b"between" + cubin + b"\x7fELF") == [cubin, cubin]
    with pytest.raises(ValueError, match="got 9 bytes without a cubin"):
        find_cubins(b"no cubin!")


def test_a_module_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="got functions other; needs one that launches"):
        launch_code.normal_form("  llvm.func @other(%arg0: i32) {\n    llvm.return\n  }\n", {})


# --- the store


def test_what_is_compiled_is_not_compiled_again_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports compile, and the record asks for digests: in one store that is one compilation."""
    store = Store(tmp_path / "store")
    compiled = store.compiled(TinySpec())
    monkeypatch.setattr(machine_code, "_compile", lambda spec: pytest.fail("compiled again"))
    assert not store.knows(TinySpec())
    assert store.digest(TinySpec()) == compiled.digest and store.knows(TinySpec())


def test_what_is_traced_alike_is_not_compiled_again(digest_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name is; another number, and another demand on an argument, are not."""
    known = digest_of(TINY)
    monkeypatch.setattr(machine_code, "digest_of_module", lambda module: CodeDigest("compiled", "again"))
    names = (("class TinyKernel", "class Renamed"), ("tid, _, _", "thread, _, _"), ("tid]", "thread]"))
    assert digest_of(changed(*names, ("tid)", "thread)"), ("tid %", "thread %")), "Renamed") == known
    assert digest_of(changed(("* alpha", "* alpha * 2.0"))).sass == "compiled"
    assert digest_of(changed(("assumed_align=16", "assumed_align=32"))).sass == "compiled"
    assert digest_of(changed(("for _ in range(2)", "for rows in (rows, cute.sym_int())"))).sass == "compiled"


def test_keys_name_spec_and_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    key = machine_code.store_key(TinySpec())
    assert key == machine_code.store_key(TinySpec()) != machine_code.store_key(TinySpec(64))
    other = {**machine_code.toolchain(), "compilers": "13.9.9"}
    monkeypatch.setattr(machine_code, "toolchain", lambda: other)
    assert machine_code.store_key(TinySpec()) != key


def test_the_toolchain_names_its_compilers() -> None:
    found = machine_code.toolchain()
    assert set(found) == {"cutlass_dsl", "cuda", "compilers", "normal_form"}
    assert found["cuda"] in ("cu12", "cu13")
    assert all(version[0].isdigit() for version in found["compilers"].split())


def test_half_a_file_is_not_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(TinySpec(), tiny())
    file = store._file(TinySpec(), "digest")
    file.write_text(file.read_text()[:20])
    assert not store.knows(TinySpec())
    assert store.digest(TinySpec()) == tiny().digest  # out of the cubins' file, without a compiler
    assert store.knows(TinySpec())


def test_old_cubins_go_and_digests_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(TinySpec(), tiny())
    store.prune()
    assert len(list(tmp_path.iterdir())) == 2
    store.prune(days=-1)
    assert [file.name.split(".")[1] for file in tmp_path.iterdir()] == ["digest"]
