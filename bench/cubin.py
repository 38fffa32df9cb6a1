"""What the GPU is given, without the names that it was given under: the normal form of a cubin. Reads ELF by itself.

Names of kernels, which carry classes and argument types, order symbols and sections and fill string tables, so two
cubins of the same machine code differ. The normal form of a kernel has

- all instruction words of its `.text` section. Branches in them are relative, so no label needs a name;
- its relocations, each by what it points to; a symbol without a section (the driver's) by its name;
- registers, stack, static shared memory and its alignment, barriers;
- threads of a block, CTAs of a cluster, where the code demands them; place, size and kind of each parameter;
- its constant banks.

Offsets of instructions that a debugger wants, call graphs and debug sections are not part of it. No disassembler is
asked, so versions of nvdisasm do not matter.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

EM_CUDA = 190
_MAGIC = b"\x7fELF"
_SHT_NOBITS, _SHT_SYMTAB, _SHT_REL, _SHT_RELA = 8, 2, 9, 4

# Attributes in .nv.info whose values are the kernel's own, by NVIDIA's number of them.
_KERNEL_ATTRIBUTES = {
    0x05: "max threads of a block",
    0x10: "threads of a block",
    0x17: "parameter",
    0x19: "bytes of parameters",
    0x1B: "most registers",
    0x3D: "CTAs of a cluster",
    0x3E: "explicit cluster",
}
# Attributes of the whole cubin: pairs of a function's symbol and a value.
_FUNCTION_ATTRIBUTES = {0x11: "frame bytes", 0x12: "least stack bytes", 0x2F: "registers"}


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, and the SHA-256 (hexadecimal) of its normal form."""

    name: str
    digest: str


def find_cubins(data: bytes) -> list[bytes]:
    """The cubins inside of `data`: a cubin itself, a fat binary, or a compiled object or library that embeds some.

    Raises:
        ValueError: there is none.
    """
    found, start = [], data.find(_MAGIC)
    while start >= 0:
        end = start + len(_MAGIC)
        if len(data) >= start + 64 and struct.unpack_from("<H", data, start + 18)[0] == EM_CUDA:
            end = start + _elf_bytes(data, start)
            found.append(data[start:end])
        start = data.find(_MAGIC, end)
    if not found:
        raise ValueError(f"data: got {len(data)} bytes without a cubin; needs one that is not compressed")
    return found


def read_kernels(cubin: bytes) -> list[Kernel]:
    """Every kernel of a cubin, in the order of their digests.

    Raises:
        ValueError: it has none.
    """
    elf = _Elf(cubin)
    shared = _shared_by_all(elf)
    kernels = [
        Kernel(name, hashlib.sha256("\n".join([*_normal_form(elf, name), *shared]).encode()).hexdigest())
        for name in (section.name.removeprefix(".text.") for section in elf.sections)
        if elf.section(f".text.{name}")
    ]
    if not kernels:
        raise ValueError("cubin: got one without a kernel")
    return sorted(kernels, key=lambda kernel: (kernel.digest, kernel.name))


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    align: int
    data: bytes


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    section: int
    value: int


class _Elf:
    """A 64-bit little-endian ELF file."""

    def __init__(self, data: bytes) -> None:
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, names_at = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + n * size) for n in range(count)]
        bodies = [b"" if h[1] == _SHT_NOBITS else data[h[4] : h[4] + h[5]] for h in headers]
        self.sections = [
            _Section(_text(bodies[names_at], h[0]), h[1], h[2], h[5], h[6], h[7], h[8], body)
            for h, body in zip(headers, bodies, strict=True)
        ]
        self.symbols = [
            _Symbol(_text(bodies[section.link], name), kind & 15, place, value)
            for section in self.sections
            if section.kind == _SHT_SYMTAB
            for name, kind, _, place, value, _ in struct.iter_unpack("<IBBHQQ", section.data)
        ]

    def section(self, name: str) -> _Section | None:
        return next((section for section in self.sections if section.name == name), None)


def _elf_bytes(data: bytes, start: int) -> int:
    """Length of the ELF file at `start`: to the end of its last section, header or table."""
    program, table = struct.unpack_from("<QQ", data, start + 32)
    program_size, programs, size, count = struct.unpack_from("<HHHH", data, start + 54)
    ends = [program + program_size * programs, table + size * count]
    for n in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", data, start + table + n * size + 4)
        ends.append(offset + (0 if kind == _SHT_NOBITS else length))
    return max(ends)


def _normal_form(elf: _Elf, name: str) -> list[str]:
    code = elf.section(f".text.{name}")
    assert code is not None
    # flags and the top byte of info have the numbers of barriers and registers, by architecture
    lines = [f"{_section_line(code, name)}, flags {code.flags:x}, info {code.info >> 24}"]
    lines += _relocations(elf, elf.sections.index(code), name)
    for section in elf.sections:
        if section.name.startswith((".nv.shared.", ".nv.constant", ".nv.local.")) and section.name.endswith(f".{name}"):
            lines.append(_section_line(section, name))
            lines += _relocations(elf, elf.sections.index(section), name)
    if own := elf.section(f".nv.info.{name}"):
        for attribute, value in _attributes(own.data):
            if attribute in _KERNEL_ATTRIBUTES:
                lines.append(f"{_KERNEL_ATTRIBUTES[attribute]} {value.hex()}")
    if common := elf.section(".nv.info"):
        for attribute, value in _attributes(common.data):
            if attribute in _FUNCTION_ATTRIBUTES and elf.symbols[struct.unpack_from("<I", value)[0]].name == name:
                lines.append(f"{_FUNCTION_ATTRIBUTES[attribute]} {value[4:].hex()}")
    return sorted(lines)


def _shared_by_all(elf: _Elf) -> list[str]:
    """Data that belong to no kernel: global variables and constant banks."""
    prefixes = (".nv.global", ".nv.constant")
    return sorted(
        line
        for place, section in enumerate(elf.sections)
        if section.name.startswith(prefixes) and section.name.count(".") <= 2 + section.name.endswith(".init")
        for line in (_section_line(section, ""), *_relocations(elf, place, ""))
    )


def _section_line(section: _Section, kernel: str) -> str:
    content = hashlib.sha256(section.data).hexdigest()
    return f"{_kind(section.name, kernel)} {content}, {section.size} bytes, aligned to {section.align}"


def _relocations(elf: _Elf, place: int, kernel: str) -> list[str]:
    """Relocations of the section at `place`."""
    lines = []
    for section in elf.sections:
        if section.kind in (_SHT_REL, _SHT_RELA) and section.info == place:
            layout = "<QQq" if section.kind == _SHT_RELA else "<QQ"
            for offset, info, *addend in struct.iter_unpack(layout, section.data):
                symbol = elf.symbols[info >> 32]
                target = symbol.name  # of the driver, where it has no section
                if 0 < symbol.section < len(elf.sections):
                    target = f"{_kind(elf.sections[symbol.section].name, kernel)}+{symbol.value}"
                lines.append(f"relocation {info & 0xFFFFFFFF} at {offset} to {target} plus {addend}")
    return lines


def _kind(section: str, kernel: str) -> str:
    return section.removesuffix(f".{kernel}") if kernel else section


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of an .nv.info section: 4 bytes each, or as many more as the last two of them say (format 4)."""
    place = 0
    while place + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, place)
        place += 4
        if form == 4:
            yield attribute, data[place : place + size]
            place += size
        else:
            yield attribute, struct.pack("<H", size)


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()
