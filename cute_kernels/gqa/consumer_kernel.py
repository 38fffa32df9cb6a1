"""A consumer warp of the decode kernel: 16 keys of a tile, from bytes in shared memory to its share of O."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.device import operands, softmax
from cute_kernels.gqa.spec import KEYS_PER_TILE, GqaDecodeSpec

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
KEYS = 16  # of a warp
Q_EXPONENT = 14  # of the largest value of a row of Q in float16, whose largest is 15


class TileConsumer:
    """Device code for the warps that multiply in :class:`cute_kernels.gqa.kernel.GqaDecodeKernel`.

    With g = lane / 4, t = lane % 4: a thread has S and P of keys g and g + 8 (as `key_row` orders them) for the columns
    8 n + 2 t and 8 n + 2 t + 1; its accumulators are two rows of 16 of O^T for the same columns. So what belongs to a
    column (maximum, sum, factors) is in the thread that needs it.

    Scales of tokens come from global memory a tile ahead, those of K to lanes 0..15, those of V to lanes 16..31, and
    are passed on by shuffles.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.n_tiles = spec.columns // 8
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.scale_loads = max(self.k_groups, self.v_groups)
        self.is_int8 = spec.kv_dtype == "int8"
        self.k_dtype, self.v_dtype = DTYPES[spec.k_operand], DTYPES[spec.v_operand]
        self.scale_dtype = DTYPES[spec.scale_dtype]
        self.vllm = spec.layout == "vllm"
        self.pairs_of_tokens = self.vllm and spec.bytes_cache  # see `key_row`
        self.interleaved_d = spec.bytes_cache and not self.vllm
        self.row_bytes = min(spec.d * spec.itemsize, 128)
        self.row_chunks = self.row_bytes // 16
        self.chunks = spec.d * spec.itemsize // 16  # of a token
        self.page_bytes = spec.d * spec.box_rows * spec.itemsize

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
    def load_q(self, mQ: cute.Tensor, sQ: cute.Pointer, q_factor: cute.Pointer, place, s_q: Int32, w: Int32, lane: Int32):
        """Columns w, w + 4, ... of Q into shared memory as fragments of B, and what S is to be multiplied with.

        Columns behind the last row repeat it; nobody stores their results.
        """
        spec = self.spec
        b, kv_head, block, ratio = place
        rows = ratio.divisor * s_q
        pieces, lanes = max(spec.d // 128, 1), min(spec.d // 4, 32)
        words = cute.make_tensor(cute.recast_ptr(sQ, dtype=Int32), cute.make_layout(spec.columns * spec.d // 2))
        sFactor = cute.make_tensor(q_factor, cute.make_layout(spec.columns))
        raw = cute.make_rmem_tensor((4, pieces), mQ.element_type)
        for turn in cutlass.range_constexpr(spec.columns // 4):
            n = w + 4 * turn
            row = block * spec.columns + n
            token, r = divmod(cutlass.min(row, rows - 1), ratio)
            for p in cutlass.range_constexpr(pieces):
                at = 4 * (lane % lanes) + 128 * p
                source = mQ[b, token, kv_head * ratio.divisor + r, None]
                pointer = source.iterator + cute.assume(at, divby=4)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), raw[None, p])
            values = raw.load().to(Float32)
            if const_expr(spec.bytes_cache):
                largest = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
                smallest = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
                largest = cute.arch.warp_reduction(cute.arch.fmax(largest, -smallest), cute.arch.fmax)
                exponent = cutlass.max((largest.bitcast(Int32) >> 23) & 0xFF, Q_EXPONENT + 1)
                values = values * ((254 + Q_EXPONENT - exponent) << 23).bitcast(Float32)
                if lane == 0:
                    sFactor[n] = ((exponent - Q_EXPONENT) << 23).bitcast(Float32)
            elif lane == 0:
                sFactor[n] = Float32(1.0)
            rounded = cute.make_rmem_tensor((4, pieces), self.k_dtype)
            rounded.store(values.to(self.k_dtype))
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
        shift: cute.Tensor,
        q_factor: cute.Pointer,
        k_scale: Int64,
        k_strides: tuple,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        place,
        h_q,
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
        sFactor = cute.make_tensor(q_factor, cute.make_layout(spec.columns))
        unit = softmax_scale * softmax.LOG2_E
        if const_expr(spec.softcap):
            unit = softmax_scale * (2.0 * softmax.LOG2_E) * cute.arch.rcp_approx(softcap)
        if const_expr(spec.k_scales == "head"):
            unit *= self.load_scale(k_scale, Int64(kv_head) * k_strides[1]).to(Float32)
        for i in cutlass.range_constexpr(spec.columns // 4):
            n = self.column(i, lane)
            factor[i] = sFactor[n] * unit
            if const_expr(spec.alibi):
                row = cutlass.min(block * spec.columns + n, ratio.divisor * s_q - 1)
                token, r = divmod(row, ratio)
                head = Int64(b) * alibi_batch + Int64(kv_head * ratio.divisor + r)
                pointer = cute.make_ptr(Float32, alibi + 4 * head, AddressSpace.gmem, assumed_align=4)
                slope[i] = cute.make_tensor(pointer, cute.make_layout(1))[0] * softmax.LOG2_E
                shift[i] = slope[i] * Float32(length - s_q + token)

    # ---- scales of tokens

    @cute.jit
    def load_scale(self, base: Int64, offset: Int64):
        """One scale as it is stored; `offset` in elements."""
        address = base + offset * const_expr(self.scale_dtype.width // 8)
        pointer = cute.make_ptr(self.scale_dtype, address, AddressSpace.gmem, assumed_align=self.scale_dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]

    @cute.jit
    def scale_source(self, k_scale: Int64, k_strides: tuple, v_scale: Int64, v_strides: tuple, head: Int32, lane: Int32):
        """(address, strides of outer, row and group) of the scales that this lane reads."""
        base, outer, row, group = k_scale, k_strides[0], k_strides[2], k_strides[3]
        of_head = k_strides[1]
        if const_expr(self.scale_loads > 0):
            of_v = lane >= 16
            if const_expr(self.k_groups == 0):
                of_v = lane >= 0
            if const_expr(self.v_groups == 0):
                of_v = lane < 0
            if of_v:
                base, outer, row, group = v_scale, v_strides[0], v_strides[2], v_strides[3]
                of_head = v_strides[1]
            base += Int64(head) * of_head * const_expr(self.scale_dtype.width // 8)
        return base, outer, row, group

    def _key(self, tile, w, lane):
        """The key whose page and scales this lane reads."""
        return tile * KEYS_PER_TILE + w * KEYS + self.key_row(lane % 16)

    @cute.jit
    def entry(self, mTable, b: Int32, tile: Int32, length: Int32, page_shift: Int32, w: Int32, lane: Int32):
        """The page of this lane's key, or the sequence where there are no pages; behind the end, that of the last."""
        found = b
        if const_expr(self.spec.paged):
            key = cutlass.max(cutlass.min(self._key(tile, w, lane), length - 1), 0)
            found = mTable[b, key >> page_shift]
        return found

    @cute.jit
    def load_scales(
        self,
        scales: cute.Tensor,
        where: tuple,
        entry: Int32,
        num_pages: Int32,
        tile: Int32,
        length: Int32,
        page_size: Int32,
        w: Int32,
        lane: Int32,
    ):
        """Starts the loads of this lane's scales: of the key in row lane % 16 of S, of K or of V."""
        if const_expr(self.scale_loads > 0):
            base, outer, row, group = where
            key = cutlass.max(cutlass.min(self._key(tile, w, lane), length - 1), 0)
            if const_expr(self.spec.paged):
                entry = cutlass.min(cutlass.max(entry, 0), num_pages - 1)
                key = key & (page_size - 1)
            offset = Int64(entry) * outer + Int64(key) * row
            for g in cutlass.range_constexpr(self.scale_loads):
                index = Int32(g)
                if const_expr(g >= min(self.k_groups, self.v_groups)):
                    groups = cutlass.select_(lane >= 16, Int32(max(self.v_groups, 1)), Int32(max(self.k_groups, 1)))
                    index = cutlass.min(index, groups - 1)
                scales[g] = self.load_scale(base, offset + Int64(index) * group)

    @cute.jit
    def valid_keys(self, entry: Int32, num_pages: Int32) -> Int32:
        """Bit i: row i of S has a page that exists."""
        bits = Int32(-1)
        if const_expr(self.spec.paged):
            inside = cutlass.min(cutlass.max(entry, 0), num_pages - 1)
            bits = cute.arch.vote_ballot_sync(inside == entry)
        return bits

    # ---- a tile

    @cute.jit
    def attend(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slope: cute.Tensor,
        shift: cute.Tensor,
        scales: cute.Tensor,
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
        """Adds the warp's 16 keys of a tile to O, its maxima and its sums, and gives the stage back."""
        spec = self.spec
        columns = const_expr(spec.columns // 4)
        g = lane // 4
        acc_s = self.scores(scales, sQ, tile_address, w, lane)
        begin = tile * KEYS_PER_TILE + w * KEYS
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
                    x += slope[i] * Float32(keys[k]) - shift[i]
                s[k, i] = x

        # ---- masks, where not every key is seen by every query
        v_scale = cute.make_rmem_tensor((2, max(self.v_groups, 1)), Float32)
        for group in cutlass.range_constexpr(self.v_groups):
            for k in cutlass.range_constexpr(2):
                v_scale[k, group] = cute.arch.shuffle_sync(scales[group].to(Float32), 16 + g + 8 * k)
        v_mask = cute.make_rmem_tensor(2, Int32)
        v_mask.fill(-1)
        seen_by_all = length - causal * (s_q - 1)
        if begin + KEYS > seen_by_all or begin < length - window or (valid & 0xFFFF) != 0xFFFF:
            lowest = length - s_q - window + 1  # that any query sees
            for k in cutlass.range_constexpr(2):
                exists = keys[k] < length and keys[k] >= lowest and ((valid >> (g + 8 * k)) & 1) == 1
                for i in cutlass.range_constexpr(columns):
                    position = length - s_q + (block * spec.columns + self.column(i, lane)) // ratio
                    end = cutlass.select_(causal == 1, cutlass.min(position + 1, length), length)
                    visible = exists and keys[k] < end and keys[k] > position - window
                    s[k, i] = cutlass.select_(visible, s[k, i], -Float32.inf)
                for group in cutlass.range_constexpr(self.v_groups):  # may be NaN where no token is
                    v_scale[k, group] = cutlass.select_(exists, v_scale[k, group], Float32(0.0))
            if const_expr(not self.is_int8):
                self.mask_values(v_mask, begin, length, lowest, valid, lane)

        # ---- softmax
        alpha = cute.make_rmem_tensor(columns, Float32)
        steady = True
        for i in cutlass.range_constexpr(columns):
            peak = cute.arch.fmax(s[0, i], s[1, i])
            for step in cutlass.range_constexpr(3):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
            peak = cute.arch.fmax(peak, row_max[i])
            alpha[i] = softmax.rescaling(row_max[i], peak)
            steady = steady and alpha[i] == 1.0
            row_max[i] = peak
            for k in cutlass.range_constexpr(2):
                s[k, i] = cute.math.exp2(s[k, i] - softmax.finite(peak), fastmath=True)
            row_sum[i] = row_sum[i] * alpha[i] + (s[0, i] + s[1, i])
        if not cute.arch.vote_all_sync(steady):
            for m in cutlass.range_constexpr(spec.d // 16):
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        acc_o[m][n][e] *= alpha[2 * n + e % 2]

        self.values(acc_o, s, v_scale, v_mask, tile_address + spec.tile_bytes, w, lane)
        cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def scores(self, scales: cute.Tensor, sQ: cute.Pointer, address: Int32, w: Int32, lane: Int32):
        """S^T of the warp's keys, scales of tokens and groups included: a fragment for each 8 columns."""
        spec = self.spec
        mma = self._mma(self.k_dtype)
        g = lane // 4
        shape = mma.partition_shape_C((16, 8))
        acc_s = [mma.make_fragment_C(shape) for _ in range(self.n_tiles)]
        part = [mma.make_fragment_C(shape) for _ in range(self.n_tiles)] if self.k_groups > 1 else acc_s
        for n in cutlass.range_constexpr(self.n_tiles):
            acc_s[n].fill(0.0)
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
            if const_expr(self.k_groups > 1 and 2 * pair % steps_of_group == 0):
                for n in cutlass.range_constexpr(self.n_tiles):
                    part[n].fill(0.0)
            for n in cutlass.range_constexpr(self.n_tiles):
                cute.autovec_copy(words[None, lane, pair, n], b_words)
                for i in cutlass.range_constexpr(2):
                    cute.gemm(mma, part[n], a[None, None, i], b[None, None, i], part[n])
            if const_expr(self.k_groups > 1 and 2 * (pair + 1) % steps_of_group == 0):
                scale = scales[2 * pair // steps_of_group].to(Float32)
                for k in cutlass.range_constexpr(2):
                    of_key = cute.arch.shuffle_sync(scale, g + 8 * k)
                    for n in cutlass.range_constexpr(self.n_tiles):
                        for c in cutlass.range_constexpr(2):
                            acc_s[n][2 * k + c] += of_key * part[n][2 * k + c]
        if const_expr(self.k_groups == 1):
            for k in cutlass.range_constexpr(2):
                of_key = cute.arch.shuffle_sync(scales[0].to(Float32), g + 8 * k)
                for n in cutlass.range_constexpr(self.n_tiles):
                    for c in cutlass.range_constexpr(2):
                        acc_s[n][2 * k + c] *= of_key
        return acc_s

    def chunk_address(self, tile, row, chunk: int, half):
        """Where 16 bytes of a token lie: those of chunk + half, of row `row` of the tile, half 0 or 1."""
        if self.vllm:
            page = self.spec.box_rows
            in_page = row // page * self.page_bytes + row % page * 16 + half * (page * 16)
            return tile + in_page + chunk * (page * 16)
        swizzle = row % 8 if self.row_bytes == 128 else row // 2 % 4
        block, inner = chunk // self.row_chunks, chunk % self.row_chunks
        base = tile + row * self.row_bytes + block * (KEYS_PER_TILE * self.row_bytes)
        return base + ((inner << 4) ^ ((half ^ swizzle) << 4))

    @cute.jit
    def mask_values(self, mask: cute.Tensor, begin: Int32, length: Int32, lowest: Int32, valid: Int32, lane: Int32):
        """Masks for the registers with V of the keys k (0..7 of a fragment, 8..15): 0 x NaN would be NaN."""
        t = lane % 4
        for k in cutlass.range_constexpr(2):
            bits = Int32(0)
            # bytes of paged_vllm: one register with four tokens; otherwise two tokens in each of two
            tokens = 4 if self.pairs_of_tokens else 2
            for i in cutlass.range_constexpr(tokens):
                token = 4 * t + i if const_expr(self.pairs_of_tokens) else 2 * t + 8 * k + i
                row = token // 2 + token % 2 * 8 if const_expr(self.pairs_of_tokens) else token
                key = begin + token
                seen = key < length and key >= lowest and ((valid >> row) & 1) == 1
                ones = Int32((0xFF if self.pairs_of_tokens else 0xFFFF) << (32 // tokens * i) if i == 0 else 0)
                if const_expr(i > 0):
                    field = (1 << (32 // tokens)) - 1
                    pattern = field << (32 // tokens * i)
                    ones = Int32(pattern - (1 << 32) if pattern >= 1 << 31 else pattern)
                bits |= cutlass.select_(seen, ones, Int32(0))
            mask[k] = bits

    @cute.jit
    def values(
        self,
        acc_o,
        p: cute.Tensor,
        v_scale: cute.Tensor,
        v_mask: cute.Tensor,
        address: Int32,
        w: Int32,
        lane: Int32,
    ):
        """O^T += V^T P^T over the warp's keys."""
        spec = self.spec
        mma = self._mma(self.v_dtype)
        groups = max(self.v_groups, 1)
        blocks = spec.d // 16
        shape_b, shape_a = mma.partition_shape_B((8, 16)), mma.partition_shape_A((16, 16))
        b = [[mma.make_fragment_B(shape_b) for _ in range(groups)] for _ in range(self.n_tiles)]
        rounded = cute.make_rmem_tensor(4, self.v_dtype)
        r = cute.recast_tensor(rounded, Int32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for group in cutlass.range_constexpr(groups):
                scaled = cute.make_rmem_tensor(4, Float32)
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        scaled[2 * k + c] = p[k, 2 * n + c]
                        if const_expr(self.v_groups > 0):
                            scaled[2 * k + c] *= v_scale[k, group]
                rounded.store(scaled.load().to(self.v_dtype))
                target = cute.recast_tensor(b[n][group], Int32)
                target[0] = operands.transpose(r[0])
                target[1] = operands.transpose(r[1])
        a = [mma.make_fragment_A(shape_a) for _ in range(2)]
        for pair in cutlass.range_constexpr(blocks // 2):
            self.load_values(a, address, pair, v_mask, w, lane)
            for i in cutlass.range_constexpr(2):
                m = 2 * pair + i
                group = const_expr(m * groups // blocks)
                for n in cutlass.range_constexpr(self.n_tiles):
                    acc = acc_o[m][n]
                    cute.gemm(mma, acc, a[i][None, None, 0], b[n][group][None, None, 0], acc)

    @cute.jit
    def load_values(self, a, address: Int32, pair: cutlass.Constexpr, mask: cute.Tensor, w: Int32, lane: Int32):
        """Rows 32 pair .. 32 pair + 31 of V^T for the warp's keys: two fragments of A."""
        spec = self.spec
        page = spec.box_rows
        if const_expr(not self.vllm):
            row = w * KEYS + lane % 16
            if const_expr(spec.bytes_cache):
                x = operands.load_matrices(self.chunk_address(address, row, 2 * pair, lane // 16), True)
                for i in cutlass.range_constexpr(2):
                    x0, x1 = self._masked(x[2 * i], mask[0]), self._masked(x[2 * i + 1], mask[1])
                    operands.widen_columns(a[i], x0, x1, self.is_int8)
            else:
                for i in cutlass.range_constexpr(2):
                    chunk = 4 * pair + 2 * i
                    x = operands.load_matrices(self.chunk_address(address, row, chunk, lane // 16), True)
                    low, high = mask[0], mask[1]
                    operands.take(a[i], x[0] & low, x[2] & low, x[1] & high, x[3] & high)
        elif const_expr(spec.bytes_cache and page > 8):
            first = w * KEYS
            at = address + first // page * self.page_bytes + first % page + (32 * pair + lane) * page
            x = operands.load_matrices(at, False)
            for i in cutlass.range_constexpr(2):
                x0, x1 = self._masked(x[2 * i], mask[0]), self._masked(x[2 * i + 1], mask[0])
                operands.widen_rows(a[i], x0, x1, self.is_int8)
        elif const_expr(spec.bytes_cache):
            g, t = lane // 4, lane % 4
            at = address + (2 * w + t // 2) * self.page_bytes + 4 * (t % 2) + (32 * pair + g) * page
            for i in cutlass.range_constexpr(2):
                x0 = self._masked(operands.load_word(at + 16 * i * page), mask[0])
                x1 = self._masked(operands.load_word(at + (16 * i + 8) * page), mask[0])
                operands.widen_rows(a[i], x0, x1, self.is_int8)
        else:
            first = w * KEYS + lane // 16 * 8
            d = 32 * pair + lane % 16
            at = address + first // page * self.page_bytes + first % page * 2 + d * (page * 2)
            for i in cutlass.range_constexpr(2):
                x = operands.load_matrices(at + 16 * i * page * 2, False)
                low, high = mask[0], mask[1]
                operands.take(a[i], x[0] & low, x[1] & low, x[2] & high, x[3] & high)

    def _masked(self, x, mask):
        return x if self.is_int8 else x & mask
