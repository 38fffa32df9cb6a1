"""The source files of a kernel: its module and all that it imports, directly or through other modules.

The keys of the cache of compiled kernels and of the record of machine code are made from this list. A file that is new
or moved is part of a key as soon as a kernel imports it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

FORMATS_PACKAGE = "fp8_mla"
"""The only other package whose sources change kernels: they import `fp8_mla.formats`."""


def modules_of_kernel(kernel: str, spec_module: str) -> tuple[str, ...]:
    """Returns the module of a kernel class, "module:class", and the spec's module if both are in one package."""
    module = kernel.partition(":")[0]
    return (module, spec_module) if spec_module.partition(".")[0] == module.partition(".")[0] else (module,)


@functools.cache
def parameters(kernel: str) -> tuple[str, ...]:
    """Returns the argument names of a kernel class, "module:class": those of `__call__` without self and the stream.

    They are read from the source: importing the class would import cutlass, which a kernel from disk does not need.

    Raises:
        ValueError: the module lacks the class, or the class lacks a `__call__` of its own.
    """
    module, _, name = kernel.partition(":")
    spec = importlib.util.find_spec(module)
    tree = ast.parse(Path(spec.origin).read_bytes()) if spec and spec.origin else ast.parse("")
    for node in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__call__":
                return tuple(argument.arg for argument in item.args.args[1:-1])
    raise ValueError(f"kernel: got {kernel}; needs a class with a __call__ of its own")


def sources(*modules: str) -> list[Path]:
    """Returns the files of modules of one package and all that they import, directly or not, of it and FORMATS_PACKAGE.

    They are read from the syntax trees: imports inside of functions count, those under TYPE_CHECKING do not. The
    `__init__.py` of a package counts if the package itself is imported.

    Raises:
        ValueError: there is no such module, or it has no source file.
    """
    places: dict[str, Path] = {}  # by top-level package: its directory need not have the package's name
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"kernel: got module {module}; needs one that can be imported from a source file")
        places[module.partition(".")[0]] = _place(Path(spec.origin).resolve(), module)
    formats = importlib.util.find_spec(FORMATS_PACKAGE)
    if formats is not None and formats.origin:
        places.setdefault(FORMATS_PACKAGE, Path(formats.origin).resolve().parent)
    found: set[Path] = set()
    to_read = list(modules)
    while to_read:
        name = to_read.pop()
        place = places.get(name.partition(".")[0])
        for file in _files(place, name) if place else ():
            if file not in found:
                found.add(file)
                to_read += _imports(file, name)
    return sorted(found)


def _place(file: Path, module: str) -> Path:
    """Returns the directory of a module's top-level package; without a package, the module's file without suffix."""
    parts = module.split(".")[1:]
    if parts:
        return file.parents[len(parts) - 1]
    return file.parent if file.name == "__init__.py" else file.with_suffix("")


def _files(place: Path, module: str) -> list[Path]:
    """Returns the source file of a module of the package at `place`, as a list; empty if the module does not exist."""
    path = place.joinpath(*module.split(".")[1:])
    return [file for file in (path.parent / f"{path.name}.py", path / "__init__.py") if file.is_file()]


def _imports(file: Path, module: str) -> list[str]:
    """Returns the names that a file imports; "from a import b" gives a and a.b, which may be a module."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names = []
    to_visit: list[ast.AST] = [ast.parse(file.read_bytes())]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            to_visit += node.orelse
        else:
            # imports are statements, so expressions are left out
            to_visit += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package_parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*package_parts, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _name(test: ast.expr) -> str | None:
    """Returns the last part of a dotted name; None for other expressions."""
    return test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else None
