"""The two PV warpgroups of the latent decode kernel: O^T += V^T P^T, and the epilogue."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import registers, wgmma
from cute_kernels.device.ring import ring_slot
from cute_kernels.mla.kernels.arguments import Results
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.pv import KEY_BLOCKS, ROW_BLOCKS, Epilogue, PvWarpgroups
from cute_kernels.mla.kernels.scheduler import WorkTable
from cute_kernels.mla.kernels.smem import (
    OUT_OF_RANGE,
    RESCALE_O,
    WARPS,
    copy_columns,
    line_offset,
    tiled_mmas,
)
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.smem import SMALL_SCALE, codes_bytes, weights
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE
from fp8_mla.formats import TokenFormat

VALUES_PER_WARP = 64


class ScaledKeyPvWarpgroups(PvWarpgroups):
    """Device code for 2 x 128 threads; see `PvWarpgroups` for which values and keys a thread has.

        O WEIGHT += (WEIGHT scale code) P      an exact float16 number times P as float16, summed in float32

    A tile with a scale or a rope part out of range of float16 is added in bfloat16 (`add_exactly`). Where rope parts
    are values, this is warpgroup 0, which has none of them, and `pv_rope.py` is warpgroup 1.

    A partial is O WEIGHT as float16, unless a scale of its keys is so small that this would cost digits of values, or
    out of range: then each 64 values have a block scale.
    """

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.scheduler = LatentScheduler(spec)
        self.weight = codes.WEIGHT

    @cute.jit
    def pv_work_tile(
        self,
        smem,
        table: WorkTable,
        page_tma: tuple,
        results: Results,
        done: Int32,
        tiles: Int32,
        index: Int32,
        is_whole: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """O of the key tiles done, done + 1, ... of a work tile, and its epilogue."""
        mma = tiled_mmas(self.heads)[0]
        shape = mma.partition_shape_C((TOKENS_PER_TILE, self.heads))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(ROW_BLOCKS)]
        for m in cutlass.range_constexpr(ROW_BLOCKS):
            acc_o[m].fill(0.0)
        raw = [cute.make_rmem_tensor((2, 4), Int32) for _ in range(2)]
        line, seen = self.line(wg, tid), Int32(0)
        for tile in cutlass.range(done, done + tiles, unroll=1):
            stage, phase = ring_slot(tile, self.spec.stages)
            p_stage, p_phase = ring_slot(tile, self.spec.p_stages)
            self.stamp(smem, tile, 0, 0, wg, tid)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)  # completed long ago
            if const_expr(len(self.spec.kinds) == 1):  # overlapped with the wait for P
                self.load_values(smem, self.spec.kinds[0], raw[0], stage, 0, line, wg, tid)
            cute.arch.mbarrier_wait(smem.p_full.data_ptr() + p_stage, p_phase)
            self.stamp(smem, tile, 0, 1, wg, tid)
            self.stamp(smem, tile, 1, 0, wg, tid)
            flags = self.flags(smem, p_stage)
            if const_expr(self.spec.split):
                seen |= flags
            if flags & RESCALE_O != 0 and tile > done:
                self.rescale(smem, acc_o, p_stage, tid)
            kinds = self.spec.kinds
            if const_expr(len(kinds) > 1):
                if smem.kinds.get_tensor(cute.make_layout(self.spec.stages))[stage] == 0:
                    self.add_tile_of(smem, kinds[0], acc_o, raw, flags, tile, line, wg, tid)
                else:
                    self.add_tile_of(smem, kinds[1], acc_o, raw, flags, tile, line, wg, tid)
            else:
                self.add_tile_of(smem, kinds[0], acc_o, raw, flags, tile, line, wg, tid)
            if tile < done + tiles - 1:
                cute.arch.mbarrier_arrive(smem.p_empty.data_ptr() + p_stage)
            self.stamp(smem, tile, 1, 1, wg, tid)
        factor = cute.make_rmem_tensor(self.columns, Float32)
        factor.fill(0.0)
        lse, sLse = -Float32.inf, smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        if tiles > 0:
            p_stage = (done + tiles - 1) % 2
            inverse_sums = smem.inverse_sum.get_tensor(cute.make_layout(2 * self.heads))
            copy_columns(inverse_sums, tid, p_stage * self.heads, factor)
            if tid < self.heads:
                lse = sLse[tid, p_stage]
            cute.arch.mbarrier_arrive(smem.p_empty.data_ptr() + p_stage)
        has_scales = Int32(0)  # of blocks; else a partial stays multiplied by WEIGHT, whose inverse is the scale of all
        weight = Float32(1.0 / self.weight)
        if const_expr(self.spec.split):
            has_scales = Int32(cutlass.select_(seen & (OUT_OF_RANGE | SMALL_SCALE) != 0, Int32(1), Int32(0)))
            divided = has_scales | is_whole if const_expr(self.spec.balanced) else has_scales
            weight = Float32(cutlass.select_(divided != 0, weight, Float32(1.0)))
        for c in cutlass.range_constexpr(self.columns):
            factor[c] *= weight
        # located again, not kept: each register counts while O is held
        work = self.scheduler.locate(registers.opaque(index), table)
        # what `add_exactly` has of shared memory: 16 x heads numbers of each warpgroup
        scratch = smem.scaled_p.data_ptr() + 16 * self.heads
        epilogue = Epilogue(acc_o, factor, lse, has_scales, scratch)
        if const_expr(self.spec.balanced):
            if is_whole != 0:
                self.store_result(epilogue, results, work, wg, tid)
            else:
                self.store_partial(epilogue, results, work, wg, tid)
        elif const_expr(self.spec.split):
            self.store_partial(epilogue, results, work, wg, tid)
        else:
            self.store_result(epilogue, results, work, wg, tid)

    # ---- values of a tile

    @cute.jit
    def add_tile_of(
        self, smem, kind: cutlass.Constexpr, acc_o, raw, flags: Int32, tile: Int32, line: Int32, wg: Int32, tid: Int32
    ):
        """O^T += V^T P^T of a tile of that format."""
        mma, mma_exact = tiled_mmas(self.heads)
        stage = ring_slot(tile, self.spec.stages).index
        if flags & OUT_OF_RANGE != 0:
            self.add_exactly(smem, kind, mma_exact, acc_o, tile, line, wg, tid)
            cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
        else:
            if const_expr(len(self.spec.kinds) > 1):
                self.load_values(smem, kind, raw[0], stage, 0, line, wg, tid)
            self.add_values(smem, kind, mma, acc_o, raw, tile, line, wg, tid)

    @cute.jit
    def line(self, wg: Int32, tid: Int32):
        """Offset of a thread's codes of its first key in a stage."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        code_line, chunk = 2 * wg + warp_idx // 2, 4 * (warp_idx % 2) + g // 2
        line = code_line * (TOKENS_PER_TILE * LINE_BYTES) + line_offset(2 * q, chunk) + g % 2 * 8
        return registers.opaque(Int32(line))

    @cute.jit
    def load_values(
        self, smem, kind: cutlass.Constexpr, raw: cute.Tensor, stage: Int32, block, line: Int32, wg: Int32, tid
    ):
        """Eight codes of each key of a thread's four columns of A in a block of 16 keys (4)."""
        base, size = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec), 8
        if const_expr(codes.is_fp4(kind)):  # a line of 256 codes for each warpgroup
            size, warp_idx, g = 4, tid // 32, tid % 32 // 4
            place = line_offset(2 * (tid % 4), 2 * warp_idx + g // 4) + g % 4 * 4
            line = wg * (TOKENS_PER_TILE * LINE_BYTES) + place
        self.load_keys(raw, base, line, block, size)

    @cute.jit
    def load_keys(self, raw: cute.Tensor, base: Int32, line: Int32, block, size: cutlass.Constexpr):
        """Copies `size` bytes of each of a thread's four keys of a block into a column of `raw`, 4 or 8."""
        for i in cutlass.range_constexpr(4):
            pointer = cute.make_ptr(Int32, base + key_offset(line, block, i), AddressSpace.smem, assumed_align=size)
            layout = cute.make_layout(size // 4)
            cute.autovec_copy(cute.make_tensor(pointer, layout), cute.make_tensor(raw[None, i].iterator, layout))

    @cute.jit
    def widen_codes(self, kind: cutlass.Constexpr, raw: cute.Tensor, m: cutlass.Constexpr, operand: cute.Tensor):
        """A of row block m, from codes of four keys: rows g and g + 8, keys 2 q and on and 2 q + 8 and on."""
        if const_expr(codes.is_fp4(kind)):
            for i in cutlass.range_constexpr(2):  # byte m of two keys: the lower codes are of row g
                both = Int32(cute.arch.prmt(raw[0, 2 * i], raw[0, 2 * i + 1], Int32(m | (4 + m) << 4)))
                upper = codes.fp4_bytes(both)
                operand[2 * i], operand[2 * i + 1] = codes.fp4_pair(upper, 0, 2), codes.fp4_pair(upper, 1, 3)
        else:
            half = cute.make_rmem_tensor(8, Float16)
            self.widen(raw, m, half)
            words = cute.recast_tensor(half, Int32)
            for i in cutlass.range_constexpr(4):
                operand[i] = words[i]

    @cute.jit
    def scale_operand(self, operand: cute.Tensor, multipliers: cute.Tensor):
        """Multiplies A by the weights of its keys."""
        for i in cutlass.range_constexpr(4):
            operand[i] = codes.multiply(operand[i], multipliers[i // 2])

    def quant_tile(self, kind: TokenFormat, wg: Int32, tid: Int32):
        """The quant tile of a thread's eight values."""
        warp = WARPS * wg + tid // 32
        per_warp = VALUES_PER_WARP // kind.quant_tile
        return warp if per_warp == 1 else per_warp * warp + tid % 32 // 4 // (8 // per_warp)

    @cute.jit
    def load_multipliers(
        self, smem, p_stage: Int32, block: cutlass.Constexpr, quant_tile: Int32, tid: Int32
    ) -> cute.Tensor:
        """Multipliers of a quant tile of a thread's four keys of a block, two in a word."""
        words = cute.make_rmem_tensor(2, Int32)
        numbers = cute.recast_tensor(words, Float16)
        start = weights(smem, self.spec, p_stage, quant_tile, tid)[None, block // 2].iterator
        cute.autovec_copy(cute.make_tensor(start + block % 2 * 4, cute.make_layout(4)), numbers)
        return words

    @cute.jit
    def add_values(
        self, smem, kind: cutlass.Constexpr, mma: cute.TiledMma, acc_o, raw, tile: Int32, line: Int32, wg: Int32, tid
    ):
        """O^T += V^T P^T. Converts the next row blocks while wgmma reads the current ones.

        `raw` has the codes of the first 16 keys.
        """
        stage, _ = ring_slot(tile, self.spec.stages)
        p_stage, _ = ring_slot(tile, self.spec.p_stages)
        rP = self.p_operands(smem, mma, tid)[None, None, None, p_stage]
        fragments = self.fragments(mma)
        for block in cutlass.range_constexpr(KEY_BLOCKS):
            multipliers = self.load_multipliers(smem, p_stage, block, self.quant_tile(kind, wg, tid), tid)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                fragment = fragments[(ROW_BLOCKS * block + m) % self.v_fragments]
                operand = cute.recast_tensor(fragment, Int32)
                if const_expr(m == 0 and block + 1 < KEY_BLOCKS):
                    self.load_values(smem, kind, raw[(block + 1) % 2], stage, block + 1, line, wg, tid)
                self.widen_codes(kind, raw[block % 2], m, operand)
                self.scale_operand(operand, multipliers)
                self.multiply(smem, mma, acc_o[m], fragment, rP, block, m, stage)

    def fragments(self, mma: cute.TiledMma) -> list[cute.Tensor]:
        """Registers of A: half of them are made while wgmma reads the others."""
        shape = mma.partition_shape_A((TOKENS_PER_TILE, 16))
        return [mma.make_fragment_A(shape) for _ in range(self.v_fragments)]

    @cute.jit
    def multiply(
        self, smem, mma: cute.TiledMma, acc, fragment, rP, block: cutlass.Constexpr, m: cutlass.Constexpr, stage: Int32
    ):
        """Starts the product of a row block and 16 keys; waits until the registers that come next are free."""
        warpgroup.fence()
        wgmma.issue(mma, acc, fragment, rP, True, [(0, block)])
        if const_expr(block + 1 == KEY_BLOCKS and m == 2):  # all values of the tile are in registers
            cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
        if const_expr((m + 1) % (self.v_fragments // 2) == 0):
            warpgroup.commit_group()
            if const_expr(block + 1 == KEY_BLOCKS and m + 1 == ROW_BLOCKS):
                warpgroup.wait_group(0)
            else:
                warpgroup.wait_group(1)

    @cute.jit
    def add_exactly(
        self, smem, kind: cutlass.Constexpr, mma: cute.TiledMma, acc_o, tile: Int32, line: Int32, wg: Int32, tid: Int32
    ):
        """O^T += V^T (P WEIGHT)^T in bf16, whose range is that of float32: rare, so without overlap.

        P is the sum of two bfloat16 numbers.
        """
        stage, p_stage = ring_slot(tile, self.spec.stages).index, ring_slot(tile, self.spec.p_stages).index
        sScaledP, sP = self.exact_p(smem)
        rScaledP = mma.make_fragment_B(mma.get_slice(tid).partition_B(sScaledP))[None, None, None, wg]
        fragment = mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, 16)))
        for step in cutlass.range(2 * KEY_BLOCKS, unroll=1):
            block, rest = step // 2, step % 2
            for i in cutlass.range(tid, 16 * self.heads, 128, unroll=1):
                head, position = i // 16, 16 * block + i % 16
                p = sP[head, position, p_stage].to(Float32) * codes.WEIGHT
                rounded = p.to(BFloat16)
                if rest == 1:
                    rounded = (p - rounded.to(Float32)).to(BFloat16)
                sScaledP[head, i % 16, wg] = rounded
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
            cute.arch.barrier(barrier_id=NamedBarrier.PV + wg, number_of_threads=128)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                self.exact_operand(smem, kind, m, cute.recast_tensor(fragment, Int32), stage, block, line, wg, tid)
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], fragment, rScaledP, True, [(0, 0)])
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            cute.arch.barrier(barrier_id=NamedBarrier.PV + wg, number_of_threads=128)

    @cute.jit
    def exact_operand(
        self, smem, kind: cutlass.Constexpr, m: cutlass.Constexpr, operand: cute.Tensor, stage: Int32, block: Int32,
        line: Int32, wg: Int32, tid: Int32,
    ):  # fmt: skip
        """A of row block m and 16 keys as bfloat16."""
        raw = cute.make_rmem_tensor((2, 4), Int32)
        self.load_values(smem, kind, raw, stage, block, line, wg, tid)
        self.widen_codes(kind, raw, m, operand)
        self.scale_exactly(smem, kind, operand, self.quant_tile(kind, wg, tid), stage, block, tid)

    @cute.jit
    def scale_exactly(
        self, smem, kind: cutlass.Constexpr, operand: cute.Tensor, quant_tile: Int32, stage: Int32, block, tid: Int32
    ):
        """Multiplies A by scales of a quant tile of its keys, whatever they are."""
        scales = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            key = stage * TOKENS_PER_TILE + 16 * block + 2 * (tid % 4) + i % 2 + 8 * (i // 2)
            byte = smem.scale.data_ptr() + (key * self.spec.scale_bytes + quant_tile)
            scales[i] = codes.scale_of(kind, Int32(byte.load()) & 0xFF)
        for i in cutlass.range_constexpr(4):
            first = i // 2 * 2
            operand[i] = codes.scale_to_bfloat16(operand[i], scales[first], scales[first + 1])


def key_offset(line, block, i: int):
    """Where a thread's key i of four of a block of 16 lies, from its first key's bytes at `line` of a stage."""
    key = (line ^ (16 * (i % 2))) + LINE_BYTES * (i % 2 + 8 * (i // 2))  # of a neighbour chunks are swapped
    return block * (16 * LINE_BYTES) + key
