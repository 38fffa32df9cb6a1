"""Finds the machine code that a benchmark ran, and the cases of a record whose code is no longer built.

    python -m bench.kernels_run results/h100.jsonl      marks those cases in the record; compiles what they name

A case of a record names the specs that it ran, each with the digest of `tests.kit.sass`. If a spec has another digest
now, or does not exist any more, the case is an older one, which pages say. The compiler decides machine code as well,
so records of another version of the DSL are not compared.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bench import records
from cute_kernels.runtime import compile, workers
from cute_kernels.runtime.cache import KernelSpec
from tests.kit import sass

SPEC_MODULES = (
    "cute_kernels.mla.spec",
    "cute_kernels.mla.append_spec",
    "cute_kernels.mla.crossover.spec",
    "cute_kernels.merge.spec",
    "cute_kernels.merge.peers_spec",
    "cute_kernels.gqa.spec",
    "cute_kernels.gqa.append_spec",
    "cute_kernels.gqa.gather_spec",
    "cute_kernels.gqa.block_table_spec",
    "cute_kernels.indexer.append_spec",
    "cute_kernels.indexer.score_spec",
    "cute_kernels.indexer.topk_spec",
    "cute_kernels.sink.spec",
    "cute_kernels.sink.backward_spec",
)
MARK = " †"
FOOTNOTE = "† Machine code that is no longer built ran this case; what is built now was not measured."


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that all operators ship: everything that tests/gpu runs except for requests of single tests."""
    return [spec for name in SPEC_MODULES for spec in importlib.import_module(name).shipped_specs()]


class _Noting(dict[KernelSpec, Callable[..., Any]]):
    """The loaded kernels of the process; `asked` gets the specs that calls ask for."""

    def __init__(self, kernels: Mapping[KernelSpec, Callable[..., Any]], asked: Callable[[KernelSpec], None]) -> None:
        super().__init__(kernels)
        self._asked = asked

    def get(self, spec: KernelSpec, default: Any = None) -> Any:
        self._asked(spec)
        return super().get(spec, default)


@contextlib.contextmanager
def watching(asked: Callable[[KernelSpec], None]) -> Iterator[None]:
    """Calls `asked` with each spec that an operator asks for inside of the block, before it is loaded or compiled.

    A call whose shapes are known uses a prepared launch and asks for no kernel, so all prepared launches are forgotten
    first. Captured graphs keep the parts that they hold.
    """
    for name, module in list(sys.modules.items()):
        prepared: Any = getattr(module, "_prepared", None) if name.startswith("cute_kernels.") else None
        if hasattr(prepared, "clear"):
            prepared.clear()
    compiled = compile._kernels
    compile._kernels = noted = _Noting(compiled, asked)
    try:
        yield
    finally:
        compiled.update(noted)
        compile._kernels = compiled


@contextlib.contextmanager
def noting() -> Iterator[dict[KernelSpec, None]]:
    """Yields a dictionary whose keys become the specs that calls inside of the block ask for, in order."""
    asked: dict[KernelSpec, None] = {}
    with watching(lambda spec: asked.setdefault(spec)):
        yield asked


def digests(specs: Iterable[KernelSpec]) -> dict[str, str]:
    """Returns the entry "kernels" of a case, from the specs that it asked for."""
    return {repr(spec): sass.digest(spec) for spec in specs}


def spec_of(text: str) -> KernelSpec | None:
    """Returns the spec that prints as this text; None if no class has that name and those fields any more."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        kind = _spec_classes().get(call.func.id)
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        spec = None if kind is None else kind(**fields)
    except (SyntaxError, TypeError, ValueError):
        return None
    return spec if spec is not None and repr(spec) == text and not spec.can_implement() else None


@functools.cache
def _spec_classes() -> dict[str, type]:
    return {
        name: value
        for module in SPEC_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and hasattr(value, "can_implement")
    }


def is_older(case: Mapping[str, Any], digest: Callable[[KernelSpec], str] = sass.digest) -> bool:
    """Returns whether a spec of a case has other machine code now, or is no longer built."""
    for text, recorded in case.get("kernels", {}).items():
        spec = spec_of(text)
        if spec is None or digest(spec) != recorded:
            return True
    return False


def _compile(spec: KernelSpec) -> None:
    sass.compiled(spec)


def marked(record: Mapping[str, Any], digest: Callable[[KernelSpec], str] = sass.digest) -> dict[str, Any]:
    """Returns the record with "older" in each case that ran other machine code than is built now."""
    parts = {}
    for name in ("cases", "values"):
        cases = [{key: value for key, value in case.items() if key != "older"} for case in record.get(name, ())]
        parts[name] = [{**case, "older": True} if is_older(case, digest) else case for case in cases]
    return {**record, **parts}


def mark(case: Mapping[str, Any] | None) -> str:
    """Returns the mark that follows the name of a case on a page."""
    return MARK if case is not None and case.get("older") else ""


def main() -> int:
    """Runs from the command line; 1 if a record cannot be compared."""
    for path in map(pathlib.Path, sys.argv[1:]):
        record = records.read(path)
        here = records.package_version("nvidia-cutlass-dsl")
        if record["cutlass_dsl"] != here:
            print(f"{path}: not compared, it is of CuTe DSL {record['cutlass_dsl']}, here is {here}")
            return 1
        named = {text for case in record["cases"] for text in case["kernels"]}
        specs = [spec for spec in map(spec_of, sorted(named)) if spec is not None]
        workers.call_each(_compile, specs, os.cpu_count() or 1, lambda spec: None)
        found = marked(record)
        records.write(found, path)
        print(f"{path}: {sum('older' in case for case in found['cases'])} of {len(found['cases'])} cases are older")
    return 0


if __name__ == "__main__":
    from bench import kernels_run  # by its name: processes that compile do not find this file's __main__

    sys.exit(kernels_run.main())
