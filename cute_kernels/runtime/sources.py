"""Which source files a kernel is made of: those that its module imports, followed from file to file.

The cache of compiled kernels and the record of machine code both ask this, so a file that moves, or a new one, is part
of a key as soon as a kernel imports it.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

FORMATS_PACKAGE = "fp8_mla"
"""The one other package whose sources reach kernels: `fp8_mla.formats`."""


def modules_of_kernel(kernel: str, spec_module: str) -> tuple[str, ...]:
    """The module of a kernel class, "module:class", and, where both are of one package, that of its spec."""
    module = kernel.partition(":")[0]
    return (module, spec_module) if spec_module.partition(".")[0] == module.partition(".")[0] else (module,)


def sources(module: str) -> list[Path]:
    """The files that `module` imports, itself and what they import in turn, as far as they are of its package.

    Read off the syntax trees, imports inside of functions included, those for types alone not. The `__init__.py` of
    a package counts where the package itself is named.

    Raises:
        ValueError: there is no such module, or it has no source file.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"kernel: got module {module}; needs one that can be imported from a source file")
    origin = Path(spec.origin).resolve()
    roots = {module.partition(".")[0]: origin.parents[module.count(".")]}
    formats = importlib.util.find_spec(FORMATS_PACKAGE)
    if formats is not None and formats.origin:
        roots.setdefault(FORMATS_PACKAGE, Path(formats.origin).resolve().parents[1])
    found: set[Path] = set()
    to_read = [module]
    while to_read:
        name = to_read.pop()
        root = roots.get(name.partition(".")[0])
        for file in _files(root, name) if root else ():
            if file not in found:
                found.add(file)
                to_read += _imports(file, name)
    return sorted(found)


def _files(root: Path, module: str) -> list[Path]:
    """A module's source, where it is below `root`."""
    path = root.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def _imports(file: Path, module: str) -> list[str]:
    """What a file names in imports; "from a import b" is a.b too, which may be a module."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names = []
    to_visit: list[ast.AST] = [ast.parse(file.read_bytes())]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            to_visit += node.orelse
        else:
            to_visit += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names
