"""Writes the package as a kernel of Hugging Face's kernels hub: sources for kernel-builder, and its build output.

    python scripts/make_hub_kernel.py FOLDER                         name cute-kernels, version 0
    python scripts/make_hub_kernel.py FOLDER --repo-id me/attention --version 1

FOLDER/build.toml and FOLDER/torch-ext/cute_kernels are kernel-builder's input. FOLDER/build has a variant each for CPU
and CUDA, in the form that `kernels.get_local_kernel` loads. Imports are relative, and nothing depends on the name of
the package: a loader imports it under the identifier in metadata.json, and operators are `torch.ops.<identifier>`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "cute-kernels"
PYTHON_NAME = NAME.replace("-", "_")
PACKAGES = ("cute_kernels", "fp8_mla")
LEFT_OUT = ("integrations", "warm")
"""Plugins of stacks that import cute_kernels by name, and a pool of processes that cannot import a copy."""
LICENSE = "Apache-2.0"
DEPENDS = ("einops", "tvm-ffi")
CUDA_DEPENDS = ("nvidia-cutlass-dsl",)
VARIANTS = {"cpu": DEPENDS, "cuda": (*DEPENDS, *CUDA_DEPENDS)}
FLASH_ATTENTION = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
_MODULE = re.compile(r"(?:cute_kernels|fp8_mla)(?:\.\w+)+(?::\w+)?")


class CannotRewrite(ValueError):
    """A source names the package in a way for which there is no rule."""


def rewrite(source: str, module: str, is_package: bool = False) -> str:
    """Rewrites a module of `PACKAGES` for a package of any name with `fp8_mla` inside: imports and names are relative.

    Args:
        source: the module's text.
        module: its full name.
        is_package: whether it is an `__init__.py`.

    Raises:
        CannotRewrite: an import has a form that the package does not use.
    """
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    edits: list[tuple[ast.stmt | ast.expr, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _top(node.module) in PACKAGES:
            names = ", ".join(f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in node.names)
            edits.append((node, f"from {_relative(module, is_package, node.module or '')} import {names}"))
        elif isinstance(node, ast.Import) and any(_top(alias.name) in PACKAGES for alias in node.names):
            if [(alias.name, alias.asname) for alias in node.names] != [("fp8_mla", None)]:
                raise CannotRewrite(f"{module}: got {ast.unparse(node)}; needs import fp8_mla, or from ... import")
            edits.append((node, f"from {_relative(module, is_package, 'cute_kernels')} import fp8_mla"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if _MODULE.fullmatch(node.value):
                edits.append((node, f'(__name__.partition(".")[0] + "{_inside(node.value)}")'))
    return _replaced(source, edits)


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _inside(module: str) -> str:
    """Returns a module's name after the package's, with a dot before it; fp8_mla is a part of the package."""
    return module.removeprefix("cute_kernels") if _top(module) == "cute_kernels" else f".{module}"


def _relative(module: str, is_package: bool, target: str) -> str:
    """Returns the text after `from` in a module for an import from another one."""
    depth = (_inside(module) + "." * is_package).count(".")
    return "." * depth + _inside(target).removeprefix(".")


def _replaced(source: str, edits: list[tuple[ast.stmt | ast.expr, str]]) -> str:
    """Returns the source with other text in place of nodes. Columns of ast count bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = b"".join(lines)
    for node, new in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = text[:begin] + new.encode() + text[end:]
    return text.decode()


def package_files() -> dict[str, str]:
    """Returns all files of the kernel's Python package, by their path inside of it."""
    files = {"__init__.py": public_names()}
    for package in PACKAGES:
        inside = Path(package) if package == "fp8_mla" else Path()
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT / package)
            if (inside / path).as_posix() in files or (package == "cute_kernels" and path.parts[0] in LEFT_OUT):
                continue
            module = ".".join((package, *path.with_suffix("").parts)).removesuffix(".__init__")
            text = file.read_text(encoding="utf-8")
            files[(inside / path).as_posix()] = rewrite(text, module, path.name == "__init__.py")
    return files


def public_names() -> str:
    """Returns the kernel's `__init__.py`: the operations, and FlashAttention's functions, which transformers needs."""
    sys.path.insert(0, str(ROOT))
    try:
        import cute_kernels
    finally:
        sys.path.remove(str(ROOT))
    modules = {name: _inside(module) for name, module in cute_kernels._MODULES.items()}
    modules |= dict.fromkeys(FLASH_ATTENTION, ".compat.flash_attn")
    lines = [
        '"""Attention kernels for NVIDIA Hopper in the CUTLASS CuTe DSL: decoding over FP8 and INT8 caches."""',
        "",
    ]
    for module in sorted(set(modules.values())):
        names = ", ".join(sorted(name for name, place in modules.items() if place == module))
        lines.append(f"from {module} import {names}")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in sorted(modules)), "]"]
    return "\n".join(lines) + f'\n__version__ = "{cute_kernels.__version__}"\n'


def build_toml(version: int, repo_id: str | None) -> str:
    """Returns kernel-builder's build instructions, edition 5."""
    lines = ["[general]", f'name = "{NAME}"', f"version = {version}", "edition = 5", f'license = "{LICENSE}"']
    lines += [f"backends = {json.dumps(list(VARIANTS))}", f"python-depends = {json.dumps(DEPENDS)}", ""]
    lines += ["[general.cuda]", f"python-depends = {json.dumps(CUDA_DEPENDS)}", ""]
    if repo_id:
        lines += ["[general.hub]", f'repo-id = "{repo_id}"', ""]
    return "\n".join([*lines, "[torch-noarch]", 'cuda-capabilities = ["9.0"]', ""])


def metadata(backend: str, version: int, unique: str) -> dict[str, object]:
    """Returns the metadata that kernel-builder writes into a variant, without digests."""
    archs = {"archs": ["9.0"]} if backend == "cuda" else {}
    return {
        "name": NAME,
        "id": f"_{PYTHON_NAME}_{backend}_{unique}",
        "version": version,
        "license": LICENSE,
        "python-depends": list(VARIANTS[backend]),
        "backend": {"type": backend, **archs},
    }


def write(folder: Path, version: int = 0, repo_id: str | None = None) -> str:
    """Writes all files; returns the identifier that is the same for the same sources.

    Raises:
        FileExistsError: the folder has something in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder: got {folder}, which has files; needs a new or empty one")
    files = package_files()
    unique = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:7]
    for variant in VARIANTS:
        place = folder / "build" / f"torch-{variant}"
        _write_all(place, files)
        text = json.dumps(metadata(variant, version, unique), indent=2) + "\n"
        (place / "metadata.json").write_text(text, encoding="utf-8")
    _write_all(folder / "torch-ext" / PYTHON_NAME, files)
    (folder / "build.toml").write_text(build_toml(version, repo_id), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    return unique


def _write_all(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--version", type=int, default=0, help="of the kernel's interface; 0 promises nothing")
    parser.add_argument("--repo-id", help="where kernel-builder uploads it")
    given = parser.parse_args()
    try:
        unique = write(given.folder, given.version, given.repo_id)
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{given.folder}: {NAME} {unique}, variants {', '.join(VARIANTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
