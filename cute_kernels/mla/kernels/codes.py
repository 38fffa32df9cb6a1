"""Codes and scales as exact float16 numbers: everything that depends on which codes and scales a format has.

QK multiplies Q by code x scale, relative to the largest scale of the key's row. float16 holds that for any code if the
scales of a row are within 2^-21 of the largest. PV multiplies P by code x scale relative to the unit of O
(`ScaledValueUnits`). In a stage each code is a byte of e4m3, and one conversion turns two of them into two numbers.
e2m1 codes are expanded to e4m3, exactly, in the stage: once, because QK and PV both read them (`Codes.expand`). With
their scales, e4m3 numbers, they are in range of float16 without further scaling.

A subclass of `Codes` has one type of codes and one of scales; roles ask `of` for the subclass of a format. A format
with other codes or scales is one more subclass and its line in `TYPES`; no other file here knows what a format has.
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
MIN_TOP, MAX_TOP = 60, 167  # ue8m0: smaller rows count as 2^-67, where rope parts still fit; above 2^40 S may overflow
NAN_BYTE = 255  # the ue8m0 byte that means NaN
FIELD = 0x04000400  # one step of the exponent, in two float16 numbers
ROPE_UNIT = 2.0**-2  # unit of O of a rope part: float16 holds rope / ROPE_UNIT of MIN_ROPE to MAX_ROPE
ROPE_WEIGHTS = 0x40804080  # 1 / ROPE_UNIT as bfloat16, twice
FP4_WEIGHT, FP4_WEIGHTS = 2.0**4, 0x4C004C00  # QK: times any e2m1 code and e4m3 scale it is in range; as two float16
FP4_ROOM = 6  # codes are up to 6, not 448, so weights of V may be 2^6 larger
MAX_FP4_UNIT = 5  # the largest exponent of a unit whose window has all e4m3 scales
ABOVE_BYTE = 16  # `above_byte` of a unit of exponent 0
FP4_MIN_EXPONENT = -9  # exponent of the smallest e4m3 scale, and of the smallest unit whose power float16 holds
EMPTY = 1000  # an exponent beyond any
LOW_MAGNITUDES, HIGH_MAGNITUDES = 0x3C383000, 0x4C484440  # e4m3 bytes of the e2m1 numbers 0, 0.5, 1, 1.5; 2, 3, 4, 6
BYTE_PAIRS = (0x5140, 0x7362)  # PRMT: two values of two keys, for rows m even and odd
EXPANDED_ROWS = 4  # rows that a lane reads at once
TOP_BITS = -0x7F7F7F80  # 0x80808080


class RowFactors(NamedTuple):
    """Powers of two that keep a row of keys in range of float16 for QK.

    offset  addend of scales in `multiplier`
    factor  S times this is the row's S
    rope    factor of the row's rope part, a pair of bfloat16
    fits    1 if float16 holds the whole row
    """

    offset: Int32
    factor: Float32
    rope: Int32
    fits: Int32


class Codes:
    """Device code for one format: how its codes and scales lie in a stage, and which numbers they mean.

    QK reads codes in chunks of 64 columns: 16 codes of each of a thread's two rows, which share a scale. A line is 128
    bytes of a row.

    quant_tiles    sizes of quant tiles that `chunk_multiplier` supports
    line_parts     a row's last line may be incomplete: code bytes are a multiple of this
    masked_scales  a word of the scales of a masked key, which fit the units of its tile; its codes are zeros
    room           exponents by which a scale may exceed its unit
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
        """Returns where a 16-byte chunk of an incomplete line lies in that line, so that QK has no bank conflicts.

        Raises:
            ValueError: the format's lines are complete.
        """
        raise ValueError(f"codes: got an incomplete line of {self.kind.name}; needs a multiple of {LINE_BYTES} bytes")

    @property
    def expands(self) -> bool:
        """Whether a row's bytes are other codes than e4m3, which `expand` replaces in the stage."""
        return expands(self.kind)

    @property
    def first_line(self) -> int:
        """The line of a stage to which a row's first bytes are copied."""
        return 0

    def expand(self, start: Int32, rows: int, tid: Int32) -> None:
        """Replaces the rows of a warp, 16 or 8, which copies have left in a stage, by e4m3 codes.

        Called by whole warps, once each lane sees these rows. `start` is the address of the stage.
        """
        raise NotImplementedError

    def scale_mask(self, index: int) -> int:
        """Returns a mask of the bytes in word `index` of a key's scales that are not padding."""
        count = min(max(self.kind.num_scales - 4 * index, 0), 4)
        return (1 << 8 * count) - 1 if count < 4 else -1

    # ---- what QK reads

    def load_row_scales(self, smem, spec: MlaDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """Loads the words of a key's scales that `chunk_multiplier` takes."""
        raise NotImplementedError

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Returns which word, and which byte of it, has the scale of a thread's codes in chunk c; see `scale_index`."""
        raise NotImplementedError

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """Returns the factors that QK applies to a row, from the words of its scales."""
        raise NotImplementedError

    def chunk_multiplier(self, words: cute.Tensor, factors: RowFactors, c: int, tid: Int32) -> Int32:
        """Returns the factor of a thread's codes of a row in chunk c, as two float16 numbers."""
        word, byte = self.scale_place(c, tid)
        return self.multiplier(words[word], factors.offset, byte)

    def chunk_multipliers(self, words: cute.Tensor, factors: RowFactors, c: int, tid: Int32) -> Int32:
        """Returns the factors of chunks c and c + 1, whose scales are in one word, as a pair of float16."""
        (word, byte), (same, second) = self.scale_place(c, tid), self.scale_place(c + 1, tid)
        if same != word:
            raise ValueError(f"scales: got those of two chunks of {self.kind.name} in two words; needs one word")
        return self.multiplier(words[word], factors.offset, byte, second)

    def scale_index(self, c: Any, lane: Any) -> Any:
        """Returns which scale of a row belongs to the 16 codes that a lane of four has in chunk c.

        Lanes have pieces 0, 1, 4, 5 of 16 codes of 128 for even c, and pieces 2, 3, 6, 7 for odd c.
        """
        return (c // 2 * 8 + code_chunk(lane, c % 2)) // (self.kind.quant_tile // 16)

    # ---- scales

    def multiplier(self, word: Int32, offset: Int32, byte: Any, second: Any = None) -> Int32:
        """Returns the factor of codes with two scale bytes of a word (one without `second`), as two float16 numbers."""
        raise NotImplementedError

    def scale_of(self, byte: Int32) -> Float32:
        """Returns the scale that a byte means."""
        raise NotImplementedError

    def exponent(self, byte: Int32) -> Int32:
        """Returns floor(log2) of a byte's scale, less `room`. For 0 it is `-EMPTY`: its codes do not count."""
        raise NotImplementedError

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Returns nonzero if one of a word's four scales does not fit its unit; arguments are in `ScaledValueUnits`."""
        raise NotImplementedError

    def is_small(self, word: Int32, tops: Int32) -> Int32:
        """Returns nonzero if one of a word's four scales, all fitting, is so small that partials need block scales."""
        return Int32(0)

    def fitted(self, word: Int32, tops: Int32) -> Int32:
        """Returns a word of scales for `value_weights`; scales that do not fit get weights of 0, like zeros."""
        return word

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Returns the weights of V for a word's four scales, all fitting, as two words of float16.

        `power` is that of their common unit, if they have one, as float16, twice.
        """
        raise NotImplementedError


# ---- scales of any format


def byte_pair(word: Int32, byte: Any, second: Any = None) -> Int32:
    """Returns two bytes of a word, or one twice, as two 16-bit numbers."""
    places = byte * 0x0101 if second is None else byte + second * 0x0100
    return Int32(cute.arch.prmt(word, Int32(0), Int32(0x4040) + places))


# ---- float16 numbers of any format


def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Converts four e4m3 numbers to two pairs of float16."""
    numbers, wide = cute.make_rmem_tensor(4, Float8E4M3FN), cute.make_rmem_tensor(4, Float16)
    cute.recast_tensor(numbers, Int32)[0] = word
    wide.store(numbers.load().to(Float16))
    pairs = cute.recast_tensor(wide, Int32)
    return pairs[0], pairs[1]


@cute.jit
def scale_to_bfloat16(pair: Int32, first: Float32, second: Float32) -> Int32:
    """Multiplies each of a pair of float16 by its scale; bfloat16, exact for codes and scales within its range."""
    codes, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(codes, Int32)[0] = pair
    scaled = cute.make_rmem_tensor(2, Float32)
    scaled[0], scaled[1] = codes[0].to(Float32) * first, codes[1].to(Float32) * second
    numbers.store(scaled.load().to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


# ---- what QK and PV read


def chunk_place(c: Any, tid: Any) -> tuple[Any, Any]:
    """Returns, for a thread's first row and chunk c, the offset in the line's 64 rows and the line's offset."""
    line = line_offset(key_of_row(tid, 0), code_chunk(tid % 4, 0)) ^ (32 * (c % 2))
    return line, c // 2 * (TOKENS_PER_TILE * LINE_BYTES)


def row_numbers(raw: cute.Tensor, r: int) -> cute.Tensor:
    """Converts the 16 codes of row r of a thread, as loaded, to eight pairs of float16 in their order.

    One conversion for all 16 bytes: with four, of a word each, ptxas chooses another order.
    """
    wide = cute.make_rmem_tensor(16, Float16)
    wide.store(raw[None, r].load().to(Float16))
    return cute.recast_tensor(wide, Int32)


@cute.jit
def widen_values(raw: cute.Tensor, m: cutlass.Constexpr, half: cute.Tensor):
    """Converts eight numbers of A of row block m to float16: rows g and g + 8, keys 2 q and on and 2 q + 8 and on."""
    for i in cutlass.range_constexpr(2):
        codes = cute.make_rmem_tensor(4, Float8E4M3FN)
        words = cute.recast_tensor(codes, Int32)
        words[0] = Int32(cute.arch.prmt(raw[m // 2, 2 * i], raw[m // 2, 2 * i + 1], Int32(BYTE_PAIRS[m % 2])))
        cute.make_tensor(half.iterator + 4 * i, cute.make_layout(4)).store(codes.load().to(Float16))


def value_operand(raw: cute.Tensor, m: int, operand: cute.Tensor) -> None:
    """Makes A of row block m from eight codes of each of four keys: rows g and g + 8, keys 2 q, 2 q + 8 and on."""
    half = cute.make_rmem_tensor(8, Float16)
    widen_values(raw, m, half)
    words = cute.recast_tensor(half, Int32)
    for i in range(4):
        operand[i] = words[i]


# ---- rope parts


@cute.jit
def rope_to_float16(word: Int32) -> Int32:
    """Divides a pair of bfloat16 by ROPE_UNIT and converts it to float16."""
    bits, pair = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float16)
    bits[0], bits[1] = word << 16, word & -0x10000
    pair.store((cute.recast_tensor(bits, Float32).load() * (1.0 / ROPE_UNIT)).to(Float16))
    return cute.recast_tensor(pair, Int32)[0]


@cute.jit
def rope_to_bfloat16(word: Int32) -> Int32:
    """Converts a pair of float16 to bfloat16, still divided by ROPE_UNIT."""
    pair, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(pair, Int32)[0] = word
    numbers.store(pair.load().to(Float32).to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


@cute.jit
def rope_over_unit(word: Int32, is_float16: cutlass.Boolean) -> Int32:
    """Returns a pair of rope numbers / ROPE_UNIT as bfloat16, from `rope_to_float16` or unconverted."""
    numbers = pairs.multiply_bfloat16(word, registers.opaque(Int32(ROPE_WEIGHTS)))
    if is_float16:
        numbers = rope_to_bfloat16(word)
    return numbers


# ---- e4m3 codes


class FloatScales(Codes):
    """e4m3 codes with float32 scales. `QkWarpgroups` and `PvWarpgroups` read them; only the loader asks this class."""

    quant_tiles = (128,)
    masked_scales = pairs.float_bits(MASKED_SCALE)


class E4m3Codes(Codes):
    """e4m3 codes with ue8m0 scales. A thread reads 16 bytes of a row: a piece of a line or half line of codes."""

    quant_tiles = (32, 64)
    line_parts = LINE_BYTES // 2

    def __init__(self, kind: TokenFormat):
        super().__init__(kind)
        self.half_line = kind.codes.count % LINE_BYTES != 0
        self.chunks = kind.codes.count // BLOCK_COLUMNS

    def rest_chunk(self, chunk: Any) -> Any:
        """Puts chunks 0 to 3 of half a line where QK reads 0, 1, 4 and 5, four lanes at a time."""
        return chunk % 2 + chunk // 2 * 4

    def load_row_scales(self, smem, spec: MlaDecodeSpec, stage: Int32, key: Int32, tid: Int32) -> cute.Tensor:
        """Loads all scales of the key."""
        words = cute.make_rmem_tensor(scale_row(self.kind) // 4, Int32)
        scale_words(smem, spec, stage, key, 0, words)
        return words

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Finds one of the two or four scales for each 128 codes."""
        upper = tid % 4 // 2
        if self.half_line and c + 1 == self.chunks:
            last = self.kind.num_scales - 1
            return last // 4, Int32(last % 4)
        if self.kind.quant_tile == 64:
            return c // 2 * 2 // 4, c // 2 * 2 % 4 + upper
        return c // 2, 2 * upper + c % 2

    def scale_index(self, c: Any, lane: Any) -> Any:
        """Differs from the base class in half a line, where lanes have pieces 0 to 3."""
        index = super().scale_index(c, lane)
        return cutlass.min(index, self.kind.num_scales - 1) if self.half_line else index

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """Uses the largest and the smallest byte of the row. A row of zeros, masked or unwritten, has codes of 0."""
        largest = smallest = Int32(0)
        for i in range(cute.size(words)):
            for part in (0, 8):  # even bytes, then odd ones
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
        """Adds `offset` to the exponent field that the byte is."""
        return byte_pair(word, byte, second) * 1024 + offset

    def exponent(self, byte: Int32) -> Int32:
        """Returns the exponent: the byte less its bias."""
        return cutlass.select_(byte == 0, Int32(-EMPTY), byte - 127)

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Finds bytes that are not 0 to 20 below their unit's: a borrow of one subtraction of words begins there."""
        below = tops - word
        return ((below & 0x7F7F7F7F) + 0x01010101 * (127 - 20) | below) & TOP_BITS

    def is_small(self, word: Int32, tops: Int32) -> Int32:
        """Finds scales 12 to 20 below their unit: times small codes, their sum over V_UNIT loses digits as float16."""
        below = tops - word
        return (below + 0x01010101 * (128 - 12)) & (below + 0x01010101 * (127 - 20) ^ -1) & TOP_BITS

    def fitted(self, word: Int32, tops: Int32) -> Int32:
        """Replaces bytes that do not fit by 21 below their unit's, whose exponent field is 0."""
        result = Int32(0)
        for i in range(4):
            byte, top = (word >> 8 * i) & 0xFF, (tops >> 8 * i) & 0xFF
            byte = cutlass.select_(byte > top, top - 21, cutlass.max(byte, top - 21))
            result |= Int32(byte) << 8 * i
        return result

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Makes exponent fields from 1 to 21: 2^-14 to 2^6."""
        fields, weights = 0x15151515 - (tops - word), cute.make_rmem_tensor(2, Int32)
        for i in range(2):
            weights[i] = byte_pair(fields, Int32(2 * i), Int32(2 * i + 1)) * 1024
        return weights

    def scale_of(self, byte: Int32) -> Float32:
        """Returns 2 ** (byte - 127); 0 is a subnormal number."""
        word = cute.make_rmem_tensor(1, Int32)
        bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
        word[0] = Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFFFFFF), bits))
        return cute.recast_tensor(word, Float32)[0]


# ---- e2m1 codes


class E2m1Codes(Codes):
    """e2m1 codes, two a byte, with e4m3 scales. The two lines of a row are expanded to four lines of e4m3 codes."""

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
        """The first of the last lines of a row: bytes are copied there, and expanded to all its lines."""
        return (self.kind.codes.count - self.kind.codes.num_bytes) // LINE_BYTES

    def places(self, rows: int, tid: Any) -> tuple[Any, Any]:
        """Returns stage offsets of the 8 bytes that a lane reads, for its warp's first row, and of the 16 it writes."""
        lane, line = tid % 32, TOKENS_PER_TILE * LINE_BYTES
        first = tid // 32 * rows
        read = (self.first_line + lane // 16) * line + line_offset(first, lane % 16 // 2) + lane % 2 * 8
        return read, lane // 8 * line + line_offset(first, lane % 8)

    @cute.jit
    def expand(self, start: Int32, rows: cutlass.Constexpr, tid: Int32):
        """Expands a row at a time: each lane reads 8 bytes, then writes 16, without bank conflicts.

        A row is expanded in place, so no lane writes to it before all have read their part.
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
        """Loads the 4 scales that a lane needs, out of 8 for each 128 codes."""
        words, one = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(1, Int32)
        for j in range(4):
            scale_words(smem, spec, stage, key, 8 * j + tid % 4 // 2 * 4, one)
            words[j] = one[0]
        return words

    def scale_place(self, c: int, tid: Int32) -> tuple[int, Any]:
        """Finds the scale, one for each 16 codes."""
        return c // 2, tid % 2 + 2 * (c % 2)

    def row_factors(self, words: cute.Tensor) -> RowFactors:
        """Returns the same factors for all rows: any scale is in range; a NaN scale stays NaN."""
        return RowFactors(Int32(0), Float32(1.0 / FP4_WEIGHT), Int32(0), Int32(1))

    def multiplier(self, word: Int32, offset: Int32, byte: Any, second: Any = None) -> Int32:
        """Converts the scales, then multiplies them by FP4_WEIGHT."""
        places = byte * 0x1111 if second is None else byte + second * 0x10
        pair = e4m3_pairs(Int32(cute.arch.prmt(word, Int32(0), places)))[0]
        return pairs.multiply_half(pair, registers.opaque(Int32(FP4_WEIGHTS)))  # `mul` takes only registers

    def exponent(self, byte: Int32) -> Int32:
        """Returns the exponent of the e4m3 number; subnormal ones count as the smallest, 2^-9."""
        magnitude = byte & 0x7F
        exponent = cutlass.select_(magnitude < 8, Int32(FP4_MIN_EXPONENT), (magnitude >> 3) - 7) - FP4_ROOM
        return cutlass.select_(magnitude == 0, Int32(-EMPTY), exponent)

    def misfits(self, word: Int32, tops: Int32, above: Int32) -> Int32:
        """Finds magnitudes above 127 - `above`, which do not fit."""
        return ((word & 0x7F7F7F7F) + above) & TOP_BITS

    def value_weights(self, word: Int32, tops: Int32, power: Int32) -> cute.Tensor:
        """Converts the scales and multiplies them by the power of their unit, which all four share."""
        weights, (low, high) = cute.make_rmem_tensor(2, Int32), e4m3_pairs(word)
        weights[0], weights[1] = pairs.multiply_half(low, power), pairs.multiply_half(high, power)
        return weights

    def scale_of(self, byte: Int32) -> Float32:
        """Returns the e4m3 number that the byte is."""
        numbers = cute.make_rmem_tensor(4, Float8E4M3FN)
        cute.recast_tensor(numbers, Int32)[0] = byte
        return numbers.load().to(Float32)[0]


def above_byte(unit: Int32) -> Any:
    """Returns 127 less the largest e4m3 scale that fits a unit of exponent `unit`; if smaller scales may not, 127."""
    above = cutlass.max(ABOVE_BYTE - 8 * unit, 0)
    none = Int32(127)
    above = cutlass.select_(unit < FP4_MIN_EXPONENT, none, above)
    return cutlass.select_(unit > MAX_FP4_UNIT, none, above)


def row_place(first: Any, row: Any) -> Any:
    """Returns the place of a byte in one of eight rows, given its place `first` in the first row: see `line_offset`."""
    return (first ^ (16 * row)) + LINE_BYTES * row


def expand_word(word: Int32) -> tuple[Int32, Int32]:
    """Converts eight e2m1 codes, lowest bits first, to two words of e4m3 codes: magnitudes by table, then signs."""
    magnitudes, moved = word & 0x77777777, word << 4  # each first code's sign moves to the place of the second's
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
"""The class of device code, by the dtypes of codes and scales."""


@functools.cache
def of(kind: TokenFormat) -> Codes:
    """Returns the device code for the codes and scales of a format.

    Raises:
        ValueError: there is none for the format's types, quant tile or size.
    """
    dtypes = (kind.codes.dtype, kind.scales.dtype)
    if dtypes not in TYPES:
        raise ValueError(f"codes and scales: got {dtypes} of {kind.name}; needs one of {tuple(TYPES)}")
    return TYPES[dtypes](kind)
