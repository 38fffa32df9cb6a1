"""A consumer warp of the decode kernel: 16 keys of a tile, from bytes in shared memory to its share of O."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.device import operands, registers, softmax
from cute_kernels.gqa.kernels.scales import load_scale
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS
from cute_kernels.gqa.spec import GqaDecodeSpec

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
Q_EXPONENT = 14  # of the largest value of a row of Q in float16, whose largest is 15
MAX_GROWTH = 8.0  # of scores over the running maximum, in units of log2, before P is made relative to a new one
FACTOR, SINK, UNIT, FACTS = 0, 1, 2, 3
# In a register of values: the bits that are all ones where a number is not finite (of e4m3: is NaN), the last of them,
# which when added to them meets the sign, and the signs
NOT_FINITE = {
    "float8_e4m3fn": (0x7F7F7F7F, 0x01010101, 0x80808080),
    "bfloat16": (0x7F807F80, 0x00800080, 0x80008000),
    "float16": (0x7C007C00, 0x04000400, 0x80008000),
}
LOWEST_BITS = {1: 0x01010101, 2: 0x00010001}  # of the numbers in a register, by their bytes


def column_facts(spec: GqaDecodeSpec, facts: cute.Pointer) -> cute.Tensor:
    """(column, what): the factor of S but for the softmax scale, the sink, the factor of O."""
    return cute.make_tensor(facts, cute.make_layout((spec.columns, FACTS)))


class TileConsumer:
    """Device code for the warps that multiply in :class:`cute_kernels.gqa.kernels.decode.GqaDecodeKernel`.

    With g = lane / 4, t = lane % 4: a thread has S and P of keys g and g + 8 (as `key_row` orders them) for the columns
    8 n + 2 t and 8 n + 2 t + 1; its accumulators are two rows of 16 of O^T for the same columns. So what belongs to a
    column (maximum, sum, factors) is in the thread that needs it.

    A key that one query sees and another does not has P = 0 for the latter, and 0 x NaN is NaN. Several queries share
    all but a few keys at both ends: where values or scales of such a block of 16 keys are not finite, the queries that
    see them get NaN there and the products get zeros (`spread_nan`).
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.n_tiles = spec.columns // 8
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.is_int8 = spec.kv_dtype == "int8"
        self.k_dtype, self.v_dtype = DTYPES[spec.k_operand], DTYPES[spec.v_operand]
        self.scale_dtype = DTYPES[spec.scale_dtype]
        self.vllm = spec.layout == "vllm"
        self.pairs_of_tokens = self.vllm and spec.bytes_cache  # see `key_row`
        self.interleaved_d = spec.bytes_cache and not self.vllm
        self.row_chunks = spec.row_bytes // 16
        self.page_bytes = spec.d * spec.box_rows * spec.itemsize
        self.has_nan = not self.is_int8 or self.v_groups > 0  # whether values, or scales of tokens, may be NaN

    # ---- what is where

    def key_row(self, i):
        """Which of the warp's 16 keys stands in row i of S.

        V of paged_vllm comes as rows of neighbouring tokens, of which even ones and odd ones make a pair of registers:
        the rows of S take the same order, so that P fits.
        """
        return 2 * (i % 8) + i // 8 if self.pairs_of_tokens else i

    def column(self, i: int, lane):
        """The i-th column that this thread has."""
        return 8 * (i // 2) + 2 * (lane % 4) + i % 2

    def _mma(self, dtype):
        return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))

    def accumulators(self) -> list:
        """O^T: a fragment for each 16 rows of d and 8 columns."""
        mma = self._mma(self.v_dtype)
        shape = mma.partition_shape_C((16, 8))
        return [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(self.spec.d // 16)]

    # ---- the start of a sequence

    @cute.jit
    def load_q(
        self,
        mQ: cute.Tensor,
        mSink: cute.Tensor,
        sQ: cute.Pointer,
        facts: cute.Pointer,
        k_scale: Int64,
        k_strides: tuple,
        v_scale: Int64,
        v_strides: tuple,
        place,
        s_q: Int32,
        w: Int32,
        lane: Int32,
    ):
        """Columns w, w + warps, ... of Q into shared memory as fragments of B, and facts of these columns.

        All that comes from global memory is asked for at once: a launch may find none of it in the L2 cache. Columns
        behind the last row repeat it; nobody stores their results.
        """
        spec = self.spec
        b, kv_head, block, ratio = place
        rows = ratio.divisor * s_q
        pieces, lanes = max(spec.d // 128, 1), min(spec.d // 4, 32)
        turns = const_expr(max(spec.columns // spec.warps, 1))
        words = cute.make_tensor(cute.recast_ptr(sQ, dtype=Int32), cute.make_layout(spec.columns * spec.d // 2))
        sFacts = column_facts(spec, facts)
        raw = cute.make_rmem_tensor((4, pieces, turns), mQ.element_type)
        sink = cute.make_rmem_tensor(turns, Float32)
        k_unit, v_unit = Float32(1.0), Float32(1.0)
        if const_expr(spec.k_scales == "head"):
            k_unit = load_scale(self.scale_dtype, k_scale, Int64(kv_head) * k_strides[1]).to(Float32)
        if const_expr(spec.v_scales == "head"):
            v_unit = load_scale(self.scale_dtype, v_scale, Int64(kv_head) * v_strides[1]).to(Float32)
        for turn in cutlass.range_constexpr(turns):
            row = cutlass.min(block * spec.columns + w + spec.warps * turn, rows - 1)
            token, r = divmod(row, ratio)
            head = kv_head * ratio.divisor + r
            sink[turn] = mSink[head]
            for p in cutlass.range_constexpr(pieces):
                pointer = mQ[b, token, head, None].iterator + cute.assume(4 * (lane % lanes) + 128 * p, divby=4)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), raw[None, p, turn])
        for turn in cutlass.range_constexpr(turns):
            n = w + spec.warps * turn
            values = raw[None, None, turn].load().to(Float32)
            factor = k_unit
            if const_expr(spec.bytes_cache):
                largest = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
                smallest = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
                largest = cute.arch.warp_reduction(cute.arch.fmax(largest, -smallest), cute.arch.fmax)
                exponent = cutlass.max((largest.bitcast(Int32) >> 23) & 0xFF, Q_EXPONENT + 1)
                values = values * ((254 + Q_EXPONENT - exponent) << 23).bitcast(Float32)
                factor *= ((exponent - Q_EXPONENT) << 23).bitcast(Float32)
            rounded = cute.make_rmem_tensor((4, pieces), self.k_dtype)
            rounded.store(values.to(self.k_dtype))
            if n < spec.columns:
                if lane == 0:
                    sFacts[n, FACTOR] = factor
                    sFacts[n, SINK] = sink[turn]
                    sFacts[n, UNIT] = v_unit
                if lane < lanes:
                    for p in cutlass.range_constexpr(pieces):
                        self._store_q(words, rounded[None, p], n, 4 * (lane % lanes) + 128 * p)

    @cute.jit
    def _store_q(self, words: cute.Tensor, four: cute.Tensor, n: Int32, d: Int32):
        """Four neighbours of a row of Q: the words of column n where `_load_q` finds them."""
        step, t = d // 16, d % 16 // 4
        base = ((n // 8) * (self.spec.d // 32) + step // 2) * 128 + (n % 8) * 16 + 2 * (step % 2)
        w = cute.recast_tensor(four, Int32)
        if const_expr(self.spec.bytes_cache):  # the order of `operands`: even ones, odd ones
            words[base + 4 * t] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x5410)))
            words[base + 4 * t + 1] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x7632)))
        else:
            at = base + 8 * (t % 2) + t // 2
            words[at] = w[0]
            words[at + 4] = w[1]

    @cute.jit
    def start(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slope: cute.Tensor,
        positions: cute.Tensor,
        facts: cute.Pointer,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        place,
        length: Int32,
        s_q: Int32,
        lane: Int32,
    ):
        """Empties the accumulators; gets what the scores of each column are multiplied with, and its ALiBi line."""
        spec = self.spec
        b, kv_head, block, ratio = place
        for m in cutlass.range_constexpr(spec.d // 16):
            for n in cutlass.range_constexpr(self.n_tiles):
                acc_o[m][n].fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        sFacts = column_facts(spec, facts)
        unit = softmax_scale * softmax.LOG2_E
        if const_expr(spec.softcap):
            unit = softmax_scale * (2.0 * softmax.LOG2_E) * cute.arch.rcp_approx(softcap)
        for i in cutlass.range_constexpr(spec.columns // 4):
            n = self.column(i, lane)
            factor[i] = sFacts[n, FACTOR] * unit
            if const_expr(spec.alibi):
                row = cutlass.min(block * spec.columns + n, ratio.divisor * s_q - 1)
                token, r = divmod(row, ratio)
                head = Int64(b) * alibi_batch + Int64(kv_head * ratio.divisor + r)
                pointer = cute.make_ptr(Float32, alibi + 4 * head, AddressSpace.gmem, assumed_align=4)
                slope[i] = cute.make_tensor(pointer, cute.make_layout(1))[0] * softmax.LOG2_E
                positions[i] = length - s_q + token

    # ---- a tile

    @cute.jit
    def valid_keys(self, valid: cute.Pointer, w: Int32, lane: Int32) -> Int32:
        """Bit i: row i of S has a page that exists; `valid` has a bit for each copied box of the tile."""
        bits = Int32(-1)
        if const_expr(self.spec.paged):
            box = (w * KEYS + self.key_row(lane % 16)) // self.spec.box_rows
            word = cute.make_tensor(valid, cute.make_layout(self.spec.valid_words))[box // 32]
            bits = cute.arch.vote_ballot_sync(((word >> (box % 32)) & 1) == 1)
        return bits

    @cute.jit
    def attend(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slope: cute.Tensor,
        positions: cute.Tensor,
        scales: cute.Pointer,
        sQ: cute.Pointer,
        tile_address: Int32,
        empty: cute.Pointer,
        tile: Int32,
        valid: Int32,
        length: Int32,
        window: Int32,
        causal: Int32,
        s_q: Int32,
        softcap: Float32,
        block: Int32,
        ratio,
        w: Int32,
        lane: Int32,
    ):
        """Adds the warp's 16 keys of a tile to O, its maxima and its sums, and gives the stage back.

        V is in registers, as bytes, before the softmax: its way from shared memory is then hidden, and the producer
        gets the stage back earlier.
        """
        spec = self.spec
        columns = const_expr(spec.columns // 4)
        g = lane // 4
        k_scale = cute.make_rmem_tensor((2, max(self.k_groups, 1)), Float32)
        v_scale = cute.make_rmem_tensor((2, max(self.v_groups, 1)), Float32)
        sScale = cute.make_tensor(scales, cute.make_layout((spec.keys_per_tile, self.k_groups + self.v_groups + 1)))
        for k in cutlass.range_constexpr(2):
            key = w * KEYS + self.key_row(g + 8 * k)
            for group in cutlass.range_constexpr(self.k_groups):
                k_scale[k, group] = sScale[key, group]
            for group in cutlass.range_constexpr(self.v_groups):
                v_scale[k, group] = sScale[key, self.k_groups + group]
        acc_s = self.scores(k_scale, sQ, tile_address, w, lane)
        raw = self.load_values(tile_address + spec.tile_bytes, w, lane)
        cute.arch.mbarrier_arrive(empty)

        begin = tile * spec.keys_per_tile + w * KEYS
        keys = (begin + self.key_row(g), begin + self.key_row(g + 8))
        s = cute.make_rmem_tensor((2, columns), Float32)  # (key, column)
        for i in cutlass.range_constexpr(columns):
            for k in cutlass.range_constexpr(2):
                x = acc_s[i // 2][2 * k + i % 2] * factor[i]
                if const_expr(spec.softcap):
                    # c tanh(y) = c - 2 c / (1 + e^(2 y)), in units of log2
                    cap = softcap * softmax.LOG2_E
                    x = cap - 2.0 * cap * cute.arch.rcp_approx(1.0 + cute.math.exp2(x, fastmath=True))
                if const_expr(spec.alibi):
                    # the distance first: slope x key and slope x position lose 2^-8 each at 100,000 tokens
                    x += slope[i] * Float32(keys[k] - positions[i])
                s[k, i] = x

        # ---- masks, where not every key is seen by every query
        seen_by_all = length - causal * (s_q - 1)
        if begin + KEYS > seen_by_all or begin < length - window or (valid & 0xFFFF) != 0xFFFF:
            lowest = length - s_q - window + 1  # that any query sees
            sees = Int32(0)  # bit 2 i + k: the i-th column of this thread its key k
            for k in cutlass.range_constexpr(2):
                exists = keys[k] < length and keys[k] >= lowest and ((valid >> (g + 8 * k)) & 1) == 1
                for i in cutlass.range_constexpr(columns):
                    position = length - s_q + (block * spec.columns + self.column(i, lane)) // ratio
                    end = cutlass.select_(causal == 1, cutlass.min(position + 1, length), length)
                    visible = exists and keys[k] < end and keys[k] > position - window
                    s[k, i] = cutlass.select_(visible, s[k, i], -Float32.inf)
                    if const_expr(self.has_nan):
                        sees |= cutlass.select_(visible, Int32(1 << 2 * i + k), Int32(0))
                for group in cutlass.range_constexpr(self.v_groups):  # may be NaN where no token is
                    v_scale[k, group] = cutlass.select_(exists, v_scale[k, group], Float32(0.0))
            if const_expr(not self.is_int8):
                self.mask_values(raw, begin, length, lowest, valid, lane)
            if const_expr(self.has_nan):
                if s_q > 1:
                    if self.any_nan(raw, v_scale):
                        self.spread_nan(acc_o, raw, v_scale, sees)

        # ---- softmax: P relative to a maximum that is at most MAX_GROWTH behind, so that few tiles move it
        grown = False
        for i in cutlass.range_constexpr(columns):
            grown = grown or cute.arch.fmax(s[0, i], s[1, i]) > row_max[i] + MAX_GROWTH
        if cute.arch.vote_any_sync(grown):
            alpha = cute.make_rmem_tensor(columns, Float32)
            for i in cutlass.range_constexpr(columns):
                peak = cute.arch.fmax(s[0, i], s[1, i])
                for step in cutlass.range_constexpr(3):
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
                peak = cute.arch.fmax(peak, row_max[i])
                alpha[i] = softmax.rescaling(row_max[i], peak)
                row_max[i] = peak
                row_sum[i] *= alpha[i]
            for m in cutlass.range_constexpr(spec.d // 16):
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        acc_o[m][n][e] *= alpha[2 * n + e % 2]
        for i in cutlass.range_constexpr(columns):
            shift = softmax.finite(row_max[i])
            for k in cutlass.range_constexpr(2):
                s[k, i] = cute.math.exp2(s[k, i] - shift, fastmath=True)
            row_sum[i] += s[0, i] + s[1, i]
        self.values(acc_o, s, v_scale, raw)

    # ---- values and scales that are not finite, of keys that not every query sees

    @cute.jit
    def any_nan(self, raw: cute.Tensor, v_scale: cute.Tensor):
        """Whether a value or scale of the warp's keys is not finite."""
        seen, outside = Int32(0), False
        if const_expr(not self.is_int8):
            for i in cutlass.range_constexpr(cute.size(raw)):
                seen |= self._not_finite(raw[i])
        for k in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(self.v_groups):
                outside = outside or self._is_nan(v_scale[k, group])
        return cute.arch.vote_any_sync(seen != 0 or outside)

    @cute.jit
    def spread_nan(self, acc_o, raw: cute.Tensor, v_scale: cute.Tensor, sees: Int32):
        """NaN in O where a column sees a value or scale that is not finite, and zeros in place of these.

        An infinity counts as NaN. Which numbers of a column: a product of what is not finite and of what is seen.
        """
        spec = self.spec
        columns, blocks = const_expr(spec.columns // 4), spec.d // 16
        for group in cutlass.range_constexpr(self.v_groups):
            nan_keys = [self._is_nan(v_scale[k, group]) for k in range(2)]
            keys = cutlass.select_(nan_keys[0], Int32(1), Int32(0)) | cutlass.select_(nan_keys[1], Int32(2), Int32(0))
            for k in cutlass.range_constexpr(2):
                v_scale[k, group] = cutlass.select_(nan_keys[k], Float32(0.0), v_scale[k, group])
            for i in cutlass.range_constexpr(columns):
                found = (sees >> 2 * i) & keys
                for step in cutlass.range_constexpr(3):  # lanes with other keys, and the same columns
                    found |= cute.arch.shuffle_sync_bfly(found, 4 << step)
                for m in cutlass.range_constexpr(
                    group * blocks // self.v_groups, (group + 1) * blocks // self.v_groups
                ):
                    for e in cutlass.range_constexpr(2):
                        o = acc_o[m][i // 2][2 * e + i % 2]
                        acc_o[m][i // 2][2 * e + i % 2] = cutlass.select_(found != 0, Float32(float("nan")), o)
        if const_expr(not self.is_int8):
            mma = self._mma(self.v_dtype)
            b = [mma.make_fragment_B(mma.partition_shape_B((8, 16))) for _ in range(self.n_tiles)]
            four = cute.make_rmem_tensor(4, Float32)
            for n in cutlass.range_constexpr(self.n_tiles):
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        is_seen = (sees >> 2 * (2 * n + c) + k) & 1
                        four[2 * k + c] = cutlass.select_(is_seen != 0, Float32(1.0), Float32(0.0))
                self.store_p(four, b[n])
            a = mma.make_fragment_A(mma.partition_shape_A((16, 16)))
            product = mma.make_fragment_C(mma.partition_shape_C((16, 8)))
            nothing = Int32(0)
            for m in cutlass.range_constexpr(blocks):
                # after the block before, instead of what `any_nan` has found: all at once, d 256 would spill
                found = [self._not_finite(registers.opaque(raw[i] + nothing)) for i in self._registers(m)]
                self.widen_values(a, [(x >> 1) & 0x7FFFFFFF for x in found])  # 2.0 in all three types
                for n in cutlass.range_constexpr(self.n_tiles):
                    product.fill(0.0)
                    cute.gemm(mma, product, a[None, None, 0], b[n][None, None, 0], product)
                    for e in cutlass.range_constexpr(4):
                        o = acc_o[m][n][e]
                        acc_o[m][n][e] = cutlass.select_(product[e] > 0.0, Float32(float("nan")), o)
                nothing = product[0].bitcast(Int32) >> 31  # 0, for it is no negative number
                for i in cutlass.range_constexpr(len(found)):
                    lowest = (found[i] >> (8 * spec.itemsize - 1)) & LOWEST_BITS[spec.itemsize]
                    r = self._registers(m)[i]
                    raw[r] = raw[r] & ((found[i] | (found[i] - lowest)) ^ Int32(-1))

    def _not_finite(self, x: Int32) -> Int32:
        """The sign bits of the numbers in a register of values that are not finite."""
        bits, last, signs = NOT_FINITE[self.spec.kv_dtype]
        return ((x & Int32(bits)) + Int32(last)) & Int32(signs - (1 << 32))

    def _is_nan(self, scale: Float32):
        """Whether a scale is not finite."""
        return (scale.bitcast(Int32) & 0x7F800000) == 0x7F800000

    @cute.jit
    def scores(self, k_scale: cute.Tensor, sQ: cute.Pointer, address: Int32, w: Int32, lane: Int32):
        """S^T of the warp's keys, scales of tokens and groups included: a fragment for each 8 columns."""
        spec = self.spec
        mma = self._mma(self.k_dtype)
        shape = mma.partition_shape_C((16, 8))
        # Two sums for each 8 columns: a chain of products waits 33 cycles for each of its links.
        part = [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(2)]
        acc_s = [mma.make_fragment_C(shape) for _ in range(self.n_tiles)]
        steps = spec.d // 16
        steps_of_group = steps // max(self.k_groups, 1)
        words = cute.make_tensor(
            cute.recast_ptr(sQ, dtype=Int32),
            cute.make_ordered_layout((4, 32, steps // 2, self.n_tiles), order=(0, 1, 2, 3)),
        )
        a = mma.make_fragment_A(mma.partition_shape_A((16, 32)))
        b = mma.make_fragment_B(mma.partition_shape_B((8, 32)))
        b_words = cute.make_tensor(cute.recast_ptr(b.iterator, dtype=Int32), cute.make_layout(4))
        row = w * KEYS + self.key_row(lane % 16)
        half = lane // 16
        for pair in cutlass.range_constexpr(steps // 2):
            if const_expr(spec.bytes_cache):
                x = operands.load_matrices(self.chunk_address(address, row, 2 * pair, half), False)
                operands.widen_rows(a[None, 0, 0], x[0], x[1], self.is_int8)
                operands.widen_rows(a[None, 0, 1], x[2], x[3], self.is_int8)
            else:
                for i in cutlass.range_constexpr(2):
                    x = operands.load_matrices(self.chunk_address(address, row, 4 * pair + 2 * i, half), False)
                    operands.take(a[None, 0, i], x[0], x[1], x[2], x[3])
            for n in cutlass.range_constexpr(self.n_tiles):
                cute.autovec_copy(words[None, lane, pair, n], b_words)
                for i in cutlass.range_constexpr(2):
                    if const_expr(2 * pair % steps_of_group == 0):
                        part[i][n].fill(0.0)
                    cute.gemm(mma, part[i][n], a[None, None, i], b[None, None, i], part[i][n])
            if const_expr(2 * (pair + 1) % steps_of_group == 0):
                group = const_expr(2 * pair // steps_of_group)
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        x = part[0][n][e] + part[1][n][e]
                        if const_expr(self.k_groups > 0):
                            x *= k_scale[e // 2, group]
                        acc_s[n][e] = x if const_expr(group == 0) else acc_s[n][e] + x
        return acc_s

    def chunk_address(self, tile, row, chunk: int, half):
        """Where 16 bytes of a token lie: those of chunk + half, of row `row` of the tile, half 0 or 1."""
        if self.vllm:
            page = self.spec.box_rows
            in_page = row // page * self.page_bytes + row % page * 16 + half * (page * 16)
            return tile + in_page + chunk * (page * 16)
        spec = self.spec
        # the swizzle exchanges bits 4.. of an address with bits 7..
        swizzle = row % 8 if spec.row_bytes == 128 else row * spec.row_pitch // 128 % 4
        block, inner = chunk // self.row_chunks, chunk % self.row_chunks
        base = tile + row * spec.row_pitch + block * (spec.keys_per_tile * spec.row_pitch)
        return base + ((inner << 4) ^ ((half ^ swizzle) << 4))

    @cute.jit
    def mask_values(self, raw: cute.Tensor, begin: Int32, length: Int32, lowest: Int32, valid: Int32, lane: Int32):
        """Zeros for the tokens of V that do not exist: they may be NaN, and 0 x NaN would be NaN."""
        t = lane % 4
        mask = cute.make_rmem_tensor(2, Int32)  # of registers with keys k 0..7 of a fragment, and with 8..15
        # bytes of paged_vllm: a register has four tokens; otherwise two, and others in the second register
        tokens = const_expr(4 if self.pairs_of_tokens else 2)
        for k in cutlass.range_constexpr(2):
            bits = Int32(0)
            for i in cutlass.range_constexpr(tokens):
                token = 4 * t + i if const_expr(tokens == 4) else 2 * t + 8 * k + i
                row = token // 2 + token % 2 * 8 if const_expr(tokens == 4) else token
                key = begin + token
                seen = key < length and key >= lowest and ((valid >> row) & 1) == 1
                bits |= cutlass.select_(seen, Int32((1 << (32 // tokens)) - 1), Int32(0)) << (32 // tokens * i)
            mask[k] = bits
        for i in cutlass.range_constexpr(cute.size(raw)):
            raw[i] = raw[i] & mask[self._half_of(i)]

    def _half_of(self, i: int) -> int:
        """Whether register i of the raw values has keys k 0..7 or 8..15 of a fragment."""
        if self.pairs_of_tokens:
            return 0
        # as ldmatrix gives them: rows are tokens, 8 at a time; in paged_vllm rows are d and a chunk has 8 tokens
        return i % 4 // 2 if self.vllm else i % 2

    @cute.jit
    def values(self, acc_o, p: cute.Tensor, v_scale: cute.Tensor, raw: cute.Tensor):
        """O^T += V^T P^T over the warp's keys."""
        spec = self.spec
        mma = self._mma(self.v_dtype)
        groups = max(self.v_groups, 1)
        blocks = spec.d // 16
        shape_b, shape_a = mma.partition_shape_B((8, 16)), mma.partition_shape_A((16, 16))
        b = [[mma.make_fragment_B(shape_b) for _ in range(groups)] for _ in range(self.n_tiles)]
        scaled = cute.make_rmem_tensor(4, Float32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for group in cutlass.range_constexpr(groups):
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        scaled[2 * k + c] = p[k, 2 * n + c]
                        if const_expr(self.v_groups > 0):
                            scaled[2 * k + c] *= v_scale[k, group]
                self.store_p(scaled, b[n][group])
        a = mma.make_fragment_A(shape_a)
        for m in cutlass.range_constexpr(blocks):
            self.widen_values(a, [raw[i] for i in self._registers(m)])
            group = const_expr(m * groups // blocks)
            for n in cutlass.range_constexpr(self.n_tiles):
                acc = acc_o[m][n]
                cute.gemm(mma, acc, a[None, None, 0], b[n][group][None, None, 0], acc)

    @cute.jit
    def store_p(self, four: cute.Tensor, b: cute.Tensor):
        """What a thread has of P^T for 8 columns, keys g and g + 8 of two columns, as a fragment of B."""
        rounded = cute.make_rmem_tensor(4, self.v_dtype)
        rounded.store(four.load().to(self.v_dtype))
        r, target = cute.recast_tensor(rounded, Int32), cute.recast_tensor(b, Int32)
        target[0] = operands.transpose(r[0])
        target[1] = operands.transpose(r[1])

    def _registers(self, m: int) -> range:
        """Which registers of the raw values have rows 16 m .. 16 m + 15 of V^T."""
        count = 2 * self.spec.itemsize
        return range(count * m, count * (m + 1))

    @cute.jit
    def widen_values(self, a: cute.Tensor, raw: list):
        """16 rows of V^T as a fragment of A."""
        if const_expr(self.spec.bytes_cache):
            if const_expr(self.vllm):
                operands.widen_rows(a, raw[0], raw[1], self.is_int8)
            else:
                operands.widen_columns(a, raw[0], raw[1], self.is_int8)
        elif const_expr(self.vllm):
            operands.take(a, raw[0], raw[1], raw[2], raw[3])
        else:
            operands.take(a, raw[0], raw[2], raw[1], raw[3])

    @cute.jit
    def load_values(self, address: Int32, w: Int32, lane: Int32) -> cute.Tensor:
        """The warp's keys of V as they are: 2 registers for each 16 rows of V^T, 4 of 16-bit numbers."""
        spec = self.spec
        page = spec.box_rows
        loads = const_expr(spec.d * spec.itemsize // 32)
        raw = cute.make_rmem_tensor(4 * loads, Int32)
        for i in cutlass.range_constexpr(loads):
            if const_expr(not self.vllm):
                row = w * KEYS + lane % 16
                x = operands.load_matrices(self.chunk_address(address, row, 2 * i, lane // 16), True)
            elif const_expr(not spec.bytes_cache):
                first = w * KEYS + lane // 16 * 8
                at = address + first // page * self.page_bytes + first % page * 2 + (16 * i + lane % 16) * (page * 2)
                x = operands.load_matrices(at, False)
            elif const_expr(page > 8):
                first = w * KEYS
                at = address + first // page * self.page_bytes + first % page + (32 * i + lane) * page
                x = operands.load_matrices(at, False)
            else:
                g, t = lane // 4, lane % 4
                at = address + (2 * w + t // 2) * self.page_bytes + 4 * (t % 2) + (32 * i + g) * page
                x = tuple(operands.load_word(at + 8 * j * page) for j in range(4))
            for j in cutlass.range_constexpr(4):
                raw[4 * i + j] = x[j]
        return raw
