"""How a compiled object launches its kernels, without names: the normal form of its host code.

Compiled host code is for the processor that it was built on, so two machines differ there. What it is made from does
not: `ir_module` of the DSL's compiled object, in MLIR's LLVM dialect. Of it the normal form has

- the function that launches: grid, block, cluster, dynamic shared memory, attributes such as programmatic dependent
  launch, the stream, the order of launches and of each kernel's arguments;
- the function that loads: attributes which every kernel is given once;
- the function that TVM-FFI calls: order and kinds of the caller's arguments, and what is checked of them.

Names of functions and the texts of messages, with names of parameters in them, are left out; a kernel is named by its
machine code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_FUNCTION = re.compile(r"^  llvm\.func (?:\w+ )*@(?P<name>[\w$.]+)\([^\n]*\{\n(?s:.*?)^  \}$", re.MULTILINE)
_DECLARED = re.compile(r"^  llvm\.func (?:\w+ )*@([\w$.]+)\([^\n]*[^{\n]$", re.MULTILINE)
_SYMBOL = re.compile(r'@("(?:[^"\\]|\\.)*"|[\w$.]+(?:::@[\w$.]+)*)')
_BINARY = re.compile(r'^  llvm\.mlir\.global [^\n]*?@\w+_binary\("(?P<text>(?:[^"\\\n]|\\.)*)"\)', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)")
_TEXT = re.compile(r'constant\("(?:[^"\\]|\\.)*"\)')
_BYTES = re.compile(r"array<\d+ x i8>")  # of a text, in what loads
_NUMBERED_TYPE = re.compile(r'(struct<"[A-Za-z_]+)\.\d+"')  # by how much a process has compiled before
_LAUNCHES, _LOADS, _CALLED = "@_cudaLaunchKernelEx(", "cuda_load_to_device", "__tvm_ffi_"


def binaries(module: str) -> list[bytes]:
    """The fat binaries that a module embeds."""
    return [
        _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1], text.encode("latin-1"))
        for text in (match["text"] for match in _BINARY.finditer(module))
    ]


def normal_form(module: str, kernel_names: Mapping[str, str]) -> str:
    """What a module says of launches, without names.

    Args:
        module: text of `ir_module`.
        kernel_names: of each kernel, what to call it instead.

    Raises:
        ValueError: the module is not what this version of the DSL makes.
    """
    functions = {match["name"]: match[0] for match in _FUNCTION.finditer(module)}
    launching = [name for name, text in functions.items() if _LAUNCHES in text]
    wanted = [
        *launching,
        *(name for name in functions if name == _LOADS),
        *(name for name in functions if name.removeprefix(_CALLED) in launching and name.startswith(_CALLED)),
    ]
    if not launching or len(wanted) != 2 + len(launching):
        raise ValueError(f"module: got functions {', '.join(functions)}; needs one that launches, loads and is called")
    rename = _renaming(
        set(_DECLARED.findall(module)), {name: f"@function{n}" for n, name in enumerate(wanted)}, kernel_names
    )
    lines = []
    for name in wanted:
        text = _SYMBOL.sub(rename, _NUMBERED_TYPE.sub(r'\1"', functions[name]))
        lines.append(_BYTES.sub("array<? x i8>", _TEXT.sub("constant(?)", text)) if name == _LOADS else text)
    return "\n".join(lines)


def _renaming(
    external: set[str], functions: Mapping[str, str], kernels: Mapping[str, str]
) -> Callable[[re.Match[str]], str]:
    def rename(match: re.Match[str]) -> str:
        name = match[1]
        if name in external:
            return match[0]
        if name in functions:
            return functions[name]
        # the handle of a kernel is named for its module and itself
        owners = [label for kernel, label in kernels.items() if name.endswith(f"_{kernel}")]
        return owners[0] if owners else "@"

    return rename
