"""QK of the latent decode kernel for keys whose scales are powers of two: S^T = K Q^T."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import wgmma
from cute_kernels.device.ring import ring_slot
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.smem import OUT_OF_RANGE, WARPS, copy_columns, key_of_row, s_offset, tiled_mmas
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.convert_q import LatentQConverter
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.smem import codes_bytes, scale_words
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE

CHUNKS_PER_LINE = LINE_BYTES // BLOCK_COLUMNS  # 64 columns: 16 codes of each of a thread's rows
MAX_ROPE = 0x437F  # 255 as bfloat16: times codes.WEIGHT a rope part up to that is a float16 number


class ScaledKeyQkWarpgroups(QkWarpgroups):
    """Device code for 128 threads, or 256: S^T of all tiles, a row for a key, a column for a head.

        S WEIGHT = sum over k of q_k (WEIGHT scale_k code_k)      products of float16 numbers, summed in float32

    K is made in registers, exactly: a thread reads 16 codes of a row at once, and they share a scale. So one
    accumulator takes all products, and nothing is multiplied between them. Of the rope part, Q has the WEIGHT. A tile
    with a scale out of range of float16 (`codes.MIN_BYTE`) takes `slow_tile`, as does one whose Q is multiplied by
    powers of two.
    """

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.q = LatentQConverter(spec)
        self.scheduler = LatentScheduler(spec)
        self.chunks = spec.token_format.codes.count // BLOCK_COLUMNS

    @cute.jit
    def fast_tile(
        self, smem, acc: tuple, raw: cute.Tensor, scale_log2: Float32, q_scaled: Int32, tile: Int32, tid: Int32
    ):
        """Computes and stores S^T of a tile; returns 1, storing nothing, where it takes `slow_tile`."""
        self.stamp(smem, tile, 0, 0, tid)
        stage, phase = ring_slot(tile, self.spec.stages)
        cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)
        self.stamp(smem, tile, 0, 1, tid, True)
        mma = tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        shape = mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS))
        operands = [mma.make_fragment_A(shape) for _ in range(2)]
        self.load_codes(smem, raw, stage, 0, tid)
        scales = [self.load_row_scales(smem, stage, r, tid) for r in range(2)]
        flags = Int32(0)
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(c > 1):
                warpgroup.wait_group(1)  # products of chunk c - 2 have read the registers that are written here
            multipliers = [codes.multiplier(self.scale_pair(scales[r], c, tid)) for r in range(2)]
            self.widen_scaled(raw, operands[c % 2], multipliers)
            if const_expr(c + 1 < self.chunks):
                self.load_codes(smem, raw, stage, c + 1, tid)
            warpgroup.fence()
            blocks = [(k, 4 * c + k) for k in range(BLOCK_COLUMNS // 16)]
            wgmma.issue(mma, acc[0], operands[c % 2], rQ, c > 0, blocks)
            warpgroup.commit_group()
        if const_expr(self.spec.has_rope):
            warpgroup.wait_group(1)
            flags = self.multiply_rope(smem, acc[0], True, tile, tid)
        is_slow = q_scaled | self.has_other_scale(smem, stage, tid)  # overlapped with the last products
        s_stage, phase = ring_slot(tile, self.warpgroups)
        cute.arch.mbarrier_wait(smem.s_empty.data_ptr() + s_stage, phase ^ 1)
        if const_expr(self.spec.has_rope):
            if tid % 32 == 0:
                sFlags = smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.warpgroups)))
                sFlags[tid // 32, s_stage] = flags
        warpgroup.wait_group(0)
        self.stamp(smem, tile, 1, 1, tid, True)
        if is_slow == 0:
            self.store_s(smem, acc, scale_log2, tile, tid)
        return is_slow

    @cute.jit
    def multiply_rope(self, smem, acc: cute.Tensor, accumulate: cutlass.Constexpr, tile: Int32, tid: Int32) -> Int32:
        """Starts S^T of the rope part of a tile; OUT_OF_RANGE where float16 does not hold that of this warp's keys."""
        rope = self.rope_operand()
        self.load_rope(smem, rope, tile, tid)
        self.issue_rope(smem, acc, rope, accumulate, tid)
        words, below = cute.recast_tensor(rope, Int32), Int32(0)
        for i in cutlass.range_constexpr(cute.size(words)):
            # magnitudes from MAX_ROPE, in the upper half of a word: negative if larger, as a NaN is
            below |= (MAX_ROPE << 16) - (words[i] & 0x7FFF0000)
            below |= (MAX_ROPE << 16) - ((words[i] & 0x7FFF) << 16)
        return Int32(OUT_OF_RANGE) if cute.arch.vote_any_sync(below < 0) else Int32(0)

    @cute.jit
    def widen_scaled(self, raw: cute.Tensor, operand: cute.Tensor, multipliers: list):
        """Four blocks of 16 columns of A, from 16 codes of each of two rows and their scale."""
        self.widen(raw, operand)
        words = cute.recast_tensor(operand, Int32)
        for k in cutlass.range_constexpr(8):
            for r in cutlass.range_constexpr(2):
                words[2 * k + r] = codes.multiply(words[2 * k + r], multipliers[r])

    @cute.jit
    def slow_tile(self, smem, acc: cute.Tensor, raw: cute.Tensor, tile: Int32, tid: Int32):
        """S^T of a tile, products of codes times scale and power of Q in float32: rare, so without overlap.

        Codes of a chunk that share a scale are those of two lanes of four: the others count as zeros.
        """
        stage, mma = tile % self.spec.stages, tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        result = cute.make_rmem_tensor_like(acc)
        total, part = wgmma.by_row(result), wgmma.by_row(acc)
        operand = mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS)))
        words = cute.recast_tensor(operand, Int32)
        power = cute.make_rmem_tensor(self.columns, Float32)
        sPower = smem.q_power.get_tensor(cute.make_layout(self.q.blocks * self.heads))
        if const_expr(self.spec.has_rope):
            self.multiply_rope(smem, acc, False, tile, tid)
            warpgroup.wait_group(0)
            result.store(acc.load())
        else:
            result.fill(0.0)
        for step in cutlass.range(2 * self.chunks, unroll=1):
            c, upper = step // 2, step % 2
            self.load_codes(smem, raw, stage, c, tid)
            self.widen(raw, operand)
            if tid % 4 // 2 != upper:
                for i in cutlass.range_constexpr(cute.size(words)):
                    words[i] = 0
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK_COLUMNS // 16):
                block = rQ[None, None, 4 * c + k]
                one = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1), 3))
                wgmma.issue(mma, acc, operand, one, k > 0, [(k, 0)])
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            copy_columns(sPower, tid, c // CHUNKS_PER_LINE * self.heads, power)
            for r in cutlass.range_constexpr(2):
                factor = codes.scale_of(self.scale_byte(smem, stage, c, upper, r, tid)) * codes.WEIGHT
                for i in cutlass.range_constexpr(self.columns):
                    total[r, i] += part[r, i] * power[i] * factor
        acc.store(result.load())

    # ---- scales

    def is_half_line(self, c: int) -> bool:
        """Whether chunk c is the 64 codes of half a line."""
        return self.chunks % CHUNKS_PER_LINE != 0 and c + 1 == self.chunks

    def load_row_scales(self, smem, stage: Int32, r: int, tid: Int32) -> cute.Tensor:
        """All scale bytes of a row, four in a word."""
        words = cute.make_rmem_tensor(self.spec.scale_bytes // 4, Int32)
        scale_words(smem, self.spec, stage, key_of_row(tid, r), 0, words)
        return words

    def scale_pair(self, words: cute.Tensor, c: int, tid: Int32) -> Int32:
        """The scale byte of a thread's codes in chunk c, twice.

        Its 16-byte chunks of a line are 0, 1, 4, 5 for even c and 2, 3, 6, 7 for odd c; those of half a line share one.
        """
        least, upper = c // 2 * 2, tid % 4 // 2  # of a format with a scale for 64 codes
        if self.spec.scale_bytes == 8:
            if self.is_half_line(c):
                return codes.byte_pair(words[(self.chunks - 1) // 4], codes.selector((self.chunks - 1) % 4))
            return codes.byte_pair(words[least // 4], codes.selector(least % 4 + upper))
        return codes.byte_pair(words[c // 2], codes.selector(2 * upper + c % 2))

    @cute.jit
    def scale_byte(self, smem, stage: Int32, c: Int32, upper: Int32, r: cutlass.Constexpr, tid: Int32) -> Int32:
        """The scale byte of a thread's row in chunk c, of the codes of the lower or the upper two lanes of four."""
        index = c // 2 * 4 + 2 * upper + c % 2
        if const_expr(self.spec.scale_bytes == 8):
            index = cutlass.min(c // 2 * 2 + upper, self.chunks - 1)
        start = (stage * TOKENS_PER_TILE + key_of_row(tid, r)) * self.spec.scale_bytes
        return Int32((smem.scale.data_ptr() + start + index).load()) & 0xFF

    @cute.jit
    def has_other_scale(self, smem, stage: Int32, tid: Int32) -> Int32:
        """1 if a scale of the tile is out of range of float16; the same in all threads."""
        found = Int32(0)
        for i in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(self.spec.scale_bytes // 4, Int32)
            scale_words(smem, self.spec, stage, tid % 32 + 32 * i, 0, words)
            for j in cutlass.range_constexpr(self.spec.scale_bytes // 4):
                outside = codes.out_of_range(words[j])
                if const_expr(self.spec.token_format.num_scales <= 4 * j + 3):
                    outside &= 0x00FFFFFF  # the last byte is padding
                found |= outside
        return Int32(1) if cute.arch.vote_any_sync(found != 0) else Int32(0)

    # ---- shared memory

    @cute.jit
    def load_codes(self, smem, raw: cute.Tensor, stage: Int32, c, tid: Int32):
        """16 codes of each of a thread's two rows, in chunk c of 64 columns."""
        line = self.line(tid)
        start = stage * codes_bytes(self.spec) + c // CHUNKS_PER_LINE * (TOKENS_PER_TILE * LINE_BYTES)
        for r in cutlass.range_constexpr(2):
            row = (line ^ (32 * (c % 2)) ^ (16 * r)) + LINE_BYTES * r
            pointer = smem.codes.data_ptr() + cute.assume(start + row, divby=16)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=raw.element_type), cute.make_layout(16))
            cute.autovec_copy(source, raw[None, r])

    def rope_stage(self, tile: Int32) -> Int32:
        """Where the rope part of a tile lies: with its codes."""
        return ring_slot(tile, self.spec.stages).index

    @cute.jit
    def store_s(self, smem, acc: tuple, scale_log2: Float32, tile: Int32, tid: Int32):
        """Stores S^T times scale_log2 for the softmax, which has read the stage."""
        s, q, factor = wgmma.by_row(acc[0]), tid % 4, scale_log2 * (1.0 / codes.WEIGHT)
        s_stage, _ = ring_slot(tile, self.warpgroups)
        start = smem.s.data_ptr() + s_stage * (TOKENS_PER_TILE * self.heads)
        four = cute.make_rmem_tensor((2, 2), Float32)
        for block in cutlass.range_constexpr(self.heads // 8):
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    four[r, e] = s[r, 2 * block + e] * factor
            pointer = start + cute.assume(s_offset(8 * block + 2 * q, key_of_row(tid, 0) // 2), divby=4)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout((2, 2))))
        cute.arch.mbarrier_arrive(smem.s_full.data_ptr() + s_stage)
        self.stamp(smem, tile, 2, 1, tid)
