"""Everything that a user can call is listed in public_api.txt: names, signatures, defaults, schemas, options.

A change there is a change for users, which CHANGELOG.md names. `python tests/cpu/test_public_api.py` writes the file.
"""

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_kernels

TABLE = Path(__file__).with_name("public_api.txt")
MODULES = (
    "cute_kernels",
    "cute_kernels.compat.flash_attn",
    "cute_kernels.compat.flash_mla",
    "cute_kernels.distributed",
    "cute_kernels.integrations.sglang",
    "cute_kernels.integrations.transformers",
    "cute_kernels.integrations.vllm",
    "cute_kernels.warm",
    "fp8_mla",
)


def signature(value: Any) -> str:
    """Parameters and defaults; keyword-only parameters are sorted by name. Annotations are left to the type checker."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(value).parameters.values()]
    by_name = {p.name: p.kind for p in plain if p.kind is p.KEYWORD_ONLY}
    plain.sort(key=lambda p: (p.kind, p.name if p.name in by_name else ""))
    text = str(inspect.Signature(plain))
    return re.sub(r"TokenFormat\(name='([^']*)'.*?wider_bytes=\([^)]*\)\)", r"<\1>", text)


def described(name: str, value: Any) -> Iterator[str]:
    """A line for a name, and one for each public method of a class."""
    if inspect.ismodule(value) or not callable(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"{name}{signature(value)}"
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if not method.startswith("_"):
                function = getattr(function, "__func__", function)
                yield f"{name}.{method}{signature(function) if callable(function) else ''}"


def names_of(module: Any) -> list[str]:
    """`__all__`, or the functions and classes that a module without it defines."""
    if module.__name__.endswith("sglang"):  # the rest is what it registers
        return ["register"]
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def api() -> list[str]:
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        extra = ["warm"] if name == "cute_kernels" else []
        lines += [line for n in [*names_of(module), *extra] for line in described(f"{name}.{n}", getattr(module, n))]
    operators = {line.rpartition("::")[2] for line in torch._C._dispatch_get_all_op_names() if "cute_kernels::" in line}
    lines += [
        f"torch.ops.{getattr(torch.ops.cute_kernels, name).default._schema}"
        for name in sorted(operators)
        if not name.startswith("test_")
    ]  # those of other tests
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()  # Python 3.10 has no tomllib
    for group, entries in re.findall(r'\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', project):
        lines += [f"entry point {group}: {entry}" for entry in entries.splitlines()]
    options: argparse.ArgumentParser = importlib.import_module("cute_kernels.warm.__main__").parser()
    for action in options._actions:
        choices = "" if action.choices is None else f" {list(action.choices)}"
        default = re.sub(r"\((\d+), .* (\d+)\)", r"\1-\2", repr(action.default))
        lines.append(f"warm {'/'.join(action.option_strings)} = {default}{choices}")
    return lines


def test_the_public_api_is_what_it_was() -> None:
    assert api() == TABLE.read_text().splitlines()


@pytest.mark.parametrize("name", cute_kernels.__all__)
def test_every_argument_is_described(name: str) -> None:
    function = getattr(cute_kernels, name)
    described = re.findall(r"^    (\w+): ", function.__doc__.partition("Args:")[2].partition("\n\nR")[0], re.M)
    assert sorted(described) == sorted(inspect.signature(function).parameters)


if __name__ == "__main__":
    TABLE.write_text("\n".join(api()) + "\n")
