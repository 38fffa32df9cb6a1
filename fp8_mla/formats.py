"""Formats of a token in a latent cache: what each byte holds. Plain Python, without torch and without a GPU.

One token of the V3.2 format takes 656 bytes::

    byte 0            512        528            656
         | 512 e4m3    | 4 scales | 64 bfloat16  |
         | codes       | float32  | rope part    |

`docs/users/formats.md` has the format and the quantization rule in words. All code that needs a number of a format
takes it from here, kernels, budget, tests and benchmarks included. A new format is one more `TokenFormat` in `FORMATS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ITEMSIZE: Final = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
"""Bytes of an element, by the name that torch gives its dtype."""
FP8_MAX: Final = 448.0
"""The largest finite e4m3 value."""
FP8_NAN: Final = 0x7F
"""The e4m3 code written for a NaN. (0xFF is the other one; e4m3 has no infinity.)"""
MIN_SCALE: Final = 2.0**-126
"""The smallest scale that `pack` writes: the smallest normal float32, so that its reciprocal is finite."""


@dataclass(frozen=True)
class Field:
    """Adjacent elements of one dtype in a token.

    name    "codes", "scales" or "rope"
    dtype   a key of `ITEMSIZE`
    count   elements
    offset  first byte, from the start of the token's row
    row     which of the token's rows: an index of `TokenFormat.row_bytes`
    """

    name: str
    dtype: str
    count: int
    offset: int
    row: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.count * self.itemsize


@dataclass(frozen=True)
class TokenFormat:
    """How a latent cache stores one token.

    name        as `cache_format=` spells it
    d_qk        elements of a query and of a key
    d_v         elements of a value, the leading ones of the key
    fields      all of a token, in the order of their bytes
    quant_tile  consecutive codes that share a scale
    row_bytes   bytes of each row that a token has. One: a page holds token after token. Two: a page holds the first row
                of every token, then the second
    """

    name: str
    d_qk: int
    d_v: int
    fields: tuple[Field, ...]
    quant_tile: int
    row_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        for row, size in enumerate(self.row_bytes):
            end = 0
            for field in (field for field in self.fields if field.row == row):
                if field.offset < end or field.offset % field.itemsize:
                    raise ValueError(f"{field.name}: got offset {field.offset}; needs a free, aligned byte from {end}")
                end = field.end
            if end > size:
                raise ValueError(f"row_bytes: got {size} bytes of row {row}; needs {end}")
        if self.num_scales * self.quant_tile != self.codes.count:
            got = f"{self.num_scales} scales of {self.quant_tile} codes"
            raise ValueError(f"quant_tile: got {got}; needs a scale for each of the {self.codes.count} codes")
        if self.nope_dim + self.rope_dim != self.d_qk:
            raise ValueError(f"d_qk: got {self.d_qk}; needs {self.nope_dim + self.rope_dim}, all elements of the token")

    def field(self, name: str) -> Field:
        """The field of that name.

        Raises:
            KeyError: the format has none.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"{self.name} has no field {name!r}")

    @property
    def codes(self) -> Field:
        """The quantized elements, those without position encoding."""
        return self.field("codes")

    @property
    def scales(self) -> Field:
        """The factors of the codes, one for each quant tile."""
        return self.field("scales")

    @property
    def rope(self) -> Field | None:
        """Elements with rotary position encoding, or None where all are quantized."""
        return next((field for field in self.fields if field.name == "rope"), None)

    @property
    def nope_dim(self) -> int:
        """Elements that are quantized."""
        return self.codes.count

    @property
    def rope_dim(self) -> int:
        """Elements with rotary position encoding."""
        return self.rope.count if self.rope else 0

    @property
    def num_scales(self) -> int:
        """Scales of a token."""
        return self.scales.count

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, all its rows together."""
        return sum(self.row_bytes)


V3_2: Final = TokenFormat(
    name="v3.2",
    d_qk=576,
    d_v=512,
    fields=(
        Field("codes", "float8_e4m3fn", count=512, offset=0),
        Field("scales", "float32", count=4, offset=512),
        Field("rope", "bfloat16", count=64, offset=528),
    ),
    quant_tile=128,
    row_bytes=(656,),
)
"""DeepSeek-V3.2 and GLM-5."""

FORMATS: Final = {V3_2.name: V3_2}
"""All formats, by name."""
