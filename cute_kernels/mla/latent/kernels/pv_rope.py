"""PV warpgroup 1 of the latent decode kernel where rope parts are values: 192 values of codes, 64 of a rope part.

Rows of O^T are shared out so that all four warps do the same: each has 16 of the 64 rows of a row block.

    row block   values        a warp's      a thread's                         from
    0, 1        256 to 383    32            4 neighbours: one word a key       codes, scales of two quant tiles
    2           384 to 447    16            2: half a word                     codes, scales of one
    3           448 to 511    16            2: one word                        the rope part, which QK leaves as float16

(With 64 neighbouring values a warp, one warp had all of the rope part and a branch of its own at each of 16 products:
208 us, where a format without a rope part took 187.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int16, Int32, const_expr

from cute_kernels.device import registers, softmax
from cute_kernels.device.ring import ring_slot
from cute_kernels.mla.kernels.arguments import Partials
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.pv import KEY_BLOCKS, ROW_BLOCKS, Epilogue
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.smem import ROPE_BYTES, WARPS, head_of_column, line_offset
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.load import half_line_chunk
from cute_kernels.mla.latent.kernels.pv import ScaledKeyPvWarpgroups, key_offset
from cute_kernels.mla.latent.kernels.smem import codes_bytes
from cute_kernels.mla.latent.spec import LINE_BYTES
from cute_kernels.mla.spec import TOKENS_PER_TILE
from fp8_mla.formats import TokenFormat

EVEN, ODD = 0x5410, 0x7632  # PRMT: the lower halves of two words, the upper ones
PAIR, ROPE = 2, 3  # row blocks of half a word of codes, of the rope part
FIRST_LINE = 2  # lines of codes before it are warpgroup 0's
FIRST_BLOCK = 4  # likewise blocks of 64 values, which have a block scale each in a partial


class RopePvWarpgroup(ScaledKeyPvWarpgroups):
    """Device code for 128 threads; see the module's docstring and `ScaledKeyPvWarpgroups`."""

    @cute.jit
    def line(self, wg: Int32, tid: Int32):
        """Offset of the first word of a thread's first key, in the first line of this warpgroup or in a rope part."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        return registers.opaque(Int32(line_offset(2 * q, 2 * warp_idx + g // 4) + g % 4 * 4))

    def pair_line(self, tid: Int32):
        """Likewise of its codes of the half line."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        return (FIRST_LINE + 1) * TOKENS_PER_TILE * LINE_BYTES + line_offset(2 * q, half_line_chunk(warp_idx)) + 2 * g

    @cute.jit
    def load_values(
        self, smem, kind: cutlass.Constexpr, raw: cute.Tensor, stage: Int32, block, line: Int32, wg: Int32, tid
    ):
        """Four codes, of row blocks 0 and 1, of each key of a thread's four columns of A in a block of 16 keys."""
        base = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec)
        self.load_keys(raw, base + FIRST_LINE * TOKENS_PER_TILE * LINE_BYTES, line, block, 4)

    @cute.jit
    def load_pairs(self, smem, stage: Int32, block, tid: Int32) -> cute.Tensor:
        """Two codes, of row block 2, of each of these keys, as `widen` takes them."""
        raw = cute.make_rmem_tensor((2, 4), Int32)
        base, line = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec), self.pair_line(tid)
        for i in cutlass.range_constexpr(4):
            pointer = cute.make_ptr(Int16, base + key_offset(line, block, i), AddressSpace.smem, assumed_align=2)
            raw[1, i] = Int32(pointer.load())
        return raw

    @cute.jit
    def load_ropes(self, smem, stage: Int32, block, line: Int32) -> cute.Tensor:
        """Two numbers of the rope part of each of these keys."""
        raw = cute.make_rmem_tensor((1, 4), Int32)
        self.load_keys(raw, Int32(smem.rope.data_ptr().toint()) + stage * ROPE_BYTES, line, block, 4)
        return raw

    def order_rope(self, raw: cute.Tensor, operand: cute.Tensor):
        """A of the rope part."""
        for i in range(4):
            operand[i] = Int32(
                cute.arch.prmt(raw[0, i // 2 * 2], raw[0, i // 2 * 2 + 1], Int32(ODD if i % 2 else EVEN))
            )

    def quant_tile(self, kind: TokenFormat, m: int, tid: Int32):
        """That of a thread's values of a row block of codes."""
        return Int32(kind.num_scales - 1) if m == PAIR else kind.num_scales - 3 + tid // 64

    @cute.jit
    def add_values(
        self, smem, kind: cutlass.Constexpr, mma: cute.TiledMma, acc_o, raw, tile: Int32, line: Int32, wg: Int32, tid
    ):
        """O^T += V^T P^T; see `ScaledKeyPvWarpgroups.add_values`."""
        stage, _ = ring_slot(tile, self.spec.stages)
        p_stage, _ = ring_slot(tile, self.spec.p_stages)
        rP = self.p_operands(smem, mma, tid)[None, None, None, p_stage]
        fragments = self.fragments(mma)
        for block in cutlass.range_constexpr(KEY_BLOCKS):
            multipliers = self.load_multipliers(smem, p_stage, block, self.quant_tile(kind, 0, tid), tid)
            pairs, ropes = self.load_pairs(smem, stage, block, tid), self.load_ropes(smem, stage, block, line)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                fragment = fragments[(ROW_BLOCKS * block + m) % self.v_fragments]
                operand = cute.recast_tensor(fragment, Int32)
                if const_expr(m == 0 and block + 1 < KEY_BLOCKS):
                    self.load_values(smem, kind, raw[(block + 1) % 2], stage, block + 1, line, wg, tid)
                if const_expr(m == PAIR):
                    multipliers = self.load_multipliers(smem, p_stage, block, self.quant_tile(kind, PAIR, tid), tid)
                if const_expr(m == ROPE):
                    self.order_rope(ropes, operand)
                else:
                    self.widen_codes(kind, pairs if const_expr(m == PAIR) else raw[block % 2], m, operand)
                    self.scale_operand(operand, multipliers)
                self.multiply(smem, mma, acc_o[m], fragment, rP, block, m, stage)

    @cute.jit
    def exact_operand(
        self, smem, kind: cutlass.Constexpr, m: cutlass.Constexpr, operand: cute.Tensor, stage: Int32, block: Int32,
        line: Int32, wg: Int32, tid: Int32,
    ):  # fmt: skip
        """A of row block m and 16 keys as bfloat16."""
        if const_expr(m == ROPE):
            self.order_rope(self.load_ropes(smem, stage, block, line), operand)
            sFlags = smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.spec.stages)))
            if sFlags[block, stage] == 0:  # of these 16 keys: QK has left float16
                for i in cutlass.range_constexpr(4):
                    operand[i] = codes.rope_to_bfloat16(operand[i])
        else:
            if const_expr(m == PAIR):
                self.widen_codes(kind, self.load_pairs(smem, stage, block, tid), m, operand)
            else:
                raw = cute.make_rmem_tensor((2, 4), Int32)
                self.load_values(smem, kind, raw, stage, block, line, wg, tid)
                self.widen_codes(kind, raw, m, operand)
            self.scale_exactly(smem, kind, operand, self.quant_tile(kind, m, tid), stage, block, tid)

    # ---- epilogue

    def block_scales(self, partials: Partials, work: WorkTile, wg: Int32, tid: Int32) -> cute.Tensor:
        """(heads, blocks of values): those of a warp are in three blocks."""
        return partials.scales[work.split, work.request, work.query, None, None]

    @cute.jit
    def store(
        self, epilogue: Epilogue, rows: cute.Tensor, scales, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32
    ):
        """Stores O times the factor of each head: four, two and two neighbouring values; by block scales if any."""
        warp_idx, g = tid // 32, tid % 32 // 4
        first = (FIRST_BLOCK * 64 + 32 * warp_idx + 4 * g, 384 + 16 * warp_idx + 2 * g, 448 + 16 * warp_idx + 2 * g)
        eight, rounded = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, rows.element_type)
        for c in cutlass.range_constexpr(self.columns):
            head = head_block * self.heads + head_of_column(tid, c)
            self.column(epilogue, c, eight)
            if const_expr(scales is not None):
                if epilogue.is_exact != 0:
                    self.divide_by_shared_scales(epilogue, eight, scales, head, h_q, tid)
            rounded.store(eight.load().to(rows.element_type))
            if head < h_q:
                row = rows[head, None].iterator
                for place, i, count in zip(first, (0, 4, 6), (4, 2, 2), strict=True):
                    layout = cute.make_layout(count)
                    target = cute.make_tensor(row + cute.assume(place, divby=count), layout)
                    cute.autovec_copy(cute.make_tensor(rounded.iterator + i, layout), target)

    @cute.jit
    def divide_by_shared_scales(
        self, epilogue: Epilogue, eight: cute.Tensor, scales: cute.Tensor, head: Int32, h_q: Int32, tid: Int32
    ):
        """Divides by block scales, and stores these: of each 64 values, those of two warps or of four. Rare."""
        warp_idx, q = tid // 32, tid % 4
        sPeaks = cute.make_tensor(cute.recast_ptr(epilogue.scratch, dtype=Float32), cute.make_layout((3, 4, WARPS)))
        for part in cutlass.range_constexpr(3):
            peak = Float32(0.0)
            for i in cutlass.range_constexpr((0, 4, 6)[part], (4, 6, 8)[part]):
                peak = cute.arch.fmax(peak, cute.arch.fmax(eight[i], -eight[i]))
            for step in cutlass.range_constexpr(3):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
            if tid % 32 < 4:
                sPeaks[part, q, warp_idx] = peak
        cute.arch.barrier(barrier_id=NamedBarrier.PV + 1, number_of_threads=128)
        for part in cutlass.range_constexpr(3):
            pair = warp_idx // 2 * 2
            peak, block = cute.arch.fmax(sPeaks[part, q, pair], sPeaks[part, q, pair + 1]), FIRST_BLOCK + warp_idx // 2
            if const_expr(part > 0):
                other = cute.arch.fmax(sPeaks[part, q, 2 - pair], sPeaks[part, q, 3 - pair])
                peak, block = cute.arch.fmax(peak, other), FIRST_BLOCK + 1 + part
            scale = softmax.block_scale(peak)
            for i in cutlass.range_constexpr((0, 4, 6)[part], (4, 6, 8)[part]):
                eight[i] *= 1.0 / scale
            if tid % 64 < 4 and head < h_q:  # two warps store the same, where all share a block
                scales[head, block] = scale
        cute.arch.barrier(barrier_id=NamedBarrier.PV + 1, number_of_threads=128)
