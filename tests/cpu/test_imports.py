"""Which module may import which, read from every source, and what importing the packages loads."""

import ast
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.kit.kernel_place import printed

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("cute_kernels", "fp8_mla")
    for file in sorted((ROOT / package).rglob("*.py"))
}
# package directories of cute_kernels that are no system's; each is a layer
SHARED = ("budget", "compat", "device", "distributed", "integrations", "runtime", "warm")
# files of a system's package directory by the end of their names: append_op.py is an op. launch_*.py is a launch;
# kernels/ is device code
FILE_KINDS = ("checks", "codes", "launch", "layouts", "op", "plan", "reference", "request", "spec")
# second designs inside a package directory. They import its kernels; only its op and launches import them, and its
# plan imports their spec
DESIGNS = ("crossover", "latent")

# what each layer may import of this project
PROJECT = {
    "fp8_mla": {"formats", "fp8_mla"},
    "formats": set(),  # plain Python, for everyone
    "public": {"op", "warm"},  # cute_kernels itself: the names that users import
    "package directory": set(),
    "codes": {"device"},  # imported where a kernel is traced
    "spec": {"codes", "formats", "layouts", "spec"},
    "device": {"device", "formats"},
    "kernels": {"codes", "device", "formats", "kernels", "layouts", "spec"},
    "layouts": {"layouts"},
    "plan": {"budget", "codes", "formats", "layouts", "plan", "spec"},
    "reference": {"codes", "formats", "fp8_mla", "layouts", "plan", "reference"},
    "runtime": {"runtime"},
    "request": {"codes", "formats", "layouts", "plan", "runtime", "spec"},
    "checks": {"codes", "formats", "fp8_mla", "layouts", "plan", "request", "runtime", "spec"},
    "launch": {"checks", "codes", "formats", "fp8_mla", "layouts", "plan", "reference", "request", "runtime", "spec"},
    "op": {"checks", "codes", "formats", "fp8_mla", "launch", "layouts", "op", "plan", "reference", "request",
           "runtime", "spec"},
    "budget": {"budget", "codes", "formats", "spec"},
    "warm": {"codes", "formats", "layouts", "plan", "runtime", "spec", "warm"},
    "distributed": {"distributed", "fp8_mla", "layouts", "op", "request", "runtime"},
    "compat": {"compat", "formats", "fp8_mla", "op", "plan", "public", "request", "runtime", "spec"},
    "integrations": {"compat", "formats", "fp8_mla", "integrations", "op", "plan", "public", "runtime", "spec", "warm"},
}  # fmt: skip
# what each layer may import from outside, of packages that are expensive or have requirements
HEAVY = {"torch", "einops", "cutlass", "cuda", "tvm_ffi", "sglang", "transformers", "vllm"}
TORCH = {"torch", "einops"}
DSL = {"cutlass", "cuda"}
OUTSIDE: dict[str, set[str]] = {
    "fp8_mla": TORCH,
    "device": DSL,
    "kernels": DSL,
    "reference": TORCH,
    "runtime": TORCH | DSL | {"tvm_ffi"},
    "checks": TORCH,
    "codes": DSL,
    "request": TORCH,
    "launch": TORCH,
    "op": TORCH,
    "compat": TORCH,
    "distributed": TORCH,
    "integrations": TORCH | {"sglang", "transformers", "vllm"},
}


def layer(module: str) -> str | None:
    """The layer of a module of this project; None if its file name does not tell."""
    package, _, rest = module.partition(".")
    if package == "fp8_mla":
        return "formats" if rest == "formats" else "fp8_mla"
    directory, _, file = rest.partition(".")
    if not directory:
        return "public"
    if directory in SHARED:
        return directory
    first, _, others = file.partition(".")
    file = others if first in DESIGNS else file
    if file.partition(".")[0] == "kernels":
        return "kernels"
    if file.startswith("launch_"):
        return "launch"
    return next((kind for kind in FILE_KINDS if file.split("_")[-1] == kind), None) if file else "package directory"


def imports(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """Full names of what a module imports anywhere. A module imported from a package counts as itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level + is_package or None]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Descriptions of imports that go against the direction."""
    here = layer(module)
    if here is None:
        kinds = ", ".join(FILE_KINDS)
        return [f"{module}: a file of a package directory is in kernels/, is one of {kinds} or ends in _ and one"]
    found = []
    for name in imports(module, source, is_package):
        top = name.partition(".")[0]
        if top in ("cute_kernels", "fp8_mla"):
            there = layer(name)
            if there not in PROJECT[here]:
                found.append(f"{module} ({here}) imports {name} ({there})")
            elif any(f".{design}." in name and f".{design}." not in module for design in DESIGNS):
                if here not in ("op", "launch") and (here, there) != ("plan", "spec"):
                    found.append(f"{module} imports {name}, which is for the op and the plan of its package directory")
        elif top in HEAVY and top not in OUTSIDE.get(here, set()):
            found.append(f"{module} ({here}) imports {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    file = MODULES[module]
    assert violations(module, file.read_text(), file.name == "__init__.py") == []


@pytest.mark.parametrize(
    "folder, outside",
    [("tests/kit", ("bench", "scripts", "tests.cpu", "tests.gpu")), ("bench", ("tests.cpu", "tests.gpu"))],
)
def test_what_tests_and_benchmarks_share_knows_neither(folder: str, outside: tuple[str, ...]) -> None:
    wrong = [
        f"{file.name} imports {name}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(folder.replace("/", "."), file.read_text())
        if f"{name}.".startswith(tuple(f"{package}." for package in outside))
    ]
    assert wrong == []


def test_every_layer_is_looked_at() -> None:
    assert {layer(module) for module in MODULES} >= PROJECT.keys() - {"budget"}


@pytest.mark.parametrize(
    "module, source",
    [
        ("cute_kernels.mla.kernels.decode", "from cute_kernels.mla.plan import plan_decode"),
        ("cute_kernels.mla.kernels.decode", "from .. import plan"),
        ("cute_kernels.mla.kernels.decode", "from cute_kernels.mla.crossover.kernels import load"),
        ("cute_kernels.mla.plan", "from cute_kernels.mla.crossover.kernels import load"),
        ("cute_kernels.mla.kernels.decode", "def f():\n    import torch"),
        ("cute_kernels.mla.kernels.decode", "import fp8_mla"),
        ("cute_kernels.mla.spec", "from fp8_mla.layout import V_DIM"),
        ("fp8_mla.formats", "from fp8_mla.layout import V_DIM"),
        ("cute_kernels.mla.kernels.append", "from cute_kernels.runtime.compile import get_kernel"),
        ("cute_kernels.mla.op", "from cute_kernels.mla.kernels.decode import MlaDecodeKernel"),
        ("cute_kernels.mla.op", "from cute_kernels.compat import flash_mla"),
        ("cute_kernels.mla.plan", "from cute_kernels.mla.op import mla_fp8_decode"),
        ("cute_kernels.sink.launch", "from cute_kernels.sink.op import sink_attention"),
        ("cute_kernels.mla.spec", "from cute_kernels.mla.plan import plan_decode"),
        ("cute_kernels.device.wgmma", "from cute_kernels.mla.spec import WIDE"),
        ("cute_kernels.runtime.compile", "from cute_kernels.mla.spec import MlaDecodeSpec"),
        ("cute_kernels.compat.flash_mla", "from cute_kernels.mla.kernels.decode import MlaDecodeKernel"),
        ("cute_kernels.merge.op", "from cute_kernels.distributed import context_parallel_decode"),
        ("cute_kernels.warm.shapes", "from cute_kernels.mla.op import mla_fp8_decode"),
        ("cute_kernels.mla.helpers", ""),
        ("cute_kernels", "import cute_kernels.runtime.compile"),
        ("fp8_mla.packing", "from cute_kernels.runtime.checks import require"),
        ("fp8_mla.packing", "import einops, cutlass"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_relative_imports_of_a_package_are_resolved() -> None:
    assert list(imports("fp8_mla", "from .layout import QK_DIM\nfrom . import packing", is_package=True)) == [
        "fp8_mla.layout",
        "fp8_mla.packing",
    ]


STATEMENTS = (
    "import cute_kernels, fp8_mla",
    "[getattr(cute_kernels, name) for name in cute_kernels.__all__]",
    "import cute_kernels.compat.flash_mla",
    "import cute_kernels.warm",
    "import cute_kernels.integrations.vllm, cute_kernels.integrations.vllm.calls, cute_kernels.integrations.sglang",
)
STACKS = {"cutlass", "cuda", "tvm_ffi", "transformers", "vllm", "sglang"}


def test_importing_loads_no_dsl_and_no_stack_and_touches_no_gpu() -> None:
    """The test imports torch first, because some versions of torch load cuda.bindings if they find it."""
    code = f"""
import sys, torch
before = set(sys.modules)
for statement in {STATEMENTS}:
    exec(statement)
    loaded = {{m.partition(".")[0] for m in set(sys.modules) - before}} & {STACKS}
    print(sorted(loaded), torch.cuda.is_initialized(), "libcute_dsl_runtime" in open("/proc/self/maps").read())
"""
    assert printed(code).splitlines() == ["[] False False"] * len(STATEMENTS)


@pytest.mark.parametrize("package", ["cute_kernels", "fp8_mla"])
def test_packages_say_that_they_have_types(package: str) -> None:
    """Without the marker py.typed, type checkers treat everything in an installed package as Any."""
    assert resources.files(package).joinpath("py.typed").is_file()
    ignored = subprocess.run(["git", "check-ignore", "-q", f"{package}/py.typed"], cwd=ROOT).returncode
    assert ignored != 0, "a wheel has no files that git ignores"
