"""What the compiler made of a kernel: registers, memory, instructions and the warnings of ptxas. Needs no GPU.

    python -m bench.sass cute_kernels.mla.spec

prints a report of every spec that a module ships. The tools come from the wheels nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm (extra "dev"), or from a CUDA toolkit on PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.runtime.cache import KernelSpec
from cute_kernels.runtime.compile import compile_kernel

# what ptxas says of performance: wgmma serialized (C7510, C7514), setmaxnreg ignored (C7508). The DSL wraps its lines.
_WARNING = re.compile(r"\(C75\d\d\).*?(?=\n\s*ptxas |\n\s*\n|\Z)", re.DOTALL)
_SERIALIZED = "(C7512)"  # wgmma is serialized for want of registers
_HARMLESS = ("(C7519)",)  # a warpgroup.arrive that the source lacks was added where wgmma reads registers
_USAGE = re.compile(
    r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
_SECTION = re.compile(r'\s*\.section\s+\.text\.([^\s,"]+)')
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class KernelCode:
    """One `__global__` function of a cubin.

    registers  per thread at launch (setmaxnreg moves them between warps later)
    stack      bytes per thread
    local      bytes of local memory per thread
    shared     bytes of static shared memory; what a launch asks for dynamically is not in a cubin
    opcodes    how often each full opcode, such as "LDG.E.128.CONSTANT", stands in the code
    """

    name: str
    registers: int
    stack: int
    local: int
    shared: int
    opcodes: Mapping[str, int]

    def count(self, instruction: str) -> int:
        """Instructions that have `instruction` among the parts of their opcode: "HGMMA", "LDG.E.128", "E4M3"."""
        return sum(n for opcode, n in self.opcodes.items() if f".{instruction}." in f".{opcode}.")


@dataclass(frozen=True)
class SassReport:
    """All kernels that one spec compiles to, and what ptxas said of their performance (codes C75xx)."""

    kernels: tuple[KernelCode, ...]
    warnings: tuple[str, ...]

    def count(self, instruction: str) -> int:
        """`KernelCode.count` over all kernels."""
        return sum(kernel.count(instruction) for kernel in self.kernels)

    def problems(self, expected: Mapping[str, Any]) -> list[str]:
        """In words, each way in which the code is not what it should be; empty when it is.

        No kernel may use local memory, or stack, if not said otherwise, and ptxas may not warn of lost performance.

        Args:
            expected: "registers" is the most that any kernel may use, "stack" the most bytes that it may spill (default
                0), each of "instructions" must be in some kernel, and each of "at_least" as often as it says. Where
                "serialized" is true, wgmma may be serialized for want of registers.
        """
        harmless = (*_HARMLESS, _SERIALIZED) if expected.get("serialized") else _HARMLESS
        found = [f"ptxas: {warning}" for warning in self.warnings if not warning.startswith(harmless)]
        for kernel in self.kernels:
            if kernel.registers > expected["registers"]:
                found.append(f"{kernel.name}: {kernel.registers} registers; the budget is {expected['registers']}")
            spills = expected.get("stack", 0)
            for what, most in (("stack", spills), ("local", 0)):
                if (n := getattr(kernel, what)) > most:
                    found.append(f"{kernel.name}: {n} bytes of {what}")
            if spills == 0:
                found += [
                    f"{kernel.name}: {n} {spill} instructions" for spill in ("LDL", "STL") if (n := kernel.count(spill))
                ]
        found += [f"no {wanted} instruction" for wanted in expected["instructions"] if not self.count(wanted)]
        for wanted, least in expected.get("at_least", {}).items():
            if (n := self.count(wanted)) < least:
                found.append(f"{n} {wanted} instructions, fewer than {least}")
        return found

    def __str__(self) -> str:
        lines = []
        for kernel in self.kernels:
            families: Counter[str] = Counter()
            for opcode, n in kernel.opcodes.items():
                families[opcode.partition(".")[0]] += n
            bytes_used = f"{kernel.stack} B stack, {kernel.local} B local, {kernel.shared} B static shared"
            lines += [kernel.name, f"  {kernel.registers} registers, {bytes_used}"]
            lines.append("  " + ", ".join(f"{n} {family}" for family, n in families.most_common()))
        return "\n".join([*lines, *self.warnings])


def report(spec: KernelSpec) -> SassReport:
    """Compiles a spec for sm_90a and takes its cubin apart.

    Raises:
        ValueError: the spec cannot be built.
        RuntimeError: a tool is missing or failed.
    """
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as dump:
        with contextlib.redirect_stderr(said):
            compile_kernel(spec, dump)
        cubins = sorted(Path(dump).glob("*.cubin"))
        if not cubins:
            raise RuntimeError(f"{spec!r}: the compiler left no cubin")
        kernels = tuple(kernel for cubin in cubins for kernel in read_cubin(cubin))
    return SassReport(kernels, find_warnings(said.getvalue()))


def read_cubin(path: Path) -> list[KernelCode]:
    """The kernels of a cubin.

    Raises:
        RuntimeError: a tool is missing or failed.
    """
    opcodes = count_opcodes(_run("nvdisasm", "-c", str(path)).splitlines())
    usage = _USAGE.finditer(_run("cuobjdump", "--dump-resource-usage", str(path)))
    return [
        KernelCode(
            name=match["name"],
            registers=int(match["registers"]),
            stack=int(match["stack"]),
            local=int(match["local"]),
            shared=int(match["shared"]),
            opcodes=opcodes[match["name"]],
        )
        for match in usage
    ]


def find_warnings(said: str) -> tuple[str, ...]:
    """Messages with a code C75xx in what the compiler printed, each on one line."""
    return tuple(" ".join(warning.split()) for warning in _WARNING.findall(said))


def count_opcodes(sass: Iterable[str]) -> dict[str, Counter[str]]:
    """Opcodes by function, from the lines of `nvdisasm -c`."""
    functions: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in sass:
        if section := _SECTION.match(line):
            current = functions.setdefault(section[1], Counter())
        elif instruction := _INSTRUCTION.match(line):
            current[instruction[1]] += 1
    return functions


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([find_tool(tool), *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def find_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm: the wheel's first, whose version goes with the tests, then that on PATH.

    Raises:
        RuntimeError: neither is there; the message says what to install.
    """
    for entry in sys.path:
        for tool in sorted(Path(entry).glob(f"nvidia/cu*/bin/{name}")):
            return str(tool)
    if found := shutil.which(name):
        return found
    raise RuntimeError(f"{name} was not found: install nvidia-cuda-{name} (extra 'dev'), or put a CUDA toolkit on PATH")


def main() -> None:
    """Prints a report of every spec that the module on the command line ships."""
    parser = argparse.ArgumentParser(prog="python -m bench.sass", description=main.__doc__)
    parser.add_argument("module", help="a module with shipped_specs(), such as cute_kernels.mla.spec")
    for spec in importlib.import_module(parser.parse_args().module).shipped_specs():
        code = report(spec)
        print(f"{spec!r}\n{code}")
        print("\n".join(f"PROBLEM {problem}" for problem in code.problems(spec.expected)) or "as expected", end="\n\n")


if __name__ == "__main__":
    main()
