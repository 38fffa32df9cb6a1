"""Codes and scales as float16 numbers, exactly: all that depends on which codes and scales a format has.

A key is code x scale x WEIGHT. float16 holds that for any code where the scale is in range, and the products then need
nothing between them. In a stage each code is a byte of e4m3, and one conversion makes two numbers of two of them. e2m1
codes are expanded to that, exactly, in the stage: once, where QK and PV both read them (`Codes.expand`).

    scale        in range                              that is
    ue8m0        bytes 105 to 126, 2^-22 to 1/2        as small as quantizers write; values up to 224
    e4m3 (fp4)   magnitudes up to 40                   values up to 240

Other scales, NaN among them, take slow paths in float32 and bfloat16.

A subclass of `Codes` has one type of codes and one of scales, and roles ask `of` for that of a format. So a format with
other codes or scales is one more subclass and its line in `TYPES`; no other file of the room says what a format has.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float16, Float32, Int32

from cute_kernels.mla.kernels.convert_q import code_chunk
from cute_kernels.mla.kernels.pv import widen_values
from cute_kernels.mla.kernels.smem import key_of_row, line_offset
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS
from cute_kernels.mla.latent.kernels.smem import scale_words
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec, expands, scale_row
from cute_kernels.mla.spec import TOKENS_PER_TILE
from fp8_mla.formats import TokenFormat

WEIGHT = 2.0**8
WEIGHTS = 0x5C005C00  # as two float16 numbers
MIN_BYTE, MAX_BYTE = 105, 126  # ue8m0 scales in range
SMALL_BYTE = 116  # smaller ue8m0 scales times small codes, summed and rounded to float16 times WEIGHT, lose digits
NAN_BYTE = 255  # the ue8m0 byte that means NaN
MULTIPLIER = -(104 << 10) * 0x00010001 % 2**32  # exponent field of WEIGHT times a ue8m0 scale, less the byte; twice
MAX_FP4_BYTE = 0x62  # the largest e4m3 scale in range, 40
LOW_MAGNITUDES, HIGH_MAGNITUDES = 0x3C383000, 0x4C484440  # e4m3 bytes of the e2m1 numbers 0, 0.5, 1, 1.5; 2, 3, 4, 6
EXPANDED_ROWS = 4  # that a lane reads at once
TOP_BITS = -0x7F7F7F80  # 0x80808080


class Codes:
    """Device code for one format: how its codes and scales lie in a stage, and the numbers that they mean.

    QK reads codes in chunks of 64 columns, 16 codes of each of a thread's two rows. They share a scale. A line is 128
    bytes of a row.

    masked_scales  a word of scales in range, for a masked key, whose codes are zeros
    quant_tiles    those that `chunk_multiplier` knows
    range_words    which scales are in range: what `outside` takes
    line_parts     a row's last line may be incomplete: code bytes are a multiple of this
    """

    masked_scales: ClassVar[int]
    quant_tiles: ClassVar[tuple[int, ...]]
    range_words: ClassVar[tuple[int, int, int]]
    line_parts: ClassVar[int] = LINE_BYTES

    def __init__(self, kind: TokenFormat):
        if kind.quant_tile not in self.quant_tiles:
            raise ValueError(f"quant_tile: got {kind.quant_tile} of {kind.name}; needs one of {self.quant_tiles}")
        if kind.codes.num_bytes % self.line_parts:
            got = f"{kind.codes.num_bytes} bytes of codes of {kind.name}"
            raise ValueError(f"codes: got {got}; needs a multiple of {self.line_parts}")
        self.kind = kind

    # ---- the row of a key

    def rest_chunk(self, chunk: Any) -> Any:
        """Where a chunk of 16 bytes of a row's incomplete line lies in that line, so that QK reads without conflicts.

        Raises:
            ValueError: the format's lines are complete.
        """
        raise ValueError(f"codes: got an incomplete line of {self.kind.name}; needs a multiple of {LINE_BYTES} bytes")

    @property
    def expands(self) -> bool:
        """Whether a row's bytes are other codes, which `expand` replaces in the stage."""
        return expands(self.kind)

    @property
    def first_line(self) -> int:
        """The line of a stage where a row's bytes are copied to."""
        return 0

    def expand(self, start: Int32, rows: int, tid: Int32) -> None:
        """Replaces the rows of a warp, 16 or 8, which their copies have left in a stage, by e4m3 codes.

        Called by whole warps, once these rows are there for each lane. `start` is the address of the stage.
        """
        raise NotImplementedError

    def scale_mask(self, index: int) -> int:
        """Of word `index` of a key's scales the bytes that are no padding."""
        count = min(max(self.kind.num_scales - 4 * index, 0), 4)
        return (1 << 8 * count) - 1 if count < 4 else -1

    # ---- what QK reads

    def load_row_scales(self, smem, spec: LatentDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """The words of a key's scales that `chunk_multiplier` takes."""
        raise NotImplementedError

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Which word, and which of its bytes, has the scale of a thread's codes in chunk c; see `scale_index`."""
        raise NotImplementedError

    def chunk_multiplier(self, words: cute.Tensor, c: int, tid: Int32) -> Int32:
        """That of a thread's codes of a row in chunk c, as `multiplier` returns it."""
        word, byte = self.scale_place(c, tid)
        return self.multiplier(words[word], byte)

    def chunk_multipliers(self, words: cute.Tensor, c: int, tid: Int32) -> Int32:
        """Those of chunks c and c + 1, whose scales are in one word, as a pair of float16."""
        (word, byte), (same, second) = self.scale_place(c, tid), self.scale_place(c + 1, tid)
        if same != word:
            raise ValueError(f"scales: got those of two chunks of {self.kind.name} in two words; needs one word")
        return self.multiplier(words[word], byte, second)

    def scale_index(self, c: Any, lane: Any) -> Any:
        """Which scale of a row the 16 codes have that a lane of four has in chunk c.

        Lanes have pieces 0, 1, 4, 5 of 16 codes of 128 for even c, 2, 3, 6, 7 for odd c.
        """
        return (c // 2 * 8 + code_chunk(lane, c % 2)) // (self.kind.quant_tile // 16)

    # ---- scales

    def multiplier(self, word: Int32, byte: Any, second: Any = None) -> Int32:
        """WEIGHT times the scales in two bytes of a word, in range, as two float16 numbers; None: in the same byte."""
        raise NotImplementedError

    def out_of_range(self, word: Int32) -> Int32:
        """Not 0 if one of the four scales of a word is out of range."""
        return outside(word, *self.range_words)

    def is_small(self, word: Int32) -> Int32:
        """Not 0 if one of the four scales of a word is so small that a sum of values as float16 needs a scale."""
        raise NotImplementedError

    def scale_of(self, byte: Int32) -> Float32:
        """The scale that a byte means."""
        raise NotImplementedError


# ---- scales of any format


def outside(word: Int32, above: Any, below: Any, signs: Any) -> Int32:
    """Not 0 if one of the four bytes of a word is out of range.

    Its lower seven bits plus `above` reach bit 7 where they are too large, plus `below` do not where they are too
    small; or bit 7 of `signs` is set, and its own.
    """
    low = word & 0x7F7F7F7F
    return (low + above | word & signs | (low + below ^ -1)) & TOP_BITS


def byte_pair(word: Int32, byte: Any, second: Any = None) -> Int32:
    """Two bytes of a word, or one twice, as two 16-bit numbers."""
    places = byte * 0x0101 if second is None else byte + second * 0x0100
    return Int32(cute.arch.prmt(word, Int32(0), Int32(0x4040) + places))


# ---- float16 numbers of any format


@cute.jit
def multiply(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of float16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def weigh(a: Int32) -> Int32:
    """WEIGHT times a pair of float16. `mul` takes registers alone."""
    return cute.arch.inline_ptx(
        f"{{\n.reg .b32 t;\nmov.b32 t, {WEIGHTS};\nmul.rn.f16x2 {{$w0}}, {{$r0}}, t;\n}}",
        write_only_types=[Int32],
        read_only_args=[a],
    )


def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of float16."""
    numbers, wide = cute.make_rmem_tensor(4, Float8E4M3FN), cute.make_rmem_tensor(4, Float16)
    cute.recast_tensor(numbers, Int32)[0] = word
    wide.store(numbers.load().to(Float16))
    pairs = cute.recast_tensor(wide, Int32)
    return pairs[0], pairs[1]


@cute.jit
def scale_to_bfloat16(pair: Int32, first: Float32, second: Float32) -> Int32:
    """A pair of float16 times a scale each, as bfloat16: exact for codes and their scales, within its range."""
    codes, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(codes, Int32)[0] = pair
    scaled = cute.make_rmem_tensor(2, Float32)
    scaled[0], scaled[1] = codes[0].to(Float32) * first, codes[1].to(Float32) * second
    numbers.store(scaled.load().to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


# ---- what QK and PV read


def chunk_place(c: Any, tid: Any) -> tuple[Any, Any]:
    """Of a thread's codes of its first row in chunk c: the offset in its line's 64 rows, and that of the line."""
    line = line_offset(key_of_row(tid, 0), code_chunk(tid % 4, 0)) ^ (32 * (c % 2))
    return line, c // 2 * (TOKENS_PER_TILE * LINE_BYTES)


def row_numbers(raw: cute.Tensor, r: int) -> cute.Tensor:
    """The 16 codes of row r of a thread, as loaded, as eight pairs of float16 in their order.

    One conversion of 16 bytes: four of a word each give ptxas another order.
    """
    wide = cute.make_rmem_tensor(16, Float16)
    wide.store(raw[None, r].load().to(Float16))
    return cute.recast_tensor(wide, Int32)


def value_operand(raw: cute.Tensor, m: int, operand: cute.Tensor) -> None:
    """A of row block m, from eight codes of each of four keys: rows g and g + 8, keys 2 q, 2 q + 8 and on."""
    half = cute.make_rmem_tensor(8, Float16)
    widen_values(raw, m, half)
    words = cute.recast_tensor(half, Int32)
    for i in range(4):
        operand[i] = words[i]


# ---- rope parts


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """The larger magnitudes of two pairs of bfloat16; `a` has no signs."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.bf16x2 t, {$r1};\nmax.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def weigh_bfloat16(word: Int32) -> Int32:
    """WEIGHT times a pair of bfloat16."""
    return cute.arch.inline_ptx(  # `mul` takes registers alone: 2^8, twice
        "{\n.reg .b32 t;\nmov.b32 t, 0x43804380;\nmul.rn.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[word],
    )


@cute.jit
def rope_to_float16(word: Int32) -> Int32:
    """WEIGHT times a pair of bfloat16, as float16."""
    weighted = weigh_bfloat16(word)
    bits, pair = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float16)
    bits[0], bits[1] = weighted << 16, weighted & -0x10000
    pair.store(cute.recast_tensor(bits, Float32).load().to(Float16))
    return cute.recast_tensor(pair, Int32)[0]


@cute.jit
def rope_to_bfloat16(word: Int32) -> Int32:
    """The inverse of `rope_to_float16`."""
    pair, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(pair, Int32)[0] = word
    numbers.store((pair.load().to(Float32) * (1.0 / WEIGHT)).to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


# ---- e4m3 codes


class FloatScales(Codes):
    """e4m3 codes with float32 scales. The roles of mla/kernels read them; the latent loader alone asks this class."""

    masked_scales = (127 - 6) << 23  # MASKED_SCALE of mla.spec, as bits
    quant_tiles = (128,)


class E4m3Codes(Codes):
    """e4m3 codes with ue8m0 scales. A thread reads 16 bytes of a row: a piece of a line of 128 codes or of half one."""

    masked_scales = 0x76767676
    quant_tiles = (32, 64)
    range_words = (0x01010101 * (127 - MAX_BYTE), 0x01010101 * (128 - MIN_BYTE), -1)
    line_parts = LINE_BYTES // 2

    def __init__(self, kind: TokenFormat):
        super().__init__(kind)
        self.half_line = kind.codes.count % LINE_BYTES != 0
        self.chunks = kind.codes.count // BLOCK_COLUMNS

    def rest_chunk(self, chunk: Any) -> Any:
        """Chunks 0 to 3 of half a line lie where QK reads 0, 1, 4 and 5, four lanes at a time."""
        return chunk % 2 + chunk // 2 * 4

    def load_row_scales(self, smem, spec: LatentDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """All."""
        words = cute.make_rmem_tensor(scale_row(self.kind) // 4, Int32)
        scale_words(smem, spec, stage, key, 0, words)
        return words

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Of the two or four scales for each 128 codes."""
        upper = tid % 4 // 2
        if self.half_line and c + 1 == self.chunks:
            last = self.kind.num_scales - 1
            return last // 4, Int32(last % 4)
        if self.kind.quant_tile == 64:
            return c // 2 * 2 // 4, c // 2 * 2 % 4 + upper
        return c // 2, 2 * upper + c % 2

    def scale_index(self, c: Any, lane: Any) -> Any:
        """Lanes have pieces 0 to 3 of half a line."""
        index = super().scale_index(c, lane)
        return cutlass.min(index, self.kind.num_scales - 1) if self.half_line else index

    def multiplier(self, word: Int32, byte: Any, second: Any = None) -> Int32:
        """The byte is the exponent."""
        return byte_pair(word, byte, second) * 1024 + MULTIPLIER

    def is_small(self, word: Int32) -> Int32:
        """Below SMALL_BYTE."""
        return ((word & 0x7F7F7F7F) + 0x01010101 * (128 - SMALL_BYTE) ^ -1) & TOP_BITS

    def scale_of(self, byte: Int32) -> Float32:
        """2 ** (byte - 127); 0 is a subnormal number."""
        word = cute.make_rmem_tensor(1, Int32)
        bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
        word[0] = Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFFFFFF), bits))
        return cute.recast_tensor(word, Float32)[0]


# ---- e2m1 codes


class E2m1Codes(Codes):
    """e2m1 codes, two a byte, with e4m3 scales. The two lines of a row are expanded to four of e4m3 codes."""

    masked_scales = 0x38383838
    quant_tiles = (16,)
    range_words = (0x01010101 * (127 - MAX_FP4_BYTE), TOP_BITS, 0)  # magnitudes up to that
    line_parts = 2 * LINE_BYTES

    def __init__(self, kind: TokenFormat):
        super().__init__(kind)
        if kind.rope is not None:
            raise ValueError(f"rope: got a rope part of {kind.name}; needs none: its rows are expanded to whole lines")

    @property
    def first_line(self) -> int:
        """In the last lines of those that it is expanded to."""
        return (self.kind.codes.count - self.kind.codes.num_bytes) // LINE_BYTES

    def places(self, rows: int, tid: Any) -> tuple[Any, Any]:
        """Offsets in a stage of the 8 bytes that a lane reads of the first row of its warp, and of the 16 it writes."""
        lane, line = tid % 32, TOKENS_PER_TILE * LINE_BYTES
        first = tid // 32 * rows
        read = (self.first_line + lane // 16) * line + line_offset(first, lane % 16 // 2) + lane % 2 * 8
        return read, lane // 8 * line + line_offset(first, lane % 8)

    @cute.jit
    def expand(self, start: Int32, rows: cutlass.Constexpr, tid: Int32):
        """A row at a time: each lane reads 8 bytes, then writes 16, without bank conflicts.

        A row is expanded where it lies, so no lane writes to a row before all have read their part of it.
        """
        read, written = self.places(rows, tid)
        source, target = start + read, start + written
        raw, expanded = cute.make_rmem_tensor((2, EXPANDED_ROWS), Int32), cute.make_rmem_tensor(4, Int32)
        for first in cutlass.range(0, rows * LINE_BYTES, 8 * LINE_BYTES, unroll=1):
            for batch in cutlass.range_constexpr(0, 8, EXPANDED_ROWS):
                for i in cutlass.range_constexpr(EXPANDED_ROWS):
                    place = row_place(source, batch + i) + first
                    words = cute.make_ptr(Int32, place, AddressSpace.smem, assumed_align=8)
                    cute.autovec_copy(cute.make_tensor(words, cute.make_layout(2)), raw[None, i])
                cute.arch.sync_warp()
                for i in cutlass.range_constexpr(EXPANDED_ROWS):
                    for w in cutlass.range_constexpr(2):
                        expanded[2 * w], expanded[2 * w + 1] = expand_word(raw[w, i])
                    place = row_place(target, batch + i) + first
                    words = cute.make_ptr(Int32, place, AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(expanded, cute.make_tensor(words, cute.make_layout(4)))

    def load_row_scales(self, smem, spec: LatentDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """Of the 8 for each 128 codes the 4 that a lane needs."""
        words, one = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(1, Int32)
        for j in range(4):
            scale_words(smem, spec, stage, key, 8 * j + tid % 4 // 2 * 4, one)
            words[j] = one[0]
        return words

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """A scale for each 16 codes."""
        return c // 2, tid % 2 + 2 * (c % 2)

    def multiplier(self, word: Int32, byte: Any, second: Any = None) -> Int32:
        """Converted, then multiplied."""
        places = byte * 0x1111 if second is None else byte + second * 0x10
        return weigh(e4m3_pairs(Int32(cute.arch.prmt(word, Int32(0), places)))[0])

    def is_small(self, word: Int32) -> Int32:
        """None is: the smallest value is 2^-10."""
        return Int32(0)

    def scale_of(self, byte: Int32) -> Float32:
        """An e4m3 number."""
        numbers = cute.make_rmem_tensor(4, Float8E4M3FN)
        cute.recast_tensor(numbers, Int32)[0] = byte
        return numbers.load().to(Float32)[0]


def row_place(first: Any, row: Any) -> Any:
    """Where bytes of one of eight rows lie, if those of the first are at `first`: see `line_offset`."""
    return (first ^ (16 * row)) + LINE_BYTES * row


def expand_word(word: Int32) -> tuple[Int32, Int32]:
    """Eight e2m1 codes, the first in the lowest bits, as two words of e4m3 codes: magnitudes by table, then signs."""
    magnitudes, moved = word & 0x77777777, word << 4  # the first code of each byte has its sign where the second has
    low = Int32(cute.arch.prmt(Int32(LOW_MAGNITUDES), Int32(HIGH_MAGNITUDES), magnitudes))
    high = Int32(cute.arch.prmt(Int32(LOW_MAGNITUDES), Int32(HIGH_MAGNITUDES), magnitudes >> 16))
    low |= Int32(cute.arch.prmt(moved, word, Int32(0x5140))) & TOP_BITS
    high |= Int32(cute.arch.prmt(moved, word, Int32(0x7362))) & TOP_BITS
    return low, high


# ---- which format has which

TYPES: Final[Mapping[tuple[str, str], type[Codes]]] = {
    ("float8_e4m3fn", "float32"): FloatScales,
    ("float8_e4m3fn", "float8_e8m0fnu"): E4m3Codes,
    ("float4_e2m1fn_x2", "float8_e4m3fn"): E2m1Codes,
}
"""By the dtypes of codes and scales."""


@functools.cache
def of(kind: TokenFormat) -> Codes:
    """Device code for the codes and scales of a format.

    Raises:
        ValueError: there is none for its types, its quant tile or its size.
    """
    dtypes = (kind.codes.dtype, kind.scales.dtype)
    if dtypes not in TYPES:
        raise ValueError(f"codes and scales: got {dtypes} of {kind.name}; needs one of {tuple(TYPES)}")
    return TYPES[dtypes](kind)
