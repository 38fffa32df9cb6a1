"""The producer warpgroup of the decode kernel: finds keys, gathers their rows and lays them out for wgmma."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr

from cute_kernels.device import token_cache
from cute_kernels.mla.spec import TOKENS_PER_TILE

NOPE, ROPE = 512, 64
GROUP = 128  # columns of a quantization tile
GROUPS = NOPE // GROUP
STAGES = 2
DEPTH = 2  # passes of 16 rows that are in flight
PASSES = TOKENS_PER_TILE // token_cache.ROWS_PER_PASS


class KeyProducer:
    """Fills the stages of :class:`cute_kernels.mla.kernel.MlaDecodeKernel`; device code for 128 threads.

    sparse   keys come from a list of slots; otherwise from a block table
    """

    def __init__(self, sparse: bool):
        self.sparse = sparse

    @cute.jit
    def fill(
        self,
        smem,
        mKV: cute.Tensor,
        zero_row: Int64,
        entries: cute.Tensor,
        begin: Int32,
        limit: Int32,
        count: Int32,
        page_divisor,
        tidx: Int32,
    ):
        """Fills `count` stages with the keys at positions `begin` and on; those at `limit` and beyond are masked.

        The rows of the next DEPTH passes are always in flight: as a pass is stored, its registers receive the pass
        DEPTH further. Entries of the index or block table are read DEPTH passes before that.
        """
        lane, warp_idx = tidx % 32, tidx // 32
        quarter, odd_row, phase = lane % 4, lane // 4 % 2, lane // 8
        row, half = 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2
        segment, x = 64 * half + 16 * quarter, row % 8
        position = begin + row
        last = limit - 1

        block = TOKENS_PER_TILE * 64  # elements of a 64-column block
        at_even = half * block + row * 64 + ((2 * quarter) ^ x) * 8
        at_odd = half * block + row * 64 + ((2 * quarter + 1) ^ x) * 8
        at_rope = row * 64 + ((4 * half + quarter) ^ x) * 8
        in_nope = cute.make_layout((8, GROUPS, PASSES, STAGES), stride=(1, 2 * block, 16 * 64, TOKENS_PER_TILE * NOPE))
        in_rope = cute.make_layout((8, PASSES, STAGES), stride=(1, 16 * 64, TOKENS_PER_TILE * ROPE))
        in_factor = cute.make_layout(
            (2, PASSES, STAGES), stride=(GROUPS * TOKENS_PER_TILE, 16, 2 * GROUPS * TOKENS_PER_TILE)
        )
        in_mask = cute.make_layout((PASSES, STAGES), stride=(16, TOKENS_PER_TILE))
        sEven = cute.make_tensor(smem.nope.data_ptr() + cute.assume(at_even, divby=8), in_nope)
        sOdd = cute.make_tensor(smem.nope.data_ptr() + cute.assume(at_odd, divby=8), in_nope)
        sRope = cute.make_tensor(smem.rope.data_ptr() + cute.assume(at_rope, divby=8), in_rope)
        sFactor = cute.make_tensor(smem.factor.data_ptr() + quarter * TOKENS_PER_TILE + row, in_factor)
        sMask = cute.make_tensor(smem.mask.data_ptr() + row, in_mask)
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()

        raw = cute.make_rmem_tensor((16, token_cache.PIECES, DEPTH), Uint8)
        scale = cute.make_rmem_tensor((1, DEPTH), Float32)
        powers = cute.make_rmem_tensor(GROUPS, BFloat16)
        valid = cute.make_rmem_tensor(DEPTH, Int32)
        entry = cute.make_rmem_tensor(DEPTH, Int32)
        for d in cutlass.range_constexpr(DEPTH):
            entry[d] = self.read_entry(entries, position + 16 * d, last, page_divisor)
        for d in cutlass.range_constexpr(DEPTH):
            valid[d], source = self.locate(mKV, zero_row, entry[d], position, limit, page_divisor)
            token_cache.gather(source, segment, quarter, raw[None, None, d], scale[None, d])
            entry[d] = self.read_entry(entries, position + 16 * DEPTH, last, page_divisor)
            position += 16

        for t in cutlass.range(count, unroll=1):
            stage, use = t % STAGES, t // STAGES
            cute.arch.mbarrier_wait(empty + stage, (use + 1) % 2)
            for group in cutlass.range(PASSES // DEPTH, unroll=1):  # not unrolled: ptxas would hoist loads and spill
                for d in cutlass.range_constexpr(DEPTH):
                    p = group * DEPTH + d
                    power, f = token_cache.split_scale(scale[0, d])
                    before = cute.arch.shuffle_sync(f, (lane & 28) | ((quarter + 3) % 4))  # f of the tile before
                    if half == 0:
                        if quarter == 0:
                            before = Float32(1.0)  # the chain starts with the rope part, which has no scale
                            sMask[p, stage] = Float32(0.0) if valid[d] != 0 else -Float32.inf
                        sFactor[0, p, stage] = before * cute.arch.rcp_approx(f)
                        sFactor[1, p, stage] = f
                    for j in cutlass.range_constexpr(GROUPS):
                        of_group = cute.arch.shuffle_sync(power, (lane & 28) | j)
                        powers[j] = of_group.bitcast(Float32).to(BFloat16)
                    valid[d], source = self.locate(mKV, zero_row, entry[d], position, limit, page_divisor)
                    token_cache.load_scale(source, quarter, scale[None, d])
                    token_cache.store_and_gather(
                        raw[None, None, d],
                        powers,
                        sEven[None, None, p, stage],
                        sOdd[None, None, p, stage],
                        sRope[None, p, stage],
                        source,
                        segment,
                    )
                    entry[d] = self.read_entry(entries, position + 16 * DEPTH, last, page_divisor)
                    position += 16
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
            cute.arch.mbarrier_arrive(full + stage)

    @cute.jit
    def read_entry(self, entries: cute.Tensor, position: Int32, last: Int32, page_divisor):
        """The index (sparse) or page number (dense) behind a position; beyond the last one, that of the last one."""
        position = cutlass.min(position, last)
        if const_expr(not self.sparse):
            position = position // page_divisor
        return entries[position]

    @cute.jit
    def locate(self, mKV: cute.Tensor, zero_row: Int64, entry: Int32, position: Int32, limit: Int32, page_divisor):
        """(1, the address of the key's row), or (0, that of a row of zeros) where the position is masked."""
        bound = mKV.shape[0]
        if const_expr(self.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(
            cutlass.max(entry, 0), bound - 1
        )  # one comparison less, and so a predicate, than two bounds
        valid = inside == entry and position < limit
        if const_expr(self.sparse):
            page, offset = divmod(inside, page_divisor)
        else:
            page, offset = inside, position % page_divisor
        row = token_cache.row_pointer(mKV, zero_row, valid, page, offset)
        return (Int32(1) if valid else Int32(0)), row
