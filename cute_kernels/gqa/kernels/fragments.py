"""The keys, columns and bytes of a thread of a consumer warp, in fragments of mma.sync m16n8k16.

This module knows what the layout of a cache means to registers; cache_tiles.py knows what it means to TMA.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.device import operands
from cute_kernels.gqa.codes import element
from cute_kernels.gqa.layouts import Which
from cute_kernels.gqa.spec import KEYS_PER_TEAM as KEYS
from cute_kernels.gqa.spec import GqaDecodeSpec


class Thread(NamedTuple):
    """A consumer thread.

    tidx  its number among all consumer threads
    team  number of its team, warps that share 16 keys of every tile
    part  number of its warp's part of d
    """

    warp: Int32
    lane: Int32
    tidx: Int32
    team: Int32
    part: Int32


class SoftmaxState(NamedTuple):
    """The accumulators of a warp, in registers.

    acc_o    its part of O^T, relative to row_max: a fragment for each 16 rows of d and 8 columns
    row_max  maximum of a thread's columns, in units of log2: P's reference, `Softmax.p_exponent` below the largest
    row_sum  sum of P over the keys that this thread has seen
    zeros    sum of P times scale and zero point of V, which O has too much; only if codes have zero points
    """

    acc_o: list
    row_max: cute.Tensor
    row_sum: cute.Tensor
    zeros: cute.Tensor


class ScoreTerms(NamedTuple):
    """Terms that turn q k of a thread's columns into scores in units of log2; slope and position only serve ALiBi."""

    factor: cute.Tensor
    slope: cute.Tensor
    position: cute.Tensor


class TileKeys(NamedTuple):
    """16 keys that a warp has of a tile, in a sequence of `length` keys.

    first   the first key
    own     the two keys that this thread has
    exists  bit i: row i of S has a page that exists
    """

    first: Int32
    own: tuple[Int32, Int32]
    exists: Int32
    length: Int32


class KeptKeys(NamedTuple):
    """Inputs of PV for 16 keys of a tile, in registers.

    s        scores: (key, column) of this thread
    v_scale  scales of V: (key, group)
    raw      V, as the cache stores it: see `Fragments.load_v`
    """

    s: cute.Tensor
    v_scale: cute.Tensor
    raw: cute.Tensor


class Fragments:
    """Facts that the parts of a consumer warp share.

    With g = lane / 4, t = lane % 4: a thread has S and P of keys g and g + 8 (as `key_row` orders them) for the columns
    8 n + 2 t and 8 n + 2 t + 1; its accumulators are two rows of 16 of O^T for the same columns. So the values of a
    column (maximum, sum, factors) are in the thread that needs them.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.n_tiles = spec.columns // 8
        self.thread_columns = spec.columns // 4
        self.d = spec.d // spec.d_split  # elements of the warp's part
        self.k_groups, self.v_groups = (
            groups // spec.d_split if groups > 1 else groups
            for groups in map(spec.scale_groups, (spec.k_scales, spec.v_scales))
        )
        self.codes = spec.codes
        self.v_codes = spec.v_codes
        self.may_be_nan = spec.v_codes.not_finite is not None
        self.k_dtype, self.v_dtype = element(spec.k_operand), element(spec.v_operand)
        self.x_packed = spec.x_packed
        self.pairs_of_tokens = self.x_packed and spec.bytes_cache  # see `key_row`
        self.interleaved_d = spec.bytes_cache and not self.x_packed  # see `device.operands`, "rows are columns of A"
        self.loads_of_v = self.d * self.v_codes.itemsize // self.v_codes.values // 32  # loads of 4 registers
        self.page_bytes = spec.d * spec.box_rows * spec.itemsize

    def key_row(self, i):
        """Returns which of the warp's 16 keys is row i of S.

        V of paged_vllm comes as rows of neighbouring tokens; even and odd tokens make a pair of registers. The rows of
        S take the same order, so that P fits.
        """
        return 2 * (i % 8) + i // 8 if self.pairs_of_tokens else i

    def column(self, i: int, lane):
        """Returns the i-th column that this thread has."""
        return 8 * (i // 2) + 2 * (lane % 4) + i % 2

    def scale_of(self, word: Float32) -> Float32:
        """Returns the scale of a float32 that has a zero point in its four lowest bits."""
        return (word.bitcast(Int32) & -16).bitcast(Float32)

    def centered_zero_point(self, word: Float32) -> Float32:
        """Returns the zero point of such a float32, less what is subtracted from codes."""
        # 2^23 above four bits reads as 2^23 + x
        return ((word.bitcast(Int32) & 15) | 0x4B000000).bitcast(Float32) - (2.0**23 + operands.UINT4_CENTER)

    def mma(self, dtype):
        """Makes the matrix product of 16 keys, or 16 rows of d, by 8 columns."""
        return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))

    def accumulators(self) -> list:
        """Makes O^T: a fragment for each 16 rows of d and 8 columns."""
        mma = self.mma(self.v_dtype)
        shape = mma.partition_shape_C((16, 8))
        return [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(self.d // 16)]

    def key_registers(self) -> KeptKeys:
        """Makes registers for 16 keys."""
        s = cute.make_rmem_tensor((2, self.thread_columns), Float32)
        v_scale = cute.make_rmem_tensor((2, max(self.v_groups, 1)), Float32)
        return KeptKeys(s, v_scale, cute.make_rmem_tensor(4 * self.loads_of_v, Int32))

    def v_registers(self, m: int) -> range:
        """Returns which registers of the raw values have rows 16 m .. 16 m + 15 of V^T."""
        count, m = 2 * self.v_codes.itemsize, m // self.v_codes.values
        return range(count * m, count * (m + 1))

    def row_of_o(self, m: int, g, half: int):
        """Returns which element of the warp's part the accumulators of block m have in row g, or g + 8 if half is 1."""
        if self.v_codes.values == 2:  # see `codes.Uint4`
            return 32 * (m // 2) + 4 * g + 2 * (m % 2) + half
        return 16 * m + (2 * g + half if self.interleaved_d else g + 8 * half)

    def part_address(self, which: Which, tile, part):
        """Returns the address of a part of K or V, from which `chunk_address` finds the chunks of the part."""
        if self.spec.d_split == 1:
            return tile
        if self.x_packed:
            return tile + part * (self.page_bytes // self.spec.d_split)
        shape = self.spec.tile(which)
        return tile + part * (shape.segments // self.spec.d_split * self.spec.keys_per_tile * shape.pitch)

    def block_address(self, which: Which, tile, block: int):
        """Returns the address of the keys from the block-th 16 of each team on. Blocks are multiples of the swizzle."""
        return tile + block * (self.spec.teams * KEYS * self.spec.tile(which).pitch) if block else tile

    def chunk_address(self, which: Which, tile, row, chunk: int, half):
        """Returns the address of 16 bytes of K or V: chunk + half (0 or 1) of row `row` of the tile."""
        if self.x_packed:
            page = self.spec.box_rows
            in_page = row // page * self.page_bytes + row % page * 16 + half * (page * 16)
            return tile + in_page + chunk * (page * 16)
        shape = self.spec.tile(which)
        row_chunks = shape.row // 16
        # the swizzle exchanges bits 4.. of an address with bits 7..
        swizzle = row * shape.pitch // 128 % row_chunks
        segment, inner = chunk // row_chunks, chunk % row_chunks
        base = tile + row * shape.pitch + segment * (self.spec.keys_per_tile * shape.pitch)
        return base + ((inner << 4) ^ ((half ^ swizzle) << 4))

    # ---- V from shared memory, as the cache stores it, in registers `raw`

    @cute.jit
    def load_v(self, address: Int32, thread: Thread) -> cute.Tensor:
        """Loads the warp's part of its keys of V: 2 registers for each 16 rows of V^T, 4 for 16-bit numbers.

        address: address of V of the tile in shared memory.
        """
        spec = self.spec
        w, lane = thread.team, thread.lane
        address = self.part_address("v", address, thread.part)
        page = spec.box_rows
        raw = cute.make_rmem_tensor(4 * self.loads_of_v, Int32)
        for i in cutlass.range_constexpr(self.loads_of_v):
            if const_expr(not self.x_packed):
                row = w * KEYS + lane % 16
                x = operands.load_matrices(self.chunk_address("v", address, row, 2 * i, lane // 16), True)
            elif const_expr(not spec.bytes_cache):
                first = w * KEYS + lane // 16 * 8
                start = address + first // page * self.page_bytes + first % page * 2
                x = operands.load_matrices(start + (16 * i + lane % 16) * (page * 2), False)
            elif const_expr(page > 8):
                first = w * KEYS
                start = address + first // page * self.page_bytes + first % page
                x = operands.load_matrices(start + (32 * i + lane) * page, False)
            else:
                g, t = lane // 4, lane % 4
                start = address + (2 * w + t // 2) * self.page_bytes + 4 * (t % 2) + (32 * i + g) * page
                x = tuple(operands.load_word(start + 8 * j * page) for j in range(4))
            for j in cutlass.range_constexpr(4):
                raw[4 * i + j] = x[j]
        return raw

    @cute.jit
    def mask_v(self, raw: cute.Tensor, keys: TileKeys, lowest: Int32, lane: Int32):
        """Zeros the tokens that no query sees: they may be NaN, and 0 x NaN is NaN."""
        t = lane % 4
        mask = cute.make_rmem_tensor(2, Int32)  # for registers with keys k 0..7 of a fragment, and with 8..15
        # bytes of paged_vllm: a register has four tokens; otherwise two, and others in the second register
        tokens = const_expr(4 if self.pairs_of_tokens else 2)
        for k in cutlass.range_constexpr(2):
            bits = Int32(0)
            for i in cutlass.range_constexpr(tokens):
                token = 4 * t + i if const_expr(tokens == 4) else 2 * t + 8 * k + i
                row = token // 2 + token % 2 * 8 if const_expr(tokens == 4) else token
                key = keys.first + token
                seen = key < keys.length and key >= lowest and ((keys.exists >> row) & 1) == 1
                bits |= cutlass.select_(seen, Int32((1 << (32 // tokens)) - 1), Int32(0)) << (32 // tokens * i)
            mask[k] = bits
        for i in cutlass.range_constexpr(cute.size(raw)):
            raw[i] = raw[i] & mask[self._half(i)]

    def _half(self, i: int) -> int:
        """Returns whether register i of the raw values has keys k 0..7 or 8..15 of a fragment."""
        if self.pairs_of_tokens:
            return 0
        # from ldmatrix: rows are tokens, 8 at a time; in paged_vllm rows are d and a chunk has 8 tokens
        return i % 4 // 2 if self.x_packed else i % 2

    @cute.jit
    def widen_v(self, a: cute.Tensor, raw: list, m: cutlass.Constexpr):
        """Makes block m, 16 rows of V^T, a fragment of A."""
        if const_expr(self.spec.bytes_cache):
            if const_expr(self.x_packed):
                self.codes.widen_rows(a, raw[0], raw[1])
            else:
                shift = const_expr(8 * (m % self.v_codes.values))  # two blocks share registers
                self.v_codes.widen_columns(a, raw[0] >> shift, raw[1] >> shift)
        elif const_expr(self.x_packed):
            operands.take(a, raw[0], raw[1], raw[2], raw[3])
        else:
            operands.take(a, raw[0], raw[2], raw[1], raw[3])
