"""Which machine code a benchmark ran, and which of a record's is no longer built.

Digests come from `bench.machine_code`, which compiles what it does not know: it is imported where one is asked
for. Functions here take it as an argument, so that tests need no compiler.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from bench.records import kernel_id
from cute_kernels.runtime import compile
from cute_kernels.runtime.cache import KernelSpec

SPEC_MODULES = (
    "cute_kernels.mla.spec",
    "cute_kernels.mla.append_spec",
    "cute_kernels.mla.crossover.spec",
    "cute_kernels.merge.spec",
    "cute_kernels.merge.peers_spec",
    "cute_kernels.gqa.spec",
    "cute_kernels.gqa.append_spec",
    "cute_kernels.gqa.gather_spec",
    "cute_kernels.sink.spec",
    "cute_kernels.sink.backward_spec",
)
MORE_MODULES = ("cute_kernels.mla.latent.spec",)
"""Rooms whose kernels are compiled where they are asked for: there are too many to compile all for a run."""


class Digest(Protocol):
    """SHA-256 of a spec's machine code and of its launches, in hexadecimal."""

    @property
    def sass(self) -> str:
        """Of all its kernels."""

    @property
    def launch(self) -> str:
        """Of grids, attributes, order of arguments."""


Digests = Callable[[Sequence[KernelSpec]], Mapping[KernelSpec, Digest]]


def machine_code() -> Any:
    """The module that makes digests."""
    return importlib.import_module("bench.machine_code")


def shipped_specs() -> list[KernelSpec]:
    """What every room ships: all that tests/gpu runs, but for what single tests ask for."""
    return [spec for name in SPEC_MODULES for spec in importlib.import_module(name).shipped_specs()]


# ---- what a case ran


class _Noting(dict[KernelSpec, Callable[..., Any]]):
    """The loaded kernels of the process, and which were asked for."""

    def __init__(self, kernels: Mapping[KernelSpec, Callable[..., Any]], asked: dict[KernelSpec, None]) -> None:
        super().__init__(kernels)
        self._asked = asked

    def get(self, spec: KernelSpec, default: Any = None) -> Any:
        self._asked[spec] = None
        return super().get(spec, default)


@contextlib.contextmanager
def noting() -> Iterator[dict[KernelSpec, None]]:
    """Yields a dictionary whose keys become the specs that calls inside of the block ask for, in order.

    A call whose shapes are known goes by what an earlier one prepared and asks for no kernel, so everything prepared is
    forgotten first. What captured graphs hold of it stays theirs to keep.
    """
    for name, module in list(sys.modules.items()):
        prepared: Any = getattr(module, "_prepared", None) if name.startswith("cute_kernels.") else None
        if hasattr(prepared, "clear"):
            prepared.clear()
    asked: dict[KernelSpec, None] = {}
    compiled = compile._kernels
    compile._kernels = noted = _Noting(compiled, asked)
    try:
        yield asked
    finally:
        compiled.update(noted)
        compile._kernels = compiled


def machine_code_of(specs: Sequence[KernelSpec], code: Any) -> dict[str, Any]:
    """The entries "kernels" and "toolchain" of what ran these specs; `code` is `machine_code()`."""
    return {"kernels": described(code.digests_of_specs(specs)), "toolchain": dict(code.toolchain())}


def described(digests: Mapping[KernelSpec, Digest]) -> dict[str, dict[str, str]]:
    """The top-level entry "kernels" of a record. Of two specs with the same code it names the first."""
    found: dict[str, dict[str, str]] = {}
    for spec, digest in digests.items():
        facts = {"spec": repr(spec), "sass": digest.sass, "launch": digest.launch}
        found.setdefault(kernel_id(digest.sass, digest.launch), facts)
    return found


def ids(specs: Iterable[KernelSpec], digests: Mapping[KernelSpec, Digest]) -> list[str]:
    """The entry "kernels" of a case, from the specs that it asked for."""
    return list(dict.fromkeys(kernel_id(digests[spec].sass, digests[spec].launch) for spec in specs))


# ---- what is still built


def no_longer_built(
    kernels: Mapping[str, Mapping[str, str]], digests: Digests, known: Callable[[], Sequence[KernelSpec]]
) -> list[str]:
    """Ids of those recorded kernels whose machine code and launches no spec has now.

    A spec is found by the text that the record has of it; where that finds other code, or nothing because a class or a
    field has another name now, all specs that ship are looked at.

    Args:
        kernels: "kernels" of a record, or some of it. Of the same toolchain, or the answer means nothing.
        digests: of specs that are built now.
        known: specs that ship.
    """
    recorded = [spec for facts in kernels.values() if (spec := spec_of(facts["spec"])) is not None]
    built = _ids_of(recorded, digests)
    if set(kernels) - built:
        built |= _ids_of([spec for spec in known() if spec not in recorded], digests)
    return [name for name in kernels if name not in built]


def of_cases(record: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """Those of a record's kernels that a case ran, or one over families of values."""
    cases = [*record["cases"], *record.get("values", [])]
    used = {name for case in cases for name in case.get("kernels") or ()}
    return {name: facts for name, facts in record.get("kernels", {}).items() if name in used}


def not_comparable(record: Mapping[str, Any], toolchain: Mapping[str, str]) -> str:
    """Why nothing can be said of whether a record's machine code is still built; empty where it can."""
    if not record.get("kernels"):
        return "it names no machine code"
    then = record.get("toolchain") or {}
    names = [name for name in sorted({*then, *toolchain}) if then.get(name) != toolchain.get(name)]
    differing = ", ".join(f"{name} {then.get(name)}, here {toolchain.get(name)}" for name in names)
    return f"it is of another toolchain: {differing}" if names else ""


def spec_of(text: str) -> KernelSpec | None:
    """The spec that prints as this text; None where no class has that name and those fields any more."""
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
        for module in (*SPEC_MODULES, *MORE_MODULES)
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and hasattr(value, "can_implement")
    }


def _ids_of(specs: Sequence[KernelSpec], digests: Digests) -> set[str]:
    return {kernel_id(digest.sass, digest.launch) for digest in digests(specs).values()}


# ---- which of a record's kernels are older, in a file next to it: pages depend on files alone, and not on a compiler

MARK = " †"
FOOTNOTE = "† Machine code that is no longer built ran this case; what is built now was not measured."
_HEADER = "# Of {}: machine code that is no longer built. Written by scripts/results_table.py --compare."


def older_file(record: pathlib.Path) -> pathlib.Path:
    """Where the ids of a record's older kernels are."""
    return record.with_suffix(".older")


def read_older(record: pathlib.Path) -> frozenset[str]:
    """Ids of a record's older kernels; none where nothing says that there are any."""
    path = older_file(record)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return frozenset(line.split()[0] for line in lines if line and not line.startswith("#"))


def write_older(record: pathlib.Path, kernels: Mapping[str, Mapping[str, str]], older: Iterable[str]) -> None:
    """Keeps the ids, with their specs; no file where there are none."""
    path, lines = older_file(record), [f"{name}  {kernels[name]['spec']}" for name in sorted(older)]
    if lines:
        path.write_text("\n".join([_HEADER.format(record.name), *lines, ""]), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def marked(record: Mapping[str, Any], older: Iterable[str]) -> dict[str, Any]:
    """The record with "older" in each case that ran a kernel of these ids."""
    ids_of_older = set(older)
    parts = {
        part: [
            {**case, "older": True} if ids_of_older.intersection(case.get("kernels") or ()) else case
            for case in record[part]
        ]
        for part in ("cases", "values")
        if part in record
    }
    return {**record, **parts}


def mark(case: Mapping[str, Any] | None) -> str:
    """What follows the name of a case on a page."""
    return MARK if case is not None and case.get("older") else ""
