"""Tests compiled kernels with the lowest and the highest version of each dependency but torch. Needs no GPU.

    python scripts/try_pins.py             both ends of the ranges in pyproject.toml
    python scripts/try_pins.py lowest      one of them

Each end has an environment of its own in build/pins, made by scripts/bootstrap.sh, and a cache of kernels of its own.
torch is the version that bootstrap.sh always takes. Exit status 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDS = ("lowest", "highest")
TESTS = (
    "tests/cpu/test_kernels_compile.py",  # each kernel that ships: registers, spills, instructions
    "tests/cpu/test_runtime_cache.py",  # tvm-ffi loads and calls kernels that the DSL has exported
    "tests/cpu/test_records.py",  # machine code is found in exported kernels
)
_RANGE = re.compile(r'^ {4}"([A-Za-z0-9_-]+)>=([0-9.]+),<([0-9.]+)"', re.MULTILINE)


def ranges(pyproject: str) -> dict[str, tuple[str, str]]:
    """Returns the lowest version and the first that is too high of each dependency, from the text of pyproject.toml.

    Raises:
        ValueError: a dependency has no such range.
    """
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    lines = [line for line in (listed[1] if listed else "").splitlines() if line.strip()]
    found = {name: (low, high) for name, low, high in _RANGE.findall("\n".join(lines))}
    if not lines or len(found) != len(lines):
        raise ValueError(f'dependencies: got {lines}; each needs the form "name>=lowest,<first that is too high"')
    return found


def constraints(end: str, bounds: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Returns the version of each dependency but torch that an end asks for, as pip's specifiers."""
    names = [name for name in bounds if name != "torch"]
    return {name: f"=={bounds[name][0]}" if end == "lowest" else f"<{bounds[name][1]}" for name in names}


def make_environment(end: str, folder: Path, bounds: Mapping[str, tuple[str, str]]) -> None:
    """Makes an environment by scripts/bootstrap.sh, which asks pip and so takes the highest allowed version."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{end}.txt"
    file.write_text("".join(f"{name}{wanted}\n" for name, wanted in constraints(end, bounds).items()), encoding="utf-8")
    command = ["bash", str(ROOT / "scripts" / "bootstrap.sh"), str(folder), sys.executable]
    subprocess.run(command, check=True, env={**os.environ, "PIP_CONSTRAINT": str(file)})


def try_end(end: str) -> int:
    """Runs the tests at one end: 0, or 1 if one fails."""
    bounds = ranges((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = ROOT / "build" / "pins" / end
    make_environment(end, folder, bounds)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "list"], cwd=ROOT, check=True)
    kernels = folder.with_name(f"kernels-{end}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUTE_KERNELS_CACHE_DIR": str(kernels)}
    return int(subprocess.run([python, "-m", "pytest", "-q", *TESTS], cwd=ROOT, env=environment).returncode != 0)


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="*", metavar="END", help="lowest or highest; without one, both")
    ends = tuple(parser.parse_args().ends) or ENDS
    if set(ends) - set(ENDS):
        parser.error(f"END: got {' '.join(ends)}; needs lowest or highest")
    return max(map(try_end, ends))


if __name__ == "__main__":
    sys.exit(main())
