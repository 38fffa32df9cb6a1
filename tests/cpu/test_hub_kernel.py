"""The copy of the package for the kernels hub runs under another name, alone, and by `kernels.get_local_kernel`."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import make_hub_kernel as hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hub.write(folder, version=1, repo_id="someone/attention")
    return folder


@pytest.mark.parametrize(
    "module, source, expected",
    [
        ("cute_kernels.mla.op", "import fp8_mla", "from .. import fp8_mla"),
        ("cute_kernels.mla.op", "from fp8_mla import V_DIM", "from ..fp8_mla import V_DIM"),
        ("cute_kernels.mla.kernels.qk", "from fp8_mla.formats import V3_2", "from ...fp8_mla.formats import V3_2"),
        ("cute_kernels.gqa.kernels.pv", "from cute_kernels.gqa.spec import A as B, C",
         "from ...gqa.spec import A as B, C"),
        ("cute_kernels.compat.x", "def f():\n    from cute_kernels import gqa_decode",
         "def f():\n    from .. import gqa_decode"),
        ("fp8_mla.slots", "from fp8_mla.layout import (\n    A,\n    B,\n)", "from ..fp8_mla.layout import A, B"),
        ("fp8_mla", "from fp8_mla.layout import A", "from ..fp8_mla.layout import A"),
        ("cute_kernels.mla.spec", "kernel = 'cute_kernels.mla.kernels.decode:K'  # é",
         'kernel = (__name__.partition(".")[0] + ".mla.kernels.decode:K")  # é'),
        ("fp8_mla", '"""See `fp8_mla.slots`."""\nX = {"fp8_mla.slots": 1}',
         '"""See `fp8_mla.slots`."""\nX = {(__name__.partition(".")[0] + ".fp8_mla.slots"): 1}'),
        ("cute_kernels.runtime.cache", 'name = "cute_kernels"; prefix = "cute_kernels."',
         'name = "cute_kernels"; prefix = "cute_kernels."'),
        ("cute_kernels.runtime.ops", "from collections.abc import Callable\nfrom . import checks",
         "from collections.abc import Callable\nfrom . import checks"),
    ],
)  # fmt: skip
def test_a_source_names_no_package(module: str, source: str, expected: str) -> None:
    assert hub.rewrite(source, module, is_package=module == "fp8_mla") == expected


def test_an_import_without_a_rule_is_named() -> None:
    with pytest.raises(hub.CannotRewrite, match="cute_kernels.a: got import cute_kernels.b as b"):
        hub.rewrite("import cute_kernels.b as b", "cute_kernels.a")


def test_every_import_of_the_copy_is_relative(kernel: Path) -> None:
    for file in (kernel / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & set(hub.PACKAGES), file


def test_the_tree_is_what_kernel_builder_takes(kernel: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    config = tomllib.loads((kernel / "build.toml").read_text(encoding="utf-8"))
    assert config["general"] == {
        "name": "cute-kernels", "version": 1, "edition": 5, "license": "Apache-2.0", "backends": ["cpu", "cuda"],
        "python-depends": ["einops", "tvm-ffi"], "cuda": {"python-depends": ["nvidia-cutlass-dsl"]},
        "hub": {"repo-id": "someone/attention"},
    }  # fmt: skip
    assert config["torch-noarch"] == {"cuda-capabilities": ["9.0"]}
    sources = {file.relative_to(kernel / "torch-ext" / "cute_kernels") for file in (kernel / "torch-ext").rglob("*.py")}
    for backend in config["general"]["backends"]:
        place = kernel / "build" / f"torch-{backend}"
        assert {file.relative_to(place) for file in place.rglob("*.py")} == sources
        facts = json.loads((place / "metadata.json").read_text(encoding="utf-8"))
        assert facts["id"].startswith(f"_cute_kernels_{backend}_") and facts["id"].isidentifier()
        assert facts["backend"]["type"] == backend


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    sys.argv, before = ["make_hub_kernel.py", str(tmp_path)], sys.argv
    try:
        assert hub.main() == 2
    finally:
        sys.argv = before
    assert "needs a new or empty one" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mine"]


# ---- what it does where the package is not

CALLS = """
import sys, torch

names = [name for name in sys.modules if name.partition(".")[0] in ("cute_kernels", "fp8_mla")]
assert not names, names
id = module.__name__
ops = getattr(torch.ops, id)
torch.manual_seed(0)
rows = torch.zeros(2, 64, 656, dtype=torch.uint8)
module.mla_fp8_append(torch.randn(128, 576).bfloat16(), rows, torch.arange(128))
q = torch.randn(2, 1, 16, 576).bfloat16()
indices = torch.randint(-1, 128, (2, 1, 32), dtype=torch.int32)
out, lse = module.mla_fp8_decode(q, rows, indices=indices, return_lse=True)
formats = sys.modules[f"{id}.fp8_mla"]
expected, _ = formats.reference_decode(q, rows, indices=indices)
assert (out - expected).norm() < 3e-3 * expected.norm()
into, lse_into = torch.empty_like(out), torch.empty_like(lse)
options = (None, None, None, True, *(None,) * 11)
ops.mla_fp8_decode(q, rows, indices, *options, into, lse_into)
assert torch.equal(into, out) and torch.equal(lse_into, lse)
q, k, v = (torch.randn(1, 16, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
module.flash_attn_func(q, k, v, causal=True).float().square().sum().backward()
assert all(t.grad.abs().max() > 0 for t in (q, k, v))
print("done", id, len(module.__all__))
"""
LOAD = """
import importlib.util, json, pathlib, sys
place = pathlib.Path(sys.argv[1]) / "build" / "torch-cpu"
name = json.loads((place / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, place / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
"""
COMPILE = """
import importlib
spec = importlib.import_module(f"{name}.mla.append_spec").shipped_specs()[0]
cache = importlib.import_module(f"{name}.runtime.cache")
assert spec.kernel.startswith(f"{name}.mla."), spec
modules = cache.modules_of_kernel(spec.kernel, type(spec).__module__)
files = {file.relative_to(place).as_posix() for file in cache.kernel_sources(*modules)}
assert {"mla/kernels/append.py", "mla/append_spec.py", "fp8_mla/formats.py", "runtime/compile.py"} <= files, files
importlib.import_module(f"{name}.runtime.compile").get_kernel(spec)
"""


def run(code: str, kernel: Path, tmp_path: Path) -> str:
    """Output of a program that finds the package's dependencies but not the checkout."""
    hide = (
        "import os, sys\n"
        "def has(folder, name): return os.path.isdir(os.path.join(folder, name))\n"
        "sys.path[:] = [p for p in sys.path if has(p, 'torch') or not has(p, 'cute_kernels')]\n"
    )
    environment = {
        **os.environ, "CUTE_KERNELS_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", hide + code, str(kernel)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unique_of(kernel: Path) -> Any:
    return json.loads((kernel / "build" / "torch-cpu" / "metadata.json").read_text(encoding="utf-8"))["id"]


def test_operators_run_under_the_name_of_the_loader(kernel: Path, tmp_path: Path) -> None:
    assert run(LOAD + CALLS, kernel, tmp_path) == f"done {unique_of(kernel)} 14\n"


def test_a_kernel_of_the_copy_compiles_and_its_key_knows_its_sources(kernel: Path, tmp_path: Path) -> None:
    run(LOAD + COMPILE, kernel, tmp_path)
    assert list((tmp_path / "cache").glob("MlaAppendKernel-*"))


def test_get_local_kernel_loads_it(kernel: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("Hugging Face kernels is not installed")
    load = (
        "import pathlib, kernels\nmodule = kernels.get_local_kernel(pathlib.Path(sys.argv[1]), trust_remote_code=True, "
        "backend='cpu')\n"
    )
    assert run(load + CALLS, kernel, tmp_path) == f"done {unique_of(kernel)} 9\n"
