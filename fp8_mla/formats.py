"""Formats of a token in a latent cache, byte by byte. Plain Python, without torch and without a GPU.

One token of the V3.2 format takes 656 bytes::

    byte 0            512        528            656
         | 512 e4m3    | 4 scales | 64 bfloat16  |
         | codes       | float32  | rope part    |

The other formats split a token into a *data row* and a *scale row*, which lie next to each other (interleaved) or in
two blocks of a page (planar). `docs/users/formats.md` has all formats and their quantization rules in words. All code
takes the numbers of a format from here, kernels, budget, tests and benchmarks included. A new format is one more
`TokenFormat` in `FORMATS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ITEMSIZE: Final = {
    "bfloat16": 2,
    "float32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes of an item, by the name that torch gives its dtype."""
ELEMENTS_PER_ITEM: Final = {"float4_e2m1fn_x2": 2}
"""Elements of an item, unless it is one: the even element is in the low bits."""
FP8_MAX: Final = 448.0
"""The largest finite e4m3 value."""
FP8_NAN: Final = 0x7F
"""The e4m3 code written for a NaN. (0xFF is the other one; e4m3 has no infinity.)"""
FP4_MAX: Final = 6.0
"""The largest e2m1 value; e2m1 has neither NaN nor infinity."""
FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the e2m1 codes 0 to 7; codes 8 to 15 are their negatives."""
E8M0_BIAS: Final = 127
"""A ue8m0 byte e means 2 ** (e - 127)."""
E8M0_NAN: Final = 0xFF
"""The ue8m0 byte that means NaN."""
MIN_SCALE: Final = 2.0**-126
"""The smallest float32 scale that `pack` writes: the smallest normal number, so that its reciprocal is finite."""
MIN_SCALE_EXPONENT: Final = -22
"""Exponent of the smallest ue8m0 scale that `pack` writes, 2 ** -22: a largest magnitude below 1e-4 counts as 1e-4."""
MIN_INDEX_ABSMAX: Final = 1e-4
"""A smaller largest magnitude of an index key counts as this; all engines use this number."""
MIN_FP4_SCALE: Final = 2.0**-9
"""The smallest e4m3 scale that `pack` writes: the smallest positive e4m3 number."""

CACHE_LAYOUTS: Final = ("planar", "interleaved")
"""Orders of a page's tokens that have two rows: all data rows, then all scale rows; or token after token."""


@dataclass(frozen=True)
class Field:
    """Adjacent elements of one dtype in a token.

    name    "codes", "scales" or "rope"
    dtype   a key of `ITEMSIZE`
    count   number of elements; some dtypes have two in a byte
    offset  first byte, from the start of the token's row
    row     number of the token's row: an index of `TokenFormat.row_bytes`
    """

    name: str
    dtype: str
    count: int
    offset: int
    row: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an item of the dtype, which is one element or more."""
        return ITEMSIZE[self.dtype]

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 * self.itemsize // ELEMENTS_PER_ITEM.get(self.dtype, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.bits // 8

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class TokenFormat:
    """How a latent cache stores one token.

    name            name for `cache_format=`
    d_qk            elements of a query and of a key
    d_v             elements of a value, the leading ones of the key
    fields          all fields of a token, in the order of their bytes
    quant_tile      consecutive codes that share a scale
    row_bytes       bytes of each row of a token. One row: a page holds token after token. Two rows, data and scales: a
                    page holds the data row of every token, then the scale row of every token (planar)
    may_interleave  a page may instead hold token after token, each a data row and a scale row
    wider_bytes     other sizes that a cache's tokens may have; their additional bytes are not read
    """

    name: str
    d_qk: int
    d_v: int
    fields: tuple[Field, ...]
    quant_tile: int
    row_bytes: tuple[int, ...]
    may_interleave: bool = False
    wider_bytes: tuple[int, ...] = ()

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
        """Returns the field of that name.

        Raises:
            KeyError: the format does not have it.
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
        """Elements with rotary position encoding, or None if all are quantized."""
        return next((field for field in self.fields if field.name == "rope"), None)

    @property
    def nope_dim(self) -> int:
        """Number of elements that are quantized."""
        return self.codes.count

    @property
    def rope_dim(self) -> int:
        """Number of elements with rotary position encoding."""
        return self.rope.count if self.rope else 0

    @property
    def num_scales(self) -> int:
        """Number of scales of a token."""
        return self.scales.count

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, all its rows together."""
        return sum(self.row_bytes)

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """Sizes that the tokens of a cache may have: the size of its last dimension."""
        return (self.token_bytes, *self.wider_bytes)

    @property
    def cache_layouts(self) -> tuple[str, ...]:
        """The members of `CACHE_LAYOUTS` that the format has; the first is the default."""
        if len(self.row_bytes) == 1:
            return ("interleaved",)
        return CACHE_LAYOUTS if self.may_interleave else ("planar",)

    def start(self, field: Field) -> int:
        """Returns the first byte of a field if the rows of a token lie one after the other, as `pack` returns them."""
        return sum(self.row_bytes[: field.row]) + field.offset

    def page_layout(
        self, page_size: int, cache_layout: str | None = None, *, token_stride: int | None = None
    ) -> PageLayout:
        """Returns where the rows of a page's tokens are.

        Args:
            page_size: tokens of a page, at least 1.
            cache_layout: "planar" or "interleaved"; None: the first of `cache_layouts`.
            token_stride: interleaved only: bytes from token to token; default `token_bytes`.

        Raises:
            ValueError: the format does not have the layout, or a number does not fit.
        """
        layout = self.cache_layouts[0] if cache_layout is None else cache_layout
        if layout not in self.cache_layouts:
            raise ValueError(f"cache_layout: got {layout!r}; needs {_either(self.cache_layouts)} for {self.name}")
        if page_size < 1:
            raise ValueError(f"page_size: got {page_size}; needs at least 1")
        if layout == "planar":
            if token_stride is not None:
                raise ValueError(f"token_stride: got {token_stride}; needs None: a planar page has rows of two strides")
            data, scale = self.row_bytes
            return PageLayout(layout, data, page_size * data + self.scales.offset, scale, page_size * (data + scale))
        stride = self.token_bytes if token_stride is None else token_stride
        page_bytes = (page_size - 1) * stride + self.token_bytes
        return PageLayout(layout, stride, self.start(self.scales), stride, page_bytes)


@dataclass(frozen=True)
class PageLayout:
    """Where the rows of a page's tokens are, in bytes; pages themselves may be any distance apart.

    The data row of the token at `offset` is at ``offset * data_stride`` from the page's first byte, its first scale at
    ``scale_offset + offset * scale_stride``. That holds for formats with one row a token as well.

    cache_layout  "planar" or "interleaved"
    data_stride   bytes from data row to data row
    scale_offset  byte of the first scale of the page's first token
    scale_stride  bytes from one token's scales to those of the next
    page_bytes    from the page's first byte to the end of its last row: the least distance of two pages
    """

    cache_layout: str
    data_stride: int
    scale_offset: int
    scale_stride: int
    page_bytes: int


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in names)


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

V3_2_NOPE: Final = TokenFormat(
    name="v3.2_nope",
    d_qk=512,
    d_v=512,
    fields=(
        Field("codes", "float8_e4m3fn", count=512, offset=0),
        Field("scales", "float32", count=4, offset=512),
    ),
    quant_tile=128,
    row_bytes=(528,),
    wider_bytes=(V3_2.token_bytes,),
)
"""V3.2's codes and scales without a rope part, for models whose cache has none. V3.2's tokens can be read as such."""

V4: Final = TokenFormat(
    name="v4",
    d_qk=512,
    d_v=512,
    fields=(
        Field("codes", "float8_e4m3fn", count=448, offset=0),
        Field("rope", "bfloat16", count=64, offset=448),
        Field("scales", "float8_e8m0fnu", count=7, offset=0, row=1),
    ),
    quant_tile=64,
    row_bytes=(576, 8),
)
"""DeepSeek-V4. The rope part is a value too; the last byte of a scale row is padding."""

V4_1: Final = TokenFormat(
    name="v4.1",
    d_qk=512,
    d_v=512,
    fields=(
        Field("codes", "float8_e4m3fn", count=512, offset=0),
        Field("scales", "float8_e8m0fnu", count=16, offset=0, row=1),
    ),
    quant_tile=32,
    row_bytes=(512, 16),
    may_interleave=True,
)
"""DeepSeek-V4.1, sliding-window cache: all elements are quantized."""

V4_1_FP4: Final = TokenFormat(
    name="v4.1_fp4",
    d_qk=512,
    d_v=512,
    fields=(
        Field("codes", "float4_e2m1fn_x2", count=512, offset=0),
        Field("scales", "float8_e4m3fn", count=32, offset=0, row=1),
    ),
    quant_tile=16,
    row_bytes=(256, 32),
    may_interleave=True,
)
"""DeepSeek-V4.1, compressed cache: two codes a byte, the even one in the low nibble."""

INDEX_KEY: Final = TokenFormat(
    name="index_key",
    d_qk=128,
    d_v=128,
    fields=(
        Field("codes", "float8_e4m3fn", count=128, offset=0),
        Field("scales", "float32", count=1, offset=0, row=1),
    ),
    quant_tile=128,
    row_bytes=(128, 4),
)
"""A key of the indexer, which chooses tokens for sparse attention. It is no latent, so it is not in `FORMATS`."""

FORMATS: Final = {token_format.name: token_format for token_format in (V3_2, V3_2_NOPE, V4, V4_1, V4_1_FP4)}
"""All formats, by name."""

PAIRS: Final = (
    (V3_2.name, V3_2.name),
    (V3_2_NOPE.name, V3_2_NOPE.name),
    (V4.name, V4.name),
    (V4_1.name, V4_1.name),
    (V4_1.name, V4_1_FP4.name),
)
"""Pairs of formats of two caches that one call may attend to, the first cache's first."""


def as_format(token_format: TokenFormat | str, name: str = "token_format") -> TokenFormat:
    """Returns the format itself, or the format of that name.

    Args:
        token_format: a format or a key of `FORMATS`.
        name: name of the argument, for messages.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(token_format, TokenFormat):
        return token_format
    if not isinstance(token_format, str) or token_format not in FORMATS:
        raise ValueError(f"{name}: got {token_format!r}; needs {_either(tuple(FORMATS))}")
    return FORMATS[token_format]


def format_of_cache(num_bytes: int, d_qk: int) -> TokenFormat:
    """Returns the format of a cache whose caller names none.

    Args:
        num_bytes: bytes of a token, the last dimension of the cache.
        d_qk: columns of the queries, which tell V3.2 with a rope part from V3.2 without.

    Raises:
        ValueError: no format has this number of bytes, or several have it.
    """
    if num_bytes == V3_2.token_bytes:
        return V3_2_NOPE if d_qk == V3_2_NOPE.d_qk else V3_2
    found = [token_format for token_format in FORMATS.values() if token_format.token_bytes == num_bytes]
    if not found:
        sizes = sorted({token_format.token_bytes for token_format in (*FORMATS.values(), V3_2)}, reverse=True)
        raise ValueError(f"kv_cache: got tokens of {num_bytes} bytes; needs {_list(sizes)}")
    if len(found) > 1:
        names = _either(tuple(token_format.name for token_format in found))
        raise ValueError(f"cache_format: got None for tokens of {num_bytes} bytes; needs {names}: both have as many")
    return found[0]


def format_of_extra_cache(first: TokenFormat, num_bytes: int, extra_format: str | None) -> TokenFormat:
    """Returns the format of a second cache that a call attends to.

    Args:
        first: the format of the first cache.
        num_bytes: bytes of a token of the second cache.
        extra_format: its name; None: the format of `PAIRS` that has this number of bytes.

    Raises:
        ValueError: no pair of `PAIRS` fits.
    """
    partners = [FORMATS[second] for name, second in PAIRS if name == first.name]
    if not partners:
        raise ValueError(f"extra_kv_cache: got a second cache; needs None with a first cache of {first.name}")
    if extra_format is not None:
        found = as_format(extra_format, "extra_cache_format")
        if found not in partners:
            needs = _either(tuple(partner.name for partner in partners))
            raise ValueError(
                f"extra_cache_format: got {extra_format!r}; needs {needs} with a first cache of {first.name}"
            )
        return found
    fitting = [partner for partner in partners if num_bytes in partner.cache_bytes]
    if not fitting:
        sizes = _list(sorted({size for partner in partners for size in partner.cache_bytes}, reverse=True))
        raise ValueError(
            f"extra_kv_cache: got tokens of {num_bytes} bytes; needs {sizes} with a first cache of {first.name}"
        )
    return fitting[0]


def _list(sizes: list[int]) -> str:
    return " or ".join(str(size) for size in sizes)
