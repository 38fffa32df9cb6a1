"""Every tensor is made with a dtype and a device, as the source of every module shows.

A process may have another default dtype or device, which a package's own tensors must not follow: scratch memory that
silently becomes bfloat16 is half as large as the launch was promised.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    file
    for folder in ("cute_kernels", "fp8_mla", "tests/kit")
    for file in (ROOT / folder).rglob("*.py")
    if file.name not in ("environments.py", "vllm_load.py")  # files that set defaults of a test, and vLLM's own loader
)  # fmt: skip
# functions that make tensors from sizes or from Python numbers
FACTORIES = frozenset(
    """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye
    from_file full hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn randperm
    range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
    sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander zeros
    """.split()
)
# constructors of a type: torch.FloatTensor(3) and torch.Tensor(3) follow the default device or dtype
LEGACY = frozenset(
    {"Tensor"} | {f"{kind}Tensor" for kind in ("Float", "Double", "Half", "Long", "Int", "Byte", "Bool")}
)
# functions that read or change a default, which must not matter
DEFAULTS = frozenset({"get_default_device", "get_default_dtype", "set_default_device", "set_default_dtype"})
NEEDS = {"dtype", "device"}


def of_torch(node: ast.AST) -> str:
    """The name of an attribute of torch itself; empty for anything else."""
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return node.attr if is_attribute and isinstance(node, ast.Attribute) else ""


def is_number(node: ast.AST) -> bool:
    """Whether the source shows a Python number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return of_torch(node) in ("inf", "nan", "pi", "e")


def violations(source: str) -> Iterator[str]:
    """Descriptions, with their lines, of expressions whose result follows a default of torch."""
    tree = ast.parse(source)
    named: set[ast.AST] = set()  # factories whose arguments were looked at
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            taken = {alias.name for alias in node.names} & (FACTORIES | LEGACY | DEFAULTS)
            yield from (f"{node.lineno}: from torch import {name}" for name in sorted(taken))
        if not isinstance(node, ast.Call):
            continue
        is_partial = ast.unparse(node.func) in ("functools.partial", "partial") and node.args
        made = node.args[0] if is_partial else node.func
        name = of_torch(made)
        given = {keyword.arg for keyword in node.keywords if ast.unparse(keyword.value) != "None"}
        if name in FACTORIES:
            named.add(made)
            missing = sorted(NEEDS - given)
            if missing:
                yield f"{node.lineno}: torch.{name} without {' and '.join(missing)}"
        elif name in LEGACY:
            yield f"{node.lineno}: torch.{name}(...)"
        elif name == "finfo" and not (node.args or given):
            yield f"{node.lineno}: torch.finfo() of the default dtype"
        elif name == "where" and len(node.args) == 3 and all(is_number(value) for value in node.args[1:]):
            yield f"{node.lineno}: torch.where of two numbers has the default dtype"
    for node in ast.walk(tree):
        name = of_torch(node)
        if not isinstance(node, ast.Attribute):
            continue
        if name in FACTORIES and node not in named:
            yield f"{node.lineno}: torch.{name}, called elsewhere, maybe without {' and '.join(sorted(NEEDS))}"
        elif name in DEFAULTS:
            yield f"{node.lineno}: torch.{name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_tensor_has_a_dtype_and_a_device(file: Path) -> None:
    assert list(violations(file.read_text())) == []


def test_both_packages_are_looked_at() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in FILES} >= {"cute_kernels", "fp8_mla"}


def test_all_that_follows_the_default_device_is_a_factory() -> None:
    """Torch keeps these functions in a private list."""
    from torch.utils._device import _device_constructors

    names = {getattr(f, "__name__", "") for f in _device_constructors()}
    known_to_torch = {name for name in names if hasattr(torch, name)}
    assert known_to_torch <= FACTORIES
    assert {"empty", "full", "tensor", "arange", "randn"} <= known_to_torch
