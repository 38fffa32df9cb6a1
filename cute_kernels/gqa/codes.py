"""Types of cache elements: one class a type has everything that kernels, checks and plans know about it.

The module is pure Python; methods that emit instructions import the DSL when a kernel is traced. To add a type, add a
class here and its instance to `CODES`. Other types are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    import cutlass.cute as cute
    from cutlass import Int32


class Codes:
    """A type of cache elements.

    name             name in torch
    dsl              name in the DSL
    itemsize         bytes of an element
    values           numbers that an element holds
    rotated          whether vectors are rotated before they become codes (`gqa.rotation_reference`); then a scale is a
                     float32 with a zero point in its four lowest bits
    widened          whether elements become 16-bit operands in registers; other types already are operands
    needs_scales     whether a cache must have scales; a widened type may have them
    not_finite       for a register of elements: the bits that are all ones in a number that is not finite, their last
                     bit, and the signs. None: every number is finite
    conversion       the instruction that converts float32 numbers to elements
    clocks           clocks of an SM to convert one element to an operand
    """

    name: ClassVar[str]
    dsl: ClassVar[str]
    itemsize: ClassVar[int] = 1
    values: ClassVar[int] = 1
    rotated: ClassVar[bool] = False
    widened: ClassVar[bool] = True
    needs_scales: ClassVar[bool] = False
    not_finite: ClassVar[tuple[int, int, int] | None] = None
    conversion: ClassVar[str] = ""
    clocks: ClassVar[float] = 0.0

    def element(self) -> Any:
        """Returns the DSL's type of an element."""
        import cutlass

        return getattr(cutlass, self.dsl)

    def widen_rows(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Makes a fragment of A from the elements of its rows g (x0) and g + 8 (x1), the first 16 of a register."""
        raise NotImplementedError

    def widen_columns(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Makes a fragment of A from the bytes of its columns k 0..7 (x0) and 8..15 (x1), loaded transposed."""
        raise NotImplementedError


class Int8(Codes):
    """Signed bytes. A mask (64 lanes a clock) makes a pair float16, a subtraction (256 a clock) makes it exact."""

    name = "int8"
    dsl = "Int8"
    needs_scales = True
    conversion = "F2IP.S8"
    clocks = 1 / 128 + 1 / 256

    def widen_rows(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens bytes of rows."""
        from cute_kernels.device import operands

        operands.widen_int8(a, x0, x1, x0 >> 8, x1 >> 8)

    def widen_columns(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens bytes of columns."""
        from cute_kernels.device import operands

        operands.widen_int8(a, x0, x0 >> 8, x1, x1 >> 8)


class E4m3(Codes):
    """FP8 with 4 bits of exponent, without infinities. One instruction converts a pair, 64 values a clock."""

    name = "float8_e4m3fn"
    dsl = "Float8E4M3FN"
    not_finite = (0x7F7F7F7F, 0x01010101, 0x80808080)
    conversion = "F2FP.SATFINITE"
    clocks = 1 / 64

    def widen_rows(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens bytes of rows."""
        from cute_kernels.device import operands

        operands.widen_e4m3(a, 0, 2, x0)
        operands.widen_e4m3(a, 1, 3, x1)

    def widen_columns(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens bytes of columns."""
        from cute_kernels.device import operands

        operands.widen_e4m3(a, 0, 1, x0)
        operands.widen_e4m3(a, 2, 3, x1)


class Uint4(Codes):
    """Pairs of 4-bit codes, the even element low: (code - zero point) x scale is an element of a rotated vector.

    A unit of 16 bits has four elements of a token, 4 g to 4 g + 3 of 32. If rows are columns of A, row g of a fragment
    is one of them and row g + 8 the next, two fragments for each 32 (`Fragments.row_of_o`). If rows are rows of A, a
    register has elements 8 t to 8 t + 7; columns 2 t and 2 t + 1 are 8 t and 8 t + 4, and 2 t + 8 and 2 t + 9 the next
    two, two fragments for each 32 (`LoadQ`).
    """

    name = "uint8"
    dsl = "Uint8"
    values = 2
    rotated = needs_scales = True
    conversion = "F2I"
    clocks = 1 / 128 + 1 / 256

    def widen_rows(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens codes less `UINT4_CENTER`, the two lowest of each four elements."""
        from cute_kernels.device import operands

        operands.widen_uint4_rows(a, x0, x1)

    def widen_columns(self, a: cute.Tensor, x0: Int32, x1: Int32) -> None:
        """Widens codes less `UINT4_CENTER`, the two lowest of each four elements."""
        from cute_kernels.device import operands

        operands.widen_uint4(a, x0, x0 >> 4, x1, x1 >> 4)


class Bfloat16(Codes):
    """16-bit numbers, which are operands without a conversion."""

    name = "bfloat16"
    dsl = "BFloat16"
    itemsize, widened = 2, False
    not_finite = (0x7F807F80, 0x00800080, 0x80008000)


class Float16(Codes):
    """16-bit numbers, which are operands without a conversion."""

    name = "float16"
    dsl = "Float16"
    itemsize, widened = 2, False
    not_finite = (0x7C007C00, 0x04000400, 0x80008000)


CODES: Final[dict[str, Codes]] = {codes.name: codes for codes in (Int8(), E4m3(), Bfloat16(), Float16())}
"""Known types by name."""
ROTATED: Final[dict[str, Codes]] = {codes.name: codes for codes in (Uint4(),)}
"""Types that a cache has only by its kind, for values or for keys and values."""
TYPES: Final = {**CODES, **ROTATED}
"""All known types by name."""
WIDENED: Final = tuple(codes.name for codes in CODES.values() if codes.widened)
INT8: Final = Int8.name
KINDS: Final = {
    INT8: (INT8, INT8),
    "fp8_per_token_head": (E4m3.name, E4m3.name),
    "int8_k_int4_v": (INT8, Uint4.name),
    "int4": (Uint4.name, Uint4.name),
}
"""The types of K and V by the kind of `kv_append`."""
ROTATED_KINDS: Final = {kind: v for kind, (_, v) in KINDS.items() if v in ROTATED}
"""The type of V by the kinds that `gqa_decode` must be told; the dtypes of a cache imply the other kinds."""
E4M3_MAX: Final = 448.0
E4M3_MIN_SCALE: Final = 1e-6
INT4_MAX: Final = 15
INT4_MIN_SCALE: Final = 1e-6
ROTATED_MAX: Final = 2.0**118
"""Larger sizes are clamped to it before a rotation, so that neither sums of 256 nor their differences overflow."""
FLIPPED: Final = 0x5DFBC5FCDF467B754503BBEB55B747E9480ABC759BBC2937F7FCA4E9A8CA6F2
"""Bit i: a rotation changes the sign of element i. torch's generator on a CPU draws them from the seed 0x9E3779B9."""
DTYPES: Final = tuple(codes.name for codes in CODES.values() if not codes.widened)
"""Dtypes of queries and outputs."""
SCALE_DTYPES: Final = ("float16", "float32")


def values_of(name: str) -> int:
    """Returns how many numbers an element of a cache holds."""
    return TYPES[name].values if name in TYPES else 1


def element(name: str) -> Any:
    """Returns the DSL's type of a number in a cache, a query or a scale."""
    if name in TYPES:
        return TYPES[name].element()
    from cutlass import Float32

    return {"float32": Float32}[name]
