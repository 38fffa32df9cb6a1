"""QK of the latent decode kernel: S^T = K Q^T with keys as bfloat16, which are exact."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import wgmma
from cute_kernels.device.ring import ring_slot
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.smem import key_of_row, s_offset, tiled_mmas
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.convert_q import QReorderer
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.smem import codes_bytes, scale_words
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE

CHUNKS_PER_LINE = LINE_BYTES // BLOCK_COLUMNS  # 64 columns: 16 codes of each of a thread's rows


class Bf16QkWarpgroups(QkWarpgroups):
    """Device code for 128 threads, or 256: S^T of all tiles, a row for a key, a column for a head.

        S = sum over k of q_k (code_k scale_k)      products of exact bfloat16 numbers, summed in float32

    K is made in registers: a thread reads 16 codes of a row at once, and they share a scale. A tile with a scale above
    2^7 takes `slow_tile`, which multiplies twice. A row with a NaN code has S = NaN.
    """

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.q = QReorderer(spec)
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
        peaks = self.multiply_keys(smem, acc[0], raw, tile, tid)
        is_slow = self.has_large_scale(smem, stage, tid)  # overlapped with the last products
        s_stage, phase = ring_slot(tile, self.warpgroups)
        cute.arch.mbarrier_wait(smem.s_empty.data_ptr() + s_stage, phase ^ 1)
        warpgroup.wait_group(0)
        self.stamp(smem, tile, 1, 1, tid, True)
        if is_slow == 0:
            self.spread_nan(acc[0], peaks)
            self.store_s(smem, acc, scale_log2, tile, tid)
        return is_slow

    @cute.jit
    def multiply_keys(self, smem, acc: cute.Tensor, raw: cute.Tensor, tile: Int32, tid: Int32) -> cute.Tensor:
        """Starts S^T of a tile; returns the largest magnitudes of the codes of a thread's two rows."""
        stage, _ = ring_slot(tile, self.spec.stages)
        mma = tiled_mmas(self.heads)[1]
        rQ = self.q_operands(smem, mma, tid, BFloat16)
        shape = mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS))
        operands = [mma.make_fragment_A(shape) for _ in range(2)]
        scales = [self.load_row_scales(smem, stage, r, tid) for r in range(2)]
        peaks = cute.make_rmem_tensor(2, Int32)
        peaks.fill(0)
        self.load_codes(smem, raw, stage, 0, tid)
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(c > 1):
                warpgroup.wait_group(1)  # products of chunk c - 2 have read the registers that are written here
            multipliers = [codes.multiplier(self.scale_pair(scales[r], c, tid)) for r in range(2)]
            self.widen_chunk(raw, operands[c % 2], multipliers, peaks)
            if const_expr(c + 1 < self.chunks):
                self.load_codes(smem, raw, stage, c + 1, tid)
            warpgroup.fence()
            blocks = [(k, 4 * c + k) for k in range(BLOCK_COLUMNS // 16)]
            wgmma.issue(mma, acc, operands[c % 2], rQ, c > 0, blocks)
            warpgroup.commit_group()
        if const_expr(self.spec.has_rope):
            warpgroup.wait_group(1)
            rope = operands[self.chunks % 2]
            self.load_rope(smem, rope, tile, tid)
            self.issue_rope(smem, acc, rope, True, tid)
        return peaks

    @cute.jit
    def slow_tile(self, smem, acc: cute.Tensor, raw: cute.Tensor, tile: Int32, tid: Int32):
        """S^T of a tile with any scales: rare, so without overlap."""
        stage, mma = tile % self.spec.stages, tiled_mmas(self.heads)[1]
        rQ = self.q_operands(smem, mma, tid, BFloat16)
        operand = mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS)))
        peaks = cute.make_rmem_tensor(2, Int32)
        peaks.fill(0)
        acc.fill(0.0)
        warpgroup.fence()
        for c in cutlass.range(self.chunks, unroll=1):
            self.load_codes(smem, raw, stage, c, tid)
            pairs = [codes.multiplier_pair(self.scale_byte(smem, stage, c, r, tid)) for r in range(2)]
            self.widen_chunk(raw, operand, [pair[0] for pair in pairs], peaks)
            words = cute.recast_tensor(operand, Int32)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = codes.multiply(words[i], pairs[i % 2][1])
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK_COLUMNS // 16):
                block = rQ[None, None, 4 * c + k]
                one = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1), 3))
                wgmma.issue(mma, acc, operand, one, True, [(k, 0)])
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        if const_expr(self.spec.has_rope):
            self.load_rope(smem, operand, tile, tid)
            self.issue_rope(smem, acc, operand, True, tid)
            warpgroup.wait_group(0)
        self.spread_nan(acc, peaks)

    @cute.jit
    def widen_chunk(self, raw: cute.Tensor, operand: cute.Tensor, multipliers: list, peaks: cute.Tensor):
        """Four blocks of 16 columns of A, from 16 codes of each of two rows and their scale."""
        words, four = cute.recast_tensor(operand, Int32), cute.recast_tensor(raw, Int32)
        for r in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(4):
                word = four[k, r]
                even, odd = codes.widen_even(word), codes.widen_odd(word)
                peaks[r] = codes.max_magnitudes(codes.max_magnitudes(peaks[r], even), odd)
                words[4 * k + r] = codes.multiply(even, multipliers[r])
                words[4 * k + 2 + r] = codes.multiply(odd, multipliers[r])

    @cute.jit
    def spread_nan(self, acc: cute.Tensor, peaks: cute.Tensor):
        """S of a row is NaN where one of its codes is: wgmma saw 480."""
        found = Int32(0)
        for r in cutlass.range_constexpr(2):
            if codes.has_nan_code(peaks[r]) != 0:
                found |= 1 << r
        if cute.arch.vote_any_sync(found != 0):
            for step in cutlass.range_constexpr(2):  # four lanes have the codes of a row
                found |= cute.arch.shuffle_sync_bfly(found, 1 << step)
            s = wgmma.by_row(acc)
            for r in cutlass.range_constexpr(2):
                addend = Float32(cutlass.select_((found >> r) & 1 != 0, Float32.nan, Float32(0.0)))
                for c in cutlass.range_constexpr(self.columns):
                    s[r, c] += addend

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
    def scale_byte(self, smem, stage: Int32, c: Int32, r: cutlass.Constexpr, tid: Int32) -> Int32:
        """The same byte, for any c."""
        upper = tid % 4 // 2
        index = c // 2 * 4 + 2 * upper + c % 2
        if const_expr(self.spec.scale_bytes == 8):
            index = cutlass.min(c // 2 * 2 + upper, self.chunks - 1)
        start = (stage * TOKENS_PER_TILE + key_of_row(tid, r)) * self.spec.scale_bytes
        return Int32((smem.scale.data_ptr() + start + index).load()) & 0xFF

    @cute.jit
    def has_large_scale(self, smem, stage: Int32, tid: Int32) -> Int32:
        """1 if a scale of the tile is above 2^7; the same in all threads."""
        found = Int32(0)
        for i in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(self.spec.scale_bytes // 4, Int32)
            scale_words(smem, self.spec, stage, tid % 32 + 32 * i, 0, words)
            for j in cutlass.range_constexpr(self.spec.scale_bytes // 4):
                word = words[j]
                if const_expr(self.spec.token_format.num_scales <= 4 * j + 3):
                    word &= 0x00FFFFFF  # the last byte is padding
                found |= codes.large_bytes(word)
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
        s, q = wgmma.by_row(acc[0]), tid % 4
        s_stage, _ = ring_slot(tile, self.warpgroups)
        start = smem.s.data_ptr() + s_stage * (TOKENS_PER_TILE * self.heads)
        four = cute.make_rmem_tensor((2, 2), Float32)
        for block in cutlass.range_constexpr(self.heads // 8):
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    four[r, e] = s[r, 2 * block + e] * scale_log2
            pointer = start + cute.assume(s_offset(8 * block + 2 * q, key_of_row(tid, 0) // 2), divby=4)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout((2, 2))))
        cute.arch.mbarrier_arrive(smem.s_full.data_ptr() + s_stage)
        self.stamp(smem, tile, 2, 1, tid)
