"""What users install: files of wheel and sdist, syntax that the oldest Python reads, ranges of dependencies."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import try_pins

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cute_kernels", "fp8_mla")
OLDEST = (3, 10)
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, built from a copy of the checkout without network access."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package)  # also byte code that tests have left
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("docs/page.md", "results/h200.json", "scripts/run.py", "tests/cpu/test.py", "build/left.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    (copy / "cute_kernels" / "__pycache__").mkdir(exist_ok=True)
    (copy / "cute_kernels" / "__pycache__" / "left.pyc").write_bytes(b"")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


def files_of_packages() -> set[str]:
    found = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file())
    return {str(file) for file in found if "__pycache__" not in file.parts}


def test_the_wheel_has_the_packages_and_the_licence_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert names - files_of_packages() == {
        f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD", f"{info}/entry_points.txt", f"{info}/licenses/LICENSE"
    }  # fmt: skip
    assert files_of_packages() <= names
    entry_points = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert f"[{group}]\ncute_kernels = cute_kernels.integrations.{module}:register\n" in entry_points + "\n"
    assert zipfile.ZipFile(wheel).read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_has_what_builds_and_explains_it_beside_them(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    metadata = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
    # hatchling adds .gitignore to every sdist, so that a build from it ignores the same files; no option prevents it
    assert names == files_of_packages() | metadata | {".gitignore"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_oldest_python_reads_every_source(file: Path) -> None:
    ast.parse(file.read_bytes(), filename=str(file), feature_version=OLDEST)


def test_the_oldest_python_is_the_one_that_the_project_names() -> None:
    assert f'requires-python = ">={OLDEST[0]}.{OLDEST[1]},' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# ---- ranges of dependencies


RANGES = try_pins.ranges((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_both_ends_of_every_range_but_torch_are_asked_for() -> None:
    assert set(RANGES) == {"torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "einops"}
    lowest, highest = (try_pins.constraints(end, RANGES) for end in try_pins.ENDS)
    assert set(lowest) == set(highest) == set(RANGES) - {"torch"}
    assert lowest["nvidia-cutlass-dsl"] == "==4.8.0" and highest["nvidia-cutlass-dsl"] == "<4.9"


def test_the_script_that_makes_environments_takes_torch_from_the_same_range() -> None:
    script = (ROOT / "scripts" / "bootstrap.sh").read_text(encoding="utf-8")
    low, high = (tuple(map(int, version.split("."))) for version in RANGES["torch"])
    assert f"{low} <= version < {high}" in script
    pinned = re.search(r'torch_pin="torch==([0-9]+)\.([0-9]+)\.', script)
    assert pinned is not None and low <= (int(pinned[1]), int(pinned[2])) < high
