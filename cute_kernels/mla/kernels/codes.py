"""Codes and scales as float16 numbers, exactly: all that depends on which codes and scales a format has.

QK multiplies Q by code x scale, relative to the largest scale of the key's row. float16 holds that for any code where
the scales of a row are within 2^-21 of the largest. PV multiplies P by code x scale relative to the unit of O
(`ScaledValueUnits`). In a stage each code is a byte of e4m3, and one conversion makes two numbers of two of them. e2m1
codes are expanded to that, exactly, in the stage: once, where QK and PV both read them (`Codes.expand`). With their
scales, e4m3 numbers, they are in range of float16 as they are.

A subclass of `Codes` has one type of codes and one of scales, and roles ask `of` for that of a format. So a format with
other codes or scales is one more subclass and its line in `TYPES`; no other file here says what a format has.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float16, Float32, Int32

from cute_kernels.device import pairs, registers
from cute_kernels.mla.kernels.convert_q import code_chunk
from cute_kernels.mla.kernels.smem import key_of_row, line_offset, scale_words
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS
from cute_kernels.mla.spec import LINE_BYTES, MASKED_SCALE, TOKENS_PER_TILE, MlaDecodeSpec, expands, scale_row
from fp8_mla.formats import TokenFormat

TOP_FIELD = 22  # exponent field in float16 of a row's largest scale: 2^7, so the smallest normal one is 2^-14
MIN_TOP, MAX_TOP = 60, 167  # ue8m0: smaller rows count as 2^-67, where rope parts still fit; above 2^40 S may not
NAN_BYTE = 255  # the ue8m0 byte that means NaN
FIELD = 0x04000400  # one of the exponent, in two float16 numbers
ROPE_UNIT = 2.0**-2  # of O of a rope part: float16 holds rope / ROPE_UNIT of MIN_ROPE to MAX_ROPE
ROPE_WEIGHTS = 0x40804080  # 1 / ROPE_UNIT as bfloat16, twice
FP4_WEIGHT, FP4_WEIGHTS = 2.0**4, 0x4C004C00  # QK: times any e2m1 code and e4m3 scale it is in range; as two float16
FP4_ROOM = 6  # codes are up to 6, not 448, so weights of V may be 2^6 larger
MAX_FP4_UNIT = 5  # the largest exponent of a unit whose window has all e4m3 scales
ABOVE_BYTE = 16  # `above_byte` of a unit of exponent 0
FP4_MIN_EXPONENT = -9  # of the smallest e4m3 scale, and of the smallest unit whose power float16 holds
EMPTY = 1000  # an exponent beyond any
LOW_MAGNITUDES, HIGH_MAGNITUDES = 0x3C383000, 0x4C484440  # e4m3 bytes of the e2m1 numbers 0, 0.5, 1, 1.5; 2, 3, 4, 6
BYTE_PAIRS = (0x5140, 0x7362)  # PRMT: two values of two keys, for rows m even and odd
EXPANDED_ROWS = 4  # that a lane reads at once
TOP_BITS = -0x7F7F7F80  # 0x80808080


class RowFactors(NamedTuple):
    """Powers of two that keep a row of keys in range of float16 for QK.

    offset  what `multiplier` adds to scales
    factor  S times this is that of the row
    rope    what its rope part is multiplied by, a pair of bfloat16
    fits    1 if float16 holds all of the row
    """

    offset: Int32
    factor: Float32
    rope: Int32
    fits: Int32


class Codes:
    """Device code for one format: how its codes and scales lie in a stage, and the numbers that they mean.

    QK reads codes in chunks of 64 columns, 16 codes of each of a thread's two rows. They share a scale. A line is 128
    bytes of a row.

    quant_tiles    those that `chunk_multiplier` knows
    line_parts     a row's last line may be incomplete: code bytes are a multiple of this
    masked_scales  a word of the scales of a masked key, which fit the units of its tile; its codes are zeros
    room           exponents that a scale may be above that of its unit
    least_unit     the smallest exponent of a unit
    """

    quant_tiles: ClassVar[tuple[int, ...]]
    room: ClassVar[int] = 0
    least_unit: ClassVar[int] = -EMPTY
    line_parts: ClassVar[int] = LINE_BYTES
    masked_scales: ClassVar[int] = 0

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

    def load_row_scales(self, smem, spec: MlaDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """The words of a key's scales that `chunk_multiplier` takes."""
        raise NotImplementedError

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Which word, and which of its bytes, has the scale of a thread's codes in chunk c; see `scale_index`."""
        raise NotImplementedError

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """What QK multiplies a row by, from the words of its scales."""
        raise NotImplementedError

    def chunk_multiplier(self, words: cute.Tensor, factors: RowFactors, c: int, tid: Int32) -> Int32:
        """What a thread's codes of a row in chunk c are multiplied by, as two float16 numbers."""
        word, byte = self.scale_place(c, tid)
        return self.multiplier(words[word], factors.offset, byte)

    def chunk_multipliers(self, words: cute.Tensor, factors: RowFactors, c: int, tid: Int32) -> Int32:
        """Those of chunks c and c + 1, whose scales are in one word, as a pair of float16."""
        (word, byte), (same, second) = self.scale_place(c, tid), self.scale_place(c + 1, tid)
        if same != word:
            raise ValueError(f"scales: got those of two chunks of {self.kind.name} in two words; needs one word")
        return self.multiplier(words[word], factors.offset, byte, second)

    def scale_index(self, c: Any, lane: Any) -> Any:
        """Which scale of a row the 16 codes have that a lane of four has in chunk c.

        Lanes have pieces 0, 1, 4, 5 of 16 codes of 128 for even c, 2, 3, 6, 7 for odd c.
        """
        return (c // 2 * 8 + code_chunk(lane, c % 2)) // (self.kind.quant_tile // 16)

    # ---- scales

    def multiplier(self, word: Int32, offset: Int32, byte: Any, second: Any = None) -> Int32:
        """What codes of two scale bytes of a word are multiplied by, as two float16 numbers; None: of one byte."""
        raise NotImplementedError

    def scale_of(self, byte: Int32) -> Float32:
        """The scale that a byte means."""
        raise NotImplementedError

    def exponent(self, byte: Int32) -> Int32:
        """floor(log2) of the scale that a byte means, less `room`. 0 is `-EMPTY`: its codes count for nothing."""
        raise NotImplementedError

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Not 0 if one of the four scales of a word does not fit its unit; see `ScaledValueUnits` for the others."""
        raise NotImplementedError

    def is_small(self, word: Int32, tops: Int32) -> Int32:
        """Not 0 if one of the four scales of a word, which fit, is so small that partials need block scales."""
        return Int32(0)

    def fitted(self, word: Int32, tops: Int32) -> Int32:
        """A word of scales for `value_weights`, some of which do not fit: their weights are 0, as those of zeros."""
        return word

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Weights of V of the four scales of a word, which fit, as two words of float16.

        `power` is that of their unit, where all have one, as float16, twice.
        """
        raise NotImplementedError


# ---- scales of any format


def byte_pair(word: Int32, byte: Any, second: Any = None) -> Int32:
    """Two bytes of a word, or one twice, as two 16-bit numbers."""
    places = byte * 0x0101 if second is None else byte + second * 0x0100
    return Int32(cute.arch.prmt(word, Int32(0), Int32(0x4040) + places))


# ---- float16 numbers of any format


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


@cute.jit
def widen_values(raw: cute.Tensor, m: cutlass.Constexpr, half: cute.Tensor):
    """Eight numbers of A of row block m, float16: rows g and g + 8, keys 2 q and on and 2 q + 8 and on."""
    for i in cutlass.range_constexpr(2):
        codes = cute.make_rmem_tensor(4, Float8E4M3FN)
        words = cute.recast_tensor(codes, Int32)
        words[0] = Int32(cute.arch.prmt(raw[m // 2, 2 * i], raw[m // 2, 2 * i + 1], Int32(BYTE_PAIRS[m % 2])))
        cute.make_tensor(half.iterator + 4 * i, cute.make_layout(4)).store(codes.load().to(Float16))


def value_operand(raw: cute.Tensor, m: int, operand: cute.Tensor) -> None:
    """A of row block m, from eight codes of each of four keys: rows g and g + 8, keys 2 q, 2 q + 8 and on."""
    half = cute.make_rmem_tensor(8, Float16)
    widen_values(raw, m, half)
    words = cute.recast_tensor(half, Int32)
    for i in range(4):
        operand[i] = words[i]


# ---- rope parts


@cute.jit
def rope_to_float16(word: Int32) -> Int32:
    """A pair of bfloat16 over ROPE_UNIT, as float16."""
    bits, pair = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float16)
    bits[0], bits[1] = word << 16, word & -0x10000
    pair.store((cute.recast_tensor(bits, Float32).load() * (1.0 / ROPE_UNIT)).to(Float16))
    return cute.recast_tensor(pair, Int32)[0]


@cute.jit
def rope_to_bfloat16(word: Int32) -> Int32:
    """A pair of float16 as bfloat16, still over ROPE_UNIT."""
    pair, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(pair, Int32)[0] = word
    numbers.store(pair.load().to(Float32).to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


@cute.jit
def rope_over_unit(word: Int32, is_float16: cutlass.Boolean) -> Int32:
    """A pair of rope numbers over ROPE_UNIT as bfloat16: from `rope_to_float16`, or as they came."""
    numbers = pairs.multiply_bfloat16(word, registers.opaque(Int32(ROPE_WEIGHTS)))
    if is_float16:
        numbers = rope_to_bfloat16(word)
    return numbers


# ---- e4m3 codes


class FloatScales(Codes):
    """e4m3 codes with float32 scales. `QkWarpgroups` and `PvWarpgroups` read them; the loader alone asks this class."""

    quant_tiles = (128,)
    masked_scales = pairs.float_bits(MASKED_SCALE)


class E4m3Codes(Codes):
    """e4m3 codes with ue8m0 scales. A thread reads 16 bytes of a row: a piece of a line of 128 codes or of half one."""

    quant_tiles = (32, 64)
    line_parts = LINE_BYTES // 2

    def __init__(self, kind: TokenFormat):
        super().__init__(kind)
        self.half_line = kind.codes.count % LINE_BYTES != 0
        self.chunks = kind.codes.count // BLOCK_COLUMNS

    def rest_chunk(self, chunk: Any) -> Any:
        """Chunks 0 to 3 of half a line lie where QK reads 0, 1, 4 and 5, four lanes at a time."""
        return chunk % 2 + chunk // 2 * 4

    def load_row_scales(self, smem, spec: MlaDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
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

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """From the largest and the smallest byte of the row. A row of zeros, masked or unwritten, has codes of 0."""
        largest = smallest = Int32(0)
        for i in range(cute.size(words)):
            for part in (0, 8):  # even bytes, odd ones
                mask = self.scale_mask(i) >> part & 0x00FF00FF
                low = (words[i] >> part) & mask
                high = low | (0x00FF00FF & ~mask)
                largest = pairs.max_u16x2(largest, low) if i + part > 0 else low
                smallest = pairs.min_u16x2(smallest, high) if i + part > 0 else high
        byte = cutlass.max(largest & 0xFF, largest >> 16)
        least = cutlass.min(smallest & 0xFF, smallest >> 16)
        top = cutlass.max(byte, MIN_TOP)
        is_zero = byte == 0
        offset = cutlass.select_(is_zero, Int32(FIELD), (TOP_FIELD - top) * FIELD)
        fits = cutlass.select_(least > top - TOP_FIELD, Int32(1), Int32(0))
        fits = cutlass.select_(byte > MAX_TOP, Int32(0), cutlass.select_(is_zero, Int32(1), fits))
        return RowFactors(
            Int32(offset),
            ((top - (TOP_FIELD - 15)) << 23).bitcast(Float32),
            (2 * 127 + (TOP_FIELD - 15) - top) * 0x00800080,
            Int32(fits),
        )

    def multiplier(self, word: Int32, offset: Int32, byte: Any, second: Any = None) -> Int32:
        """The byte is the exponent."""
        return byte_pair(word, byte, second) * 1024 + offset

    def exponent(self, byte: Int32) -> Int32:
        """The byte is the exponent."""
        return cutlass.select_(byte == 0, Int32(-EMPTY), byte - 127)

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Bytes from 20 below that of the unit on fit. One subtraction of words: a borrow begins where one does not."""
        below = tops - word
        return ((below & 0x7F7F7F7F) + 0x01010101 * (127 - 20) | below) & TOP_BITS

    def is_small(self, word: Int32, tops: Int32) -> Int32:
        """From 12 to 20 below that of the unit, times small codes: their sum over V_UNIT, as float16, loses digits."""
        below = tops - word
        return (below + 0x01010101 * (128 - 12)) & (below + 0x01010101 * (127 - 20) ^ -1) & TOP_BITS

    def fitted(self, word: Int32, tops: Int32) -> Int32:
        """A byte 21 below that of its unit has a field of 0."""
        result = Int32(0)
        for i in range(4):
            byte, top = (word >> 8 * i) & 0xFF, (tops >> 8 * i) & 0xFF
            byte = cutlass.select_(byte > top, top - 21, cutlass.max(byte, top - 21))
            result |= Int32(byte) << 8 * i
        return result

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Exponent fields from 1 to 21: 2^-14 to 2^6."""
        fields, weights = 0x15151515 - (tops - word), cute.make_rmem_tensor(2, Int32)
        for i in range(2):
            weights[i] = byte_pair(fields, Int32(2 * i), Int32(2 * i + 1)) * 1024
        return weights

    def scale_of(self, byte: Int32) -> Float32:
        """2 ** (byte - 127); 0 is a subnormal number."""
        word = cute.make_rmem_tensor(1, Int32)
        bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
        word[0] = Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFFFFFF), bits))
        return cute.recast_tensor(word, Float32)[0]


# ---- e2m1 codes


class E2m1Codes(Codes):
    """e2m1 codes, two a byte, with e4m3 scales. The two lines of a row are expanded to four of e4m3 codes."""

    quant_tiles = (16,)
    room = FP4_ROOM
    least_unit = FP4_MIN_EXPONENT
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

    def load_row_scales(self, smem, spec: MlaDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """Of the 8 for each 128 codes the 4 that a lane needs."""
        words, one = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(1, Int32)
        for j in range(4):
            scale_words(smem, spec, stage, key, 8 * j + tid % 4 // 2 * 4, one)
            words[j] = one[0]
        return words

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """A scale for each 16 codes."""
        return c // 2, tid % 2 + 2 * (c % 2)

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """Any scale is in range; NaN is a NaN."""
        return RowFactors(Int32(0), Float32(1.0 / FP4_WEIGHT), Int32(0), Int32(1))

    def multiplier(self, word: Int32, offset: Int32, byte: Any, second: Any = None) -> Int32:
        """Converted, then multiplied."""
        places = byte * 0x1111 if second is None else byte + second * 0x10
        pair = e4m3_pairs(Int32(cute.arch.prmt(word, Int32(0), places)))[0]
        return pairs.multiply_half(pair, registers.opaque(Int32(FP4_WEIGHTS)))  # `mul` takes registers alone

    def exponent(self, byte: Int32) -> Int32:
        """That of e4m3; smaller numbers count as its smallest one."""
        magnitude = byte & 0x7F
        exponent = cutlass.select_(magnitude < 8, Int32(FP4_MIN_EXPONENT), (magnitude >> 3) - 7) - FP4_ROOM
        return cutlass.select_(magnitude == 0, Int32(-EMPTY), exponent)

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Magnitudes above 127 - `above` do not fit."""
        return ((word & 0x7F7F7F7F) + above) & TOP_BITS

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Converted, times the power of their unit, which is that of all four."""
        weights, (low, high) = cute.make_rmem_tensor(2, Int32), e4m3_pairs(word)
        weights[0], weights[1] = pairs.multiply_half(low, power), pairs.multiply_half(high, power)
        return weights

    def scale_of(self, byte: Int32) -> Float32:
        """An e4m3 number."""
        numbers = cute.make_rmem_tensor(4, Float8E4M3FN)
        cute.recast_tensor(numbers, Int32)[0] = byte
        return numbers.load().to(Float32)[0]


def above_byte(unit: Int32) -> Any:
    """127 less the largest e4m3 scale that fits a unit of that exponent; where smaller scales may not, only 0 does."""
    above = cutlass.max(ABOVE_BYTE - 8 * unit, 0)
    none = Int32(127)
    above = cutlass.select_(unit < FP4_MIN_EXPONENT, none, above)
    return cutlass.select_(unit > MAX_FP4_UNIT, none, above)


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
