"""The QK warpgroups for keys that are scaled as operands: S^T = K Q^T."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import pairs, wgmma
from cute_kernels.mla.kernels import codes
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.smem import (
    BFLOAT16,
    NEEDS_SCALES,
    ROPE_BYTES,
    WARPS,
    codes_bytes,
    copy_columns,
    key_of_row,
    kind_of_tile,
    of_kind,
    tiled_mmas,
)
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, QUANT_TILE
from cute_kernels.mla.spec import LINE_BYTES, TOKENS_PER_TILE, WGMMA_ROWS, MlaDecodeSpec

CHUNKS_PER_POWER = QUANT_TILE // BLOCK_COLUMNS  # one power of two of Q for each 128 columns
EVEN, ODD = 0x1010, 0x3232  # PRMT: the lower half of a word twice, the upper half twice
MIN_ROPE, MAX_ROPE = 0x3780, 0x467F  # 2^-16 and 16,320 as bfloat16: four times these are normal float16 numbers
MAX_PARTIAL_ROPE = 0x4400  # 2^9: float16 holds values up to 2^9 / V_UNIT


class KeyRow(NamedTuple):
    """One of a thread's two rows of a key tile: its scales, or with two formats multipliers of chunk pairs; factors."""

    scales: cute.Tensor
    factors: codes.RowFactors


class ScaledKeyQkWarpgroups(QkWarpgroups):
    """Device code for 128 threads, or 256: S^T of all tiles, a row for a key, a column for a head.

        S_k = 2^n_k sum over i of q_i (2^-n_k scale_ki code_ki)      products of float16 numbers, summed in float32

    K is made in registers, exactly: a thread reads 16 codes of a row at once, which share a scale. The power of the row
    follows from its largest scale. So one accumulator takes all products, and nothing is multiplied in between. A tile
    takes `slow_tile` if a row's scales exceed float16's range, or if blocks of Q have powers of their own.
    """

    def __init__(self, spec: MlaDecodeSpec):
        super().__init__(spec)
        self.chunks = spec.token_format.codes.count // BLOCK_COLUMNS
        self.accumulators = 1

    @cute.jit
    def fast_tile(self, smem, acc: tuple, raw: cute.Tensor, has_powers: Int32, tile: Int32, tid: Int32):
        """Computes and stores S^T of a tile; returns 1, and stores nothing, if the tile has to take `slow_tile`."""
        self.stamp(smem, tile, 0, 0, tid)
        stage = self.edges.keys.index(tile)
        self.edges.keys.wait(smem, tile)
        self.stamp(smem, tile, 0, 1, tid, True)
        mma = tiled_mmas(self.heads)[0]
        shape = mma.partition_shape_A((WGMMA_ROWS, BLOCK_COLUMNS))
        operands = [mma.make_fragment_A(shape) for _ in range(2)]
        rows = self.load_rows(smem, stage, tid)
        if const_expr(self.spec.has_rope):
            self.multiply_rope(smem, acc[0], operands[1], rows, tile, tid)
        self.multiply_codes(smem, acc[0], raw, operands, rows, stage, tid)
        fits = rows[0].factors.fits & rows[1].factors.fits & (1 - has_powers)
        is_slow = 1 - wgmma.every_thread(
            fits, Int32(NamedBarrier.QK_TILE) + self.edges.s.index(tile)
        )  # overlapped with the last products
        self.edges.s.acquire(smem, tile)
        warpgroup.wait_group(0)
        self.stamp(smem, tile, 1, 1, tid, True)
        if is_slow == 0:
            self.multiply_rows(acc[0], tuple(row.factors.factor for row in rows))
            self.store_s(smem, acc, tile, tid)
        return is_slow

    @cute.jit
    def multiply_codes(self, smem, acc: cute.Tensor, raw: cute.Tensor, operands, rows: list, stage: Int32, tid: Int32):
        """Starts the products of a tile with Q."""
        mma = tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        self.load_chunk(smem, raw, stage, 0, tid)
        first = 0 if self.spec.has_rope else 1  # chunk whose operand is already in use
        for c in cutlass.range_constexpr(self.chunks):
            if const_expr(c > first):
                warpgroup.wait_group(1)  # products of two groups before have read the registers that are written here
            self.widen(raw, operands[c % 2])
            words = cute.recast_tensor(operands[c % 2], Int32)
            for r in cutlass.range_constexpr(2):
                multiplier = self.multiplier(rows[r], c, tid)
                for k in cutlass.range_constexpr(8):
                    words[2 * k + r] = pairs.multiply_half(words[2 * k + r], multiplier)
            if const_expr(c + 1 < self.chunks):
                self.load_chunk(smem, raw, stage, c + 1, tid)
            warpgroup.fence()
            blocks = [(k, 4 * c + k) for k in range(BLOCK_COLUMNS // 16)]
            wgmma.issue(mma, acc, operands[c % 2], rQ, c > 0 or self.spec.has_rope, blocks)
            warpgroup.commit_group()

    @cute.jit
    def load_rows(self, smem, stage: Int32, tid: Int32) -> list:
        """Loads a thread's two rows. Rows of two formats get one form, so that a tile's products are one loop.

        In a branch per format ptxas would serialize them.
        """
        kinds, keys = self.spec.kinds, [key_of_row(tid, r) for r in range(2)]
        if const_expr(len(kinds) > 1):
            multipliers = [cute.make_rmem_tensor(self.chunks // 2, Int32) for _ in range(2)]
            factors = [codes.RowFactors(Int32(0), Float32(1.0), Int32(0), Int32(1)) for _ in range(2)]
            if kind_of_tile(smem, self.spec, stage) == 0:
                factors = self.load_multipliers(smem, kinds[0], stage, keys, multipliers, tid)
            else:
                factors = self.load_multipliers(smem, kinds[1], stage, keys, multipliers, tid)
            return [KeyRow(*row) for row in zip(multipliers, factors, strict=True)]
        own = codes.of(kinds[0])
        scales = [own.load_row_scales(smem, self.spec, stage, key, tid) for key in keys]
        return [KeyRow(words, own.row_factors(words)) for words in scales]

    @cute.jit
    def load_multipliers(self, smem, kind: cutlass.Constexpr, stage: Int32, keys: list, multipliers: list, tid: Int32):
        """Loads multipliers of a thread's codes of two keys, float16, two chunks a word; returns the rows' factors."""
        own, factors = codes.of(kind), []
        for r in cutlass.range_constexpr(2):
            words = own.load_row_scales(smem, self.spec, stage, keys[r], tid)
            factors.append(own.row_factors(words))
            for j in cutlass.range_constexpr(self.chunks // 2):
                multipliers[r][j] = own.chunk_multipliers(words, factors[r], 2 * j, tid)
        return factors

    def multiplier(self, row: KeyRow, c: int, tid: Int32) -> Int32:
        """Returns the multiplier of a thread's codes of a row in chunk c, twice."""
        if len(self.spec.kinds) > 1:
            return Int32(cute.arch.prmt(row.scales[c // 2], Int32(0), Int32(EVEN if c % 2 == 0 else ODD)))
        return codes.of(self.spec.kinds[0]).chunk_multiplier(row.scales, row.factors, c, tid)

    @cute.jit
    def multiply_rope(self, smem, acc: cute.Tensor, rope: cute.Tensor, rows: list, tile: Int32, tid: Int32):
        """Starts S^T of the rope part of a tile, whose operand is `rope`; makes it float16 in place, for PV.

        It stays bfloat16 if float16 does not hold this warp's 16 keys: then `rope_flags` has BFLOAT16.
        """
        rope = cute.make_tensor(cute.recast_ptr(rope.iterator, dtype=BFloat16), rope.layout)
        raw = cute.make_rmem_tensor_like(rope)
        self.load_rope(smem, raw, tile, tid)
        source, target, flag = cute.recast_tensor(raw, Int32), cute.recast_tensor(rope, Int32), Int32(0)
        for i in cutlass.range_constexpr(cute.size(source)):
            target[i] = pairs.multiply_bfloat16(source[i], rows[i % 2].factors.rope)
        self.issue_rope(smem, acc, rope, False, tid)
        largest = Int32(0)
        for r in cutlass.range_constexpr(2):
            peak = source[r] & 0x7FFF7FFF
            for i in cutlass.range_constexpr(1, cute.size(source) // 2):
                peak = pairs.max_magnitudes(peak, source[2 * i + r])
            number = cutlass.max(peak & -0x10000, peak << 16)
            largest = cutlass.max(largest, number)
            if number != 0 and (number > MAX_ROPE << 16 or number < MIN_ROPE << 16):
                flag = Int32(BFLOAT16)
        flags = Int32(BFLOAT16) if cute.arch.vote_any_sync(flag != 0) else Int32(0)
        if const_expr(self.spec.split):
            if cute.arch.vote_any_sync(largest >= MAX_PARTIAL_ROPE << 16):
                flags |= NEEDS_SCALES
        stage = self.rope_stage(tile)
        sFlags = smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.spec.stages)))
        if tid % 32 == 0:
            sFlags[tid // 32, stage] = flags
        if flags & BFLOAT16 == 0:
            self.store_rope(smem, source, stage, tid)

    @cute.jit
    def store_rope(self, smem, words: cute.Tensor, stage: Int32, tid: Int32):
        """Stores a thread's rope numbers as float16 where `load_rope` has read them."""
        line, four = self.line(tid), cute.make_rmem_tensor(4, Int32)
        for r in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    four[i] = codes.rope_to_float16(words[8 * half + 4 * (i // 2) + 2 * (i % 2) + r])
                row = (line ^ (32 * half) ^ (16 * r)) + LINE_BYTES * r
                place = smem.rope.data_ptr() + cute.assume(stage * ROPE_BYTES + row, divby=16)
                cute.autovec_copy(four, cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4)))

    @cute.jit
    def slow_tile(self, smem, acc: cute.Tensor, raw: cute.Tensor, tile: Int32, tid: Int32):
        """Computes S^T of a tile: products of codes times scale and power of Q, in float32. Rare, so not overlapped."""
        stage, result = self.edges.keys.index(tile), cute.make_rmem_tensor_like(acc)
        if const_expr(self.spec.has_rope):
            rope = self.rope_operand()
            self.load_rope(smem, rope, tile, tid)
            numbers = cute.recast_tensor(rope, Int32)
            sFlags = smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.spec.stages)))
            rope_unit = Float32(1.0)
            if sFlags[tid // 32, stage] & BFLOAT16 == 0:
                rope_unit = Float32(codes.ROPE_UNIT)
                for i in cutlass.range_constexpr(cute.size(numbers)):
                    numbers[i] = codes.rope_to_bfloat16(numbers[i])
            self.issue_rope(smem, acc, rope, False, tid)
            warpgroup.wait_group(0)
            result.store(acc.load() * rope_unit)
            self.shift_columns(smem, wgmma.by_row(result), tid)
        else:
            result.fill(0.0)
        self.add_slowly(smem, acc, result, raw, stage, tid)
        acc.store(result.load())

    @cute.jit
    def add_slowly(self, smem, acc: cute.Tensor, result: cute.Tensor, raw: cute.Tensor, stage: Int32, tid: Int32):
        """Adds, for one lane of four after another, products of codes times scale and power of Q, in float32."""
        mma = tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        total, part = wgmma.by_row(result), wgmma.by_row(acc)
        operand = mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, BLOCK_COLUMNS)))
        words = cute.recast_tensor(operand, Int32)
        power = cute.make_rmem_tensor(self.columns, Float32)
        sPower = smem.q_power.get_tensor(cute.make_layout(self.q.blocks * self.heads))
        which, kinds = kind_of_tile(smem, self.spec, stage), [codes.of(kind) for kind in self.spec.kinds]
        for step in cutlass.range(4 * self.chunks, unroll=1):
            c, owner = step // 4, step % 4
            self.load_chunk(smem, raw, stage, c, tid)
            self.widen(raw, operand)
            if tid % 4 != owner:
                for i in cutlass.range_constexpr(cute.size(words)):
                    words[i] = 0
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK_COLUMNS // 16):
                block = rQ[None, None, 4 * c + k]
                one = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1), 3))
                wgmma.issue(mma, acc, operand, one, k > 0, [(k, 0)])
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            copy_columns(sPower, tid, c // CHUNKS_PER_POWER * self.heads, power)
            for r in cutlass.range_constexpr(2):
                start = (stage * TOKENS_PER_TILE + key_of_row(tid, r)) * self.spec.scale_bytes
                byte = smem.scale.data_ptr() + (start + of_kind(which, [kind.scale_index(c, owner) for kind in kinds]))
                scale = Int32(byte.load()) & 0xFF
                factor = of_kind(which, [kind.scale_of(scale) for kind in kinds])
                for i in cutlass.range_constexpr(self.columns):
                    total[r, i] += part[r, i] * (power[i] * factor)

    # ---- shared memory

    @cute.jit
    def load_chunk(self, smem, raw: cute.Tensor, stage: Int32, c, tid: Int32):
        """Loads 16 codes of each of a thread's two rows, in chunk c of 64 columns."""
        place, line = codes.chunk_place(c, tid)
        start = stage * codes_bytes(self.spec) + line
        for r in cutlass.range_constexpr(2):  # the odd row's chunks are swapped
            pointer = smem.codes.data_ptr() + cute.assume(start + (place ^ (16 * r)) + LINE_BYTES * r, divby=16)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=raw.element_type), cute.make_layout(16))
            cute.autovec_copy(source, raw[None, r])
