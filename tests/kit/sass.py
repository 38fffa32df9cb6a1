"""The compiler's output for a kernel: registers, memory, instructions and warnings of ptxas. It needs no GPU.

The tools come from the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm (extra "dev"), or from a CUDA toolkit on
PATH. What a process has compiled stays in build/machine_code, so that the processes of a test run compile a spec once.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest.mock
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from cute_kernels.runtime import arch
from cute_kernels.runtime.cache import KernelSpec, directory, entry_name
from cute_kernels.runtime.compile import compile_kernel

STORE: Final = Path(__file__).resolve().parents[2] / "build" / "machine_code"
CUDA: Final = 190
"""The machine number in an ELF file with machine code for a GPU."""

# ptxas on performance: wgmma is serialized (C7510, C7514), setmaxnreg is ignored (C7508). The DSL wraps its lines.
_WARNING = re.compile(r"\(C75\d\d\).*?(?=\n\s*ptxas |\n\s*\n|\Z)", re.DOTALL)
_SERIALIZED = "(C7512)"  # wgmma is serialized for want of registers
_HARMLESS = ("(C7519)",)  # ptxas added a warpgroup.arrive because wgmma reads registers
_USAGE = re.compile(
    r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
_NO_SCOREBOARD = 7
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class KernelCode:
    """One `__global__` function of a cubin.

    registers  per thread at launch (setmaxnreg moves them between warps later)
    stack      bytes per thread
    local      bytes of local memory per thread
    shared     bytes of static shared memory; what a launch asks for dynamically is not in a cubin
    opcodes    how often each full opcode, such as "LDG.E.128.CONSTANT", occurs
    lines      the instructions as nvdisasm prints them
    code       the encodings of the instructions, 16 bytes each
    """

    name: str
    registers: int
    stack: int
    local: int
    shared: int
    opcodes: Mapping[str, int]
    lines: Sequence[str] = field(default=(), repr=False)
    code: bytes = field(default=b"", repr=False)

    def count(self, instruction: str) -> int:
        """Number of instructions whose opcode has the parts of `instruction`: "HGMMA", "LDG.E.128", "E4M3"."""
        return sum(n for opcode, n in self.opcodes.items() if f".{instruction}." in f".{opcode}.")

    def arrivals_before_loads(self) -> list[str]:
        """Number of mbarrier arrivals that a warp makes before its matrix loads (LDSM) have returned.

        A load that waits behind others reads shared memory after such an arrival, when TMA may have filled the stage
        again. An instruction waits for the scoreboards of its mask; a fence waits for all that is under way.
        """
        found: list[str] = []
        under_way: set[int] = set()
        for opcode, (_, upper) in zip(map(_opcode, self.lines), struct.iter_unpack("<QQ", self.code), strict=True):
            control = upper >> 41
            mask, writes = control >> 11 & 63, control >> 5 & 7
            under_way = {scoreboard for scoreboard in under_way if not mask >> scoreboard & 1}
            if opcode.startswith(("MEMBAR", "EXIT")):
                under_way = set()
            elif opcode.startswith("LDS"):  # a load without a scoreboard returns before the next load that has one
                if writes != _NO_SCOREBOARD and _NO_SCOREBOARD in under_way:
                    under_way = under_way - {_NO_SCOREBOARD} | {writes}
                under_way |= {writes} if opcode.startswith("LDSM") else set()
            elif opcode.startswith("SYNCS.ARRIVE") and under_way:
                found.append(opcode)
        return found


@dataclass(frozen=True)
class SassReport:
    """All kernels that one spec compiles to, and ptxas' warnings about performance (codes C75xx)."""

    kernels: tuple[KernelCode, ...]
    warnings: tuple[str, ...]

    def count(self, instruction: str) -> int:
        return sum(kernel.count(instruction) for kernel in self.kernels)

    def problems(self, expected: Mapping[str, Any]) -> list[str]:
        """Every way in which the code is not as expected, in words. Empty if there is none.

        No kernel may use local memory or, by default, stack, and ptxas may not warn of lost performance.

        Args:
            expected: "registers" is the most that any kernel may use, "stack" the most bytes that it may spill (default
                0). Each of "instructions" must occur in some kernel, each of "at_least" at least so often. With
                "serialized", wgmma may be serialized for want of registers.
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


class Compiled(NamedTuple):
    """The output of a compilation: cubins, and what ptxas printed."""

    cubins: tuple[bytes, ...]
    said: str


def compiled(spec: KernelSpec) -> Compiled:
    """Compiles a spec for sm_90a, or reads an earlier result of the same sources and the same compiler.

    Raises:
        ValueError: the spec cannot be built.
    """
    file = STORE / f"{entry_name(spec)}.json"
    STORE.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = _compile(spec)
            cubins = [base64.b64encode(zlib.compress(cubin)).decode() for cubin in made.cubins]
            draft = file.with_suffix(f".{os.getpid()}.tmp")
            draft.write_text(json.dumps({"spec": repr(spec), "cubins": cubins, "said": made.said}), encoding="utf-8")
            draft.replace(file)
    known = json.loads(file.read_text(encoding="utf-8"))
    return Compiled(tuple(zlib.decompress(base64.b64decode(text)) for text in known["cubins"]), known["said"])


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Compiles kernels without looking up the Python line of each operation.

    The DSL looks lines up if the remarks of ptxas are requested, and a compilation then takes 1.5 to 1.8 times as long.
    Without them the cubin and the warnings are the same.
    """
    arch.pin()  # before cutlass is imported for the first time
    from cutlass.base_dsl import dsl

    with unittest.mock.patch.object(dsl, "_set_enable_frame_filtering", lambda enable: None, create=True):
        yield


def _compile(spec: KernelSpec) -> Compiled:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as dump:
        with contextlib.redirect_stderr(said), without_lines():
            compile_kernel(spec, dump)
        cubins = tuple(path.read_bytes() for path in sorted(Path(dump).glob("*.cubin")))
    if not cubins:
        raise RuntimeError(f"{spec!r}: the compiler left no cubin")
    return Compiled(cubins, said.getvalue())


def reports(specs: Iterable[KernelSpec]) -> list[SassReport]:
    """Compiles specs for sm_90a and takes their cubins apart. Several specs at once cost less than one at a time.

    Raises:
        ValueError: a spec cannot be built.
        RuntimeError: a tool is missing or failed.
    """
    made = [compiled(spec) for spec in specs]
    listed = iter(_listings(cubin for each in made for cubin in each.cubins))
    found = []
    for each in made:
        kernels = (kernel for cubin in each.cubins for kernel in _kernels(cubin, next(listed)))
        found.append(SassReport(tuple(kernels), find_warnings(each.said)))
    return found


@functools.cache
def report(spec: KernelSpec) -> SassReport:
    return reports([spec])[0]


def listings(specs: Iterable[KernelSpec]) -> list[Sequence[str]]:
    """The instructions of each spec's only kernel, one per line."""
    return [kernel.lines for found in reports(specs) for kernel in found.kernels]


def digest(spec: KernelSpec) -> str:
    """16 hexadecimal digits that identify the machine code of a spec, whatever its kernels and arguments are called.

    The code is that of the entry in the disk cache, which a process runs, or else it is compiled now.
    """
    entry = directory() / f"{entry_name(spec)}.so"
    cubins = embedded_cubins(entry.read_bytes()) if entry.exists() else compiled(spec).cubins
    return digest_of(cubins)


def digest_of(cubins: Iterable[bytes]) -> str:
    """The digest of cubins: the encoded instructions, registers, stack, static and local memory of each kernel."""
    kernels = []
    for cubin in cubins:
        code = b"".join(_machine_code(cubin).values())
        words = [f"0x{word:016x}" for (word,) in struct.iter_unpack("<Q", code)]
        kernels.append("\n".join([*words, *(" ".join(match.groups()[1:]) for match in _usage(cubin))]))
        if not words:
            raise ValueError("cubins: got one without an instruction")
    return hashlib.sha256("\n\n".join(sorted(kernels)).encode()).hexdigest()[:16]


def embedded_cubins(data: bytes) -> list[bytes]:
    """The cubins in a library of the disk cache. Each is followed by the rest of the library, which ELF allows.

    Raises:
        ValueError: the library has no cubin.
    """
    starts = [match.start() for match in re.finditer(b"\x7fELF", data)]
    found = [data[at:] for at in starts if struct.unpack_from("<H", data, at + 18)[0] == CUDA]
    if not found:
        raise ValueError(f"data: got {len(data)} bytes without a cubin")
    return found


def _kernels(cubin: bytes, listed: Mapping[str, list[str]]) -> list[KernelCode]:
    """The kernels of a cubin; `listed` has their instructions by name."""
    code = _machine_code(cubin)
    return [
        KernelCode(
            name=match["name"],
            registers=int(match["registers"]),
            stack=int(match["stack"]),
            local=int(match["local"]),
            shared=int(match["shared"]),
            opcodes=Counter(map(_opcode, listed[match["name"]])),
            lines=listed[match["name"]],
            code=code[match["name"]],
        )
        for match in _usage(cubin)
    ]


def find_warnings(said: str) -> tuple[str, ...]:
    """Messages with a code C75xx in the compiler's output, each on one line."""
    return tuple(" ".join(warning.split()) for warning in _WARNING.findall(said))


def _machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each kernel, 16 bytes each, from sections `.text.NAME` of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    code = {}
    for name, _, _, _, start, length in sections:
        at = sections[names_index][4] + name
        text = cubin[at : cubin.index(b"\0", at)].decode()
        if text.startswith(".text."):
            code[text.removeprefix(".text.")] = cubin[start : start + length]
    return code


def _listings(cubins: Iterable[bytes]) -> list[dict[str, list[str]]]:
    """The instructions of each kernel of each cubin, one per line.

    nvdisasm takes 0.4 s to start and 0.01 to 0.2 s per kernel, so one process reads the code of all kernels end to end.
    """
    code = [_machine_code(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(b"".join(kernel for kernels in code for kernel in kernels.values()))
        listed = filter(_INSTRUCTION.match, _run("nvdisasm", "-b", "SM90a", str(path)).splitlines())
        found = [
            {name: list(itertools.islice(listed, len(kernel) // 16)) for name, kernel in kernels.items()}
            for kernels in code
        ]
    assert next(listed, None) is None, "an instruction of 16 bytes has a line"
    return found


def _opcode(line: str) -> str:
    match = _INSTRUCTION.match(line)
    assert match, line
    return match[1]


def _usage(cubin: bytes) -> list[re.Match[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return list(_USAGE.finditer(_run("cuobjdump", "--dump-resource-usage", str(path))))


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([find_tool(tool), *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def find_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm. The wheel's tool comes first because its version fits the tests; then PATH.

    Raises:
        RuntimeError: neither is there; the message says what to install.
    """
    for entry in sys.path:
        for tool in sorted(Path(entry).glob(f"nvidia/cu*/bin/{name}")):
            return str(tool)
    if found := shutil.which(name):
        return found
    raise RuntimeError(f"{name} was not found: install nvidia-cuda-{name} (extra 'dev'), or put a CUDA toolkit on PATH")
