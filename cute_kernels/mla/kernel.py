"""FP8 MLA decoding on SM90: split-KV flash decoding of 64 query heads over 656-byte tokens.

One CTA serves 64 heads of one query token over a range of its keys, in tiles of 64 keys that alternate between two shared-memory
stages. Two consumer warpgroups play seesaw: tile t belongs to warpgroup t % 2, which computes S and P of the whole tile; each
warpgroup owns 256 of the 512 output columns, so P of every tile is needed by both, from registers in its owner (RS) and from
shared memory in the other (SS). While one does its softmax, the other keeps the tensor core busy.

Roles (384 threads)
  warpgroup 0     producer, 80 registers: gathers rows into registers two passes (32 rows) ahead, dequantizes, stores
  warpgroup 1, 2  consumers, 208 registers: 128 of O, 32 of S, 16 of P; warp 4 issues the TMA load of Q

Barriers                        arrivals per phase
  q_full                        1 + 73,728 bytes of TMA
  full[stage]                   4: lane 0 of each producer warp, after a proxy fence by every lane
  empty[stage]                  8: lane 0 of each consumer warp, after its last wgmma on the stage
  named 1  BAR_CONSUMERS        256: both consumer warpgroups
  named 2, 3  BAR_OWNER + w     128: all warps of w have finished QK, P may overwrite the rope block
  named 4, 5  BAR_P + w         256: w has written P and the row maxima (arrives), the other reads them (waits)
  named 6  BAR_VERDICT          384: everybody knows whether the float16 attempt holds

Shared memory (224,000 of 232,448 bytes)
  nope    2 x 64 x 512 x 2      131,072   fp16 or bf16, 128-byte swizzle; O is staged here at the end
  rope    2 x 64 x 64 x 2        16,384   P of a tile overwrites its rope block, which only its owner's QK reads
  q       64 x 576 x 2           73,728
  rest                                    masks, row maxima, row sums, Q exponents, verdicts, barriers

Operands. A dequantized key is one float32 product, rounded once. Rounded to float16 the log-sum-exp is off by 2e-5, rounded to bf16
by 2e-4; so the first attempt multiplies in float16, with every row of Q brought to [256, 512) by an exact power of two. The
producer watches scales and rope values, the consumers Q: where float16 would overflow or lose bits, the CTA throws its result
away and repeats its range with bf16 operands. Caches of ordinary models never get there; correctness does not depend on it.

Probabilities are scaled by 2^12, so that float16 keeps those down to 2^-36 of the largest.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import token_cache, wgmma
from cute_kernels.merge.kernel import MergeKernel
from cute_kernels.mla.spec import HEADS_PER_CTA, TOKENS_PER_TILE, MlaDecodeSpec

NOPE, ROPE = 512, 64
QK = NOPE + ROPE
STAGES = 2
HALF = NOPE // 2  # output columns of one consumer warpgroup
DEPTH = 2  # passes of 16 rows that the producer keeps in flight
PASSES = TOKENS_PER_TILE // token_cache.ROWS_PER_PASS
THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 80, 208  # 80 + 2 * 208 <= 504 = 3 * 168, what 384 threads get at launch
BAR_CONSUMERS, BAR_OWNER, BAR_P, BAR_VERDICT = 1, 2, 4, 6
P_SHIFT = 12.0
# float16 operands carry an absolute error of 2^-25; below this product of |q| and softmax_scale it cannot move a score by 1e-4
Q_SCALE_MAX = 64.0
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def _shared_storage(layout_nope, layout_rope, layout_q):
    tile = HEADS_PER_CTA

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        mask: cute.struct.MemRange[Float32, STAGES * TOKENS_PER_TILE]  # 0 or -inf, added to the scores of a tile
        row_max: cute.struct.MemRange[Float32, STAGES * tile]
        row_sum: cute.struct.MemRange[Float32, 2 * tile]
        q_inverse: cute.struct.MemRange[Float32, tile]
        verdict: cute.struct.MemRange[Int32, THREADS // 32]
        q_full: Int64
        full: cute.struct.MemRange[Int64, STAGES]
        empty: cute.struct.MemRange[Int64, STAGES]

    return Shared


class MlaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: MlaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        batch, s_q, h_q, splits = (cute.sym_int() for _ in range(4))

        def strided(dtype, shape, inner, align):
            strides = [cute.sym_int64(divisibility=align // (dtype.width // 8)) for _ in shape[:-1]]
            return make_fake_tensor(dtype, shape, (*strides, inner), assumed_align=align)

        q = strided(BFloat16, (batch, s_q, h_q, QK), 1, 16)
        kv = strided(Uint8, (cute.sym_int(), cute.sym_int(), token_cache.ROW_BYTES), 1, 16)
        if self.spec.sparse:
            index = strided(cutlass.Int32, (batch, s_q, cute.sym_int()), 1, 4)
            length = make_fake_tensor(
                cutlass.Int32, (batch, s_q), (cute.sym_int64(), cute.sym_int64()), assumed_align=4
            )
        else:
            index = strided(cutlass.Int32, (batch, cute.sym_int()), 1, 4)
            length = make_fake_tensor(cutlass.Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        out = strided(BFloat16, (batch, s_q, h_q, NOPE), 1, 16)
        lse = make_fake_tensor(Float32, (batch, s_q, h_q), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
        partial = partial_lse = None
        if self.spec.split:
            partial = strided(Float32, (splits, batch, s_q, h_q, NOPE), 1, 16)
            partial_lse = strided(Float32, (splits, batch, s_q, h_q), 1, 4)
        zero = make_fake_tensor(Uint8, (token_cache.ROW_BYTES,), (1,), assumed_align=16)
        return (
            q,
            kv,
            index,
            length,
            sink,
            out,
            lse,
            partial,
            partial_lse,
            zero,
            Float32(1.0),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndex: cute.Tensor,
        mLength: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        mZero: cute.Tensor,
        softmax_scale: Float32,
        num_splits: Int32,
        causal: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the decode kernel and, for split specs, the merge of its partials."""
        row, tile = LayoutEnum.ROW_MAJOR, (HEADS_PER_CTA, TOKENS_PER_TILE)
        layout_nope = sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, STAGES)
        layout_rope = sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, STAGES)
        layout_q = sm90.make_smem_layout_a(row, (*tile, QK), BFloat16, 1)
        layout_out = sm90.make_smem_layout_epi(BFloat16, row, (HEADS_PER_CTA, HALF), 2)

        batch, s_q, h_q, _ = mQ.shape
        head_blocks = cute.ceil_div(h_q, HEADS_PER_CTA)
        # heads and columns first: TMA fills and clips what lies beyond the last head
        tile_first = [2, 3, 1, 0]
        mQ_tile = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=tile_first))
        mOut_tile = cute.make_tensor(mOut.iterator, cute.select(mOut.layout, mode=tile_first))
        load_q, tQ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), mQ_tile, cute.select(layout_q, mode=[0, 1]), (HEADS_PER_CTA, QK)
        )
        store_out, tOut = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mOut_tile, cute.select(layout_out, mode=[0, 1]), (HEADS_PER_CTA, HALF)
        )
        divisors = tuple(cute.fast_divmod_create_divisor_v2(d) for d in (mKV.shape[1], head_blocks, num_splits, s_q))
        self.kernel(
            load_q, tQ, mKV, mIndex, mLength, mSink, store_out, tOut, mLse, mPartial, mPartialLse, mZero,
            softmax_scale * LOG2_E, num_splits, causal, divisors, layout_nope, layout_rope, layout_q, layout_out,
        ).launch(
            grid=[batch * s_q * num_splits * head_blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip
        if const_expr(self.spec.split):
            MergeKernel(self.spec.merge).launch(mPartial, mPartialLse, mSink, mOut, mLse, stream)

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndex: cute.Tensor,
        mLength: cute.Tensor,
        mSink: cute.Tensor,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        mZero: cute.Tensor,
        scale_log2: Float32,
        num_splits: Int32,
        causal: Int32,
        divisors: tuple,
        layout_nope: cute.ComposedLayout,
        layout_rope: cute.ComposedLayout,
        layout_q: cute.ComposedLayout,
        layout_out: cute.ComposedLayout,
    ):
        page_divisor, head_divisor, split_divisor, query_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # neighbouring CTAs read the same rows: the second one finds them in L2
        rest, head_block = divmod(block, head_divisor)
        rest, split_idx = divmod(rest, split_divisor)
        batch_idx, query_idx = divmod(rest, query_divisor)
        if const_expr(self.spec.sparse):
            limit = cutlass.min(mLength[batch_idx, query_idx], mIndex.shape[2])
        else:
            capacity = mIndex.shape[1] * mKV.shape[1]
            limit = mLength[batch_idx] - causal * (query_divisor.divisor - 1 - query_idx)
            limit = cutlass.min(limit, capacity)
        tiles = cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE)
        tiles_per_split = cute.ceil_div(tiles, num_splits)
        first_tile = split_idx * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)

        smem = SmemAllocator().allocate(_shared_storage(layout_nope, layout_rope, layout_q))
        q_full, full, empty = smem.q_full.ptr, smem.full.data_ptr(), smem.empty.data_ptr()
        verdicts = smem.verdict.get_tensor(cute.make_layout(THREADS // 32))
        if tidx == 0:
            cute.arch.mbarrier_init(q_full, 1)
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 4)
                cute.arch.mbarrier_init(empty + stage, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if count > 0:
                if const_expr(self.spec.sparse):
                    entries = mIndex[batch_idx, query_idx, None]
                else:
                    entries = mIndex[batch_idx, None]
                begin = first_tile * TOKENS_PER_TILE
                suspect = self.produce(
                    Float16, smem, mKV, mZero, entries, begin, limit, count, Int32(0), page_divisor, tidx
                )
                verdicts[warp_idx] = suspect
                cute.arch.barrier(barrier_id=BAR_VERDICT, number_of_threads=THREADS)
                if self.repeat(verdicts):
                    self.produce(BFloat16, smem, mKV, mZero, entries, begin, limit, count, count, page_divisor, tidx)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
            gQ = cute.local_tile(tQ, (HEADS_PER_CTA, QK), (head_block, 0, query_idx, batch_idx))
            tQsQ, tQgQ = cpasync.tma_partition(
                load_q, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2)
            )
            wg, tid = warp_idx // 4 - 1, tidx % 128
            mma_o = self.tiled_mmas(BFloat16)[2]
            acc_o = cute.make_rmem_tensor(mma_o.partition_shape_C((HEADS_PER_CTA, HALF)), Float32)
            row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            acc_o.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            if count > 0:
                if warp_idx == 4:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full, HEADS_PER_CTA * QK * 2)
                    cute.copy(load_q, tQgQ, tQsQ[None, 0], tma_bar_ptr=q_full)
                cute.arch.mbarrier_wait(q_full, 0)
                verdicts[warp_idx] = self.convert_q(smem, scale_log2, tidx - 128)
                self.attend(
                    Float16,
                    smem,
                    acc_o,
                    row_max,
                    row_sum,
                    scale_log2,
                    count,
                    Int32(0),
                    wg,
                    tid,
                    layout_nope,
                    layout_rope,
                    layout_q,
                )
                cute.arch.barrier(barrier_id=BAR_VERDICT, number_of_threads=THREADS)
                if self.repeat(verdicts):
                    cute.arch.fence_proxy(
                        "async.shared", space="cta"
                    )  # Q was rewritten by ordinary stores, TMA writes it again
                    cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=256)
                    if warp_idx == 4:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(q_full, HEADS_PER_CTA * QK * 2)
                        cute.copy(load_q, tQgQ, tQsQ[None, 0], tma_bar_ptr=q_full)
                    acc_o.fill(0.0)
                    row_max.fill(-Float32.inf)
                    row_sum.fill(0.0)
                    cute.arch.mbarrier_wait(q_full, 1)
                    self.attend(
                        BFloat16,
                        smem,
                        acc_o,
                        row_max,
                        row_sum,
                        scale_log2,
                        count,
                        count,
                        wg,
                        tid,
                        layout_nope,
                        layout_rope,
                        layout_q,
                    )
            self.epilogue(
                smem, acc_o, row_max, row_sum, store_out, tOut, mSink, mLse, mPartial, mPartialLse,
                head_block, split_idx, query_idx, batch_idx, wg, tid, layout_out,
            )  # fmt: skip

    @cute.jit
    def repeat(self, verdicts: cute.Tensor):
        """True if any warp found float16 operands wanting. Every thread calls it after BAR_VERDICT."""
        found = Int32(0)
        for w in cutlass.range_constexpr(THREADS // 32):
            found = found | verdicts[w]
        return found != 0

    @cute.jit
    def produce(
        self, operand: cutlass.Constexpr, smem, mKV: cute.Tensor, mZero: cute.Tensor, entries: cute.Tensor,
        begin: Int32, limit: Int32, count: Int32, turn: Int32, page_divisor, tidx: Int32,
    ):  # fmt: skip
        """Fills `count` stages, the first of which is the `turn`-th of this CTA. Returns 1 if float16 is not enough, else 0.

        The rows of the next DEPTH passes are always in flight: once a pass is converted, its registers receive the pass
        DEPTH further. Entries of the index or block table are read DEPTH passes before that.
        """
        lane, warp_idx = tidx % 32, tidx // 32
        quarter, odd_row, phase = lane % 4, lane // 4 % 2, lane // 8
        row, half = 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2
        segment, x = 64 * half + 16 * quarter, row % 8
        first = begin + row
        last = limit - 1

        block = TOKENS_PER_TILE * 64  # elements of a 64-column block
        in_nope = half * block + row * 64
        at_even = in_nope + ((2 * quarter) ^ x) * 8
        at_odd = in_nope + ((2 * quarter + 1) ^ x) * 8
        at_rope = row * 64 + ((4 * half + quarter) ^ x) * 8
        layout = cute.make_layout((8, 4, PASSES, STAGES), stride=(1, 2 * block, 16 * 64, TOKENS_PER_TILE * NOPE))
        layout_rope = cute.make_layout((8, PASSES, STAGES), stride=(1, 16 * 64, TOKENS_PER_TILE * ROPE))
        nope = cute.recast_ptr(smem.nope.data_ptr(), dtype=operand)
        sEven = cute.make_tensor(nope + cute.assume(at_even, divby=8), layout)
        sOdd = cute.make_tensor(nope + cute.assume(at_odd, divby=8), layout)
        sRope = cute.make_tensor(
            cute.recast_ptr(smem.rope.data_ptr(), dtype=operand) + cute.assume(at_rope, divby=8), layout_rope
        )
        sMask = cute.make_tensor(
            smem.mask.data_ptr() + row, cute.make_layout((PASSES, STAGES), stride=(16, TOKENS_PER_TILE))
        )
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()

        raw = cute.make_rmem_tensor((16, token_cache.PIECES, DEPTH), Uint8)
        valid = cute.make_rmem_tensor(DEPTH, Int32)
        entry = cute.make_rmem_tensor(DEPTH, Int32)
        for d in cutlass.range_constexpr(DEPTH):
            entry[d] = self.read_entry(entries, first + 16 * d, last, page_divisor)
        for d in cutlass.range_constexpr(DEPTH):
            valid[d], row_ahead = self.locate(mKV, mZero, entry[d], first + 16 * d, limit, page_divisor)
            token_cache.gather(row_ahead, segment, raw[None, None, d])
            entry[d] = self.read_entry(entries, first + 16 * (d + DEPTH), last, page_divisor)

        suspect = Int32(0)
        position = first + 16 * DEPTH  # of the pass to fetch next
        for t in cutlass.range(turn, turn + count, unroll=1):
            stage, use = t % STAGES, t // STAGES
            cute.arch.mbarrier_wait(empty + stage, (use + 1) % 2)
            for group in cutlass.range(PASSES // DEPTH, unroll=1):  # not unrolled: ptxas would hoist loads and spill
                for d in cutlass.range_constexpr(DEPTH):
                    p = group * DEPTH + d
                    if const_expr(operand is Float16):
                        suspect = suspect | (valid[d] & token_cache.exceeds_float16(raw[None, None, d]))
                    if lane % 4 == 0 and half == 0:
                        sMask[p, stage] = Float32(0.0) if valid[d] != 0 else -Float32.inf
                    valid[d], row_ahead = self.locate(mKV, mZero, entry[d], position, limit, page_divisor)
                    token_cache.dequantize_and_gather(
                        operand, raw[None, None, d], sEven[None, None, p, stage], sOdd[None, None, p, stage],
                        sRope[None, p, stage], row_ahead, segment,
                    )  # fmt: skip
                    entry[d] = self.read_entry(entries, position + 16 * DEPTH, last, page_divisor)
                    position += 16
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(full + stage)
        return Int32(1) if cute.arch.vote_any_sync(suspect != 0) else Int32(0)

    @cute.jit
    def read_entry(self, entries: cute.Tensor, position: Int32, last: Int32, page_divisor):
        """The index (sparse) or page number (dense) behind a position; beyond the last one, that of the last one again."""
        position = cutlass.min(position, last)
        if const_expr(not self.spec.sparse):
            position = position // page_divisor
        return entries[position]

    @cute.jit
    def locate(self, mKV: cute.Tensor, mZero: cute.Tensor, entry: Int32, position: Int32, limit: Int32, page_divisor):
        """(1, the address of the key's row), or (0, that of a row of zeros) where the position is masked."""
        bound = mKV.shape[0]
        if const_expr(self.spec.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(cutlass.max(entry, 0), bound - 1)  # a comparison less, and so a predicate, than two bounds
        valid = inside == entry and position < limit
        if const_expr(self.spec.sparse):
            page, offset = divmod(inside, page_divisor)
        else:
            page, offset = inside, position % page_divisor
        row = token_cache.row_pointer(mKV, mZero, valid, page, offset)
        return (Int32(1) if valid else Int32(0)), row

    def tiled_mmas(self, operand):
        """S = Q K^T; O += P V with P in registers; O += P V with P in shared memory."""
        k, mn = OperandMajorMode.K, OperandMajorMode.MN
        one = (1, 1, 1)
        return (
            sm90.make_trivial_tiled_mma(operand, operand, k, k, Float32, one, (HEADS_PER_CTA, TOKENS_PER_TILE)),
            sm90.make_trivial_tiled_mma(
                operand, operand, k, mn, Float32, one, (HEADS_PER_CTA, HALF), warpgroup.OperandSource.RMEM
            ),
            sm90.make_trivial_tiled_mma(
                operand, operand, k, mn, Float32, one, (HEADS_PER_CTA, HALF), warpgroup.OperandSource.SMEM
            ),
        )

    @cute.jit
    def convert_q(self, smem, scale_log2: Float32, tid: Int32):
        """bf16 Q to float16 in place, each row times a power of two. Four threads a row. Returns 1 if Q is too large for it."""
        row, quarter = tid // 4, tid % 4
        chunks = QK // 8 // 4
        offsets = [
            row * 64 + ((quarter + 4 * (i % 2)) ^ (row % 8)) * 8 + (i // 2) * (HEADS_PER_CTA * 64)
            for i in range(chunks)
        ]
        source, target = (cute.recast_ptr(smem.q.data_ptr(), dtype=t) for t in (BFloat16, Float16))
        values = cute.make_rmem_tensor((8, chunks), BFloat16)
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(chunks):
            cute.autovec_copy(self.eight(source, offsets[i]), values[None, i])
            x = values[None, i].load().to(Float32)
            for j in cutlass.range_constexpr(8):
                largest = cute.arch.fmax(largest, cute.arch.fmax(x[j], -x[j]))
        q_inverse = smem.q_inverse.get_tensor(cute.make_layout(HEADS_PER_CTA))
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
        factor, inverse = token_cache.normalized_exponents(largest)
        for i in cutlass.range_constexpr(chunks):
            out = cute.make_rmem_tensor((8,), Float16)
            out.store((values[None, i].load().to(Float32) * factor).to(Float16))
            cute.autovec_copy(out, self.eight(target, offsets[i]))
        if quarter == 0:
            q_inverse[row] = inverse
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=256)
        reach = largest * cute.arch.fmax(scale_log2, -scale_log2)
        return Int32(0) if cute.arch.vote_all_sync(reach <= Q_SCALE_MAX) else Int32(1)

    def eight(self, pointer: cute.Pointer, offset) -> cute.Tensor:
        """Eight elements at a multiple of eight."""
        return cute.make_tensor(pointer + cute.assume(offset, divby=8), cute.make_layout(8))

    @cute.jit
    def attend(
        self, operand: cutlass.Constexpr, smem, acc_o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
        scale_log2: Float32, count: Int32, turn: Int32, wg: Int32, tid: Int32,
        layout_nope: cute.ComposedLayout, layout_rope: cute.ComposedLayout, layout_q: cute.ComposedLayout,
    ):  # fmt: skip
        """Online softmax over `count` tiles. row_max is in units of log2 and common to both warpgroups, row_sum is this one's."""
        mma_qk, mma_rs, mma_ss = self.tiled_mmas(operand)
        thr_qk, thr_rs, thr_ss = mma_qk.get_slice(tid), mma_rs.get_slice(tid), mma_ss.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner, dtype=operand)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner, dtype=operand)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=operand)
        sV = cute.local_tile(wgmma.transposed(sNope), (HALF, TOKENS_PER_TILE), (wg, 0, None))
        sMax = smem.row_max.get_tensor(cute.make_layout((HEADS_PER_CTA, STAGES)))
        sMask = smem.mask.get_tensor(
            cute.make_layout((HEADS_PER_CTA, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
        )
        q_inverse = smem.q_inverse.get_tensor(cute.make_layout(HEADS_PER_CTA))
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()

        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))
        rNope = mma_qk.make_fragment_B(thr_qk.partition_B(sNope))
        rRope = mma_qk.make_fragment_B(thr_qk.partition_B(sRope))
        rV = mma_rs.make_fragment_B(thr_rs.partition_B(sV))
        rP = mma_rs.make_fragment_A(mma_rs.partition_shape_A((HEADS_PER_CTA, TOKENS_PER_TILE)))
        rP_smem = mma_ss.make_fragment_A(thr_ss.partition_A(sRope))  # P lies where the rope part was
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((HEADS_PER_CTA, TOKENS_PER_TILE)), Float32)
        s, o = wgmma.by_row(acc_s), wgmma.by_row(acc_o)
        cS = wgmma.by_row(thr_qk.partition_C(cute.make_identity_tensor((HEADS_PER_CTA, TOKENS_PER_TILE))))
        columns = cute.size(s, mode=[1])
        store_p = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), operand), mma_qk)
        thr_store = store_p.get_slice(tid)
        rows = [cS[r, 0][0] for r in range(2)]
        scale = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            scale[r] = scale_log2 * q_inverse[rows[r]] if const_expr(operand is Float16) else scale_log2
        lane = tid % 32
        new_max, alpha = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)

        for t in cutlass.range(count, unroll=1):
            stage, use = (turn + t) % STAGES, (turn + t) // STAGES
            cute.arch.mbarrier_wait(full + stage, use % 2)
            if stage == wg:
                warpgroup.fence()
                wgmma.issue(mma_qk, acc_s, rQ[None, None, None, 0], rNope[None, None, None, stage], False)
                wgmma.issue(mma_qk, acc_s, rQ[None, None, None, 0], rRope[None, None, None, stage], True, NOPE // 16)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)

                mask = wgmma.by_row(thr_qk.partition_C(sMask[None, None, stage]))
                for r in cutlass.range_constexpr(2):
                    new_max[r] = -Float32.inf
                    for c in cutlass.range_constexpr(columns):
                        s[r, c] = s[r, c] * scale[r] + mask[0, c]
                        new_max[r] = cute.arch.fmax(new_max[r], s[r, c])
                    new_max[r] = cute.arch.fmax(
                        row_max[r], cute.arch.warp_reduction_max(new_max[r], threads_in_group=4)
                    )
                    if lane % 4 == 0:
                        sMax[rows[r], stage] = new_max[r]
                    shift = self.finite(new_max[r]) - P_SHIFT
                    partial = Float32(0.0)
                    for c in cutlass.range_constexpr(columns):
                        s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                        partial += s[r, c]
                    alpha[r] = self.advance(row_max, row_sum, r, new_max[r])
                    row_sum[r] += partial  # this thread's columns only; lanes are added at the end
                rP.store(acc_s.load().to(operand).reshape(rP.shape))
                cute.copy(
                    store_p,
                    thr_store.retile(cute.make_tensor(rP.iterator, acc_s.layout)),
                    thr_store.partition_D(sRope[None, None, stage]),
                )
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier_arrive(barrier_id=BAR_P + wg, number_of_threads=256)
                self.rescale(o, alpha)
                warpgroup.fence()
                wgmma.issue(mma_rs, acc_o, rP, rV[None, None, None, stage], True)
            else:
                cute.arch.barrier(barrier_id=BAR_P + 1 - wg, number_of_threads=256)
                for r in cutlass.range_constexpr(2):
                    alpha[r] = self.advance(row_max, row_sum, r, sMax[rows[r], stage])
                self.rescale(o, alpha)
                warpgroup.fence()
                wgmma.issue(mma_ss, acc_o, rP_smem[None, None, None, stage], rV[None, None, None, stage], True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def finite(self, x: Float32) -> Float32:
        """x, or 0 where no key has been seen: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be NaN."""
        return cutlass.select_(x == -Float32.inf, Float32(0.0), x)

    @cute.jit
    def advance(self, row_max: cute.Tensor, row_sum: cute.Tensor, r: cutlass.Constexpr, new_max: Float32):
        """Moves row r to a new maximum; returns what O must be multiplied by."""
        alpha = cute.math.exp2(row_max[r] - self.finite(new_max), fastmath=True)
        row_max[r] = new_max
        row_sum[r] *= alpha
        return alpha

    @cute.jit
    def rescale(self, o: cute.Tensor, alpha: cute.Tensor):
        """O *= alpha by rows, skipped when no row of the warp has a new maximum."""
        if not cute.arch.vote_all_sync(alpha[0] == 1.0 and alpha[1] == 1.0):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    o[r, c] *= alpha[r]

    @cute.jit
    def epilogue(
        self, smem, acc_o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, store_out: cute.CopyAtom, tOut: cute.Tensor,
        mSink: cute.Tensor, mLse: cute.Tensor, mPartial, mPartialLse, head_block: Int32, split_idx: Int32, query_idx: Int32,
        batch_idx: Int32, wg: Int32, tid: Int32, layout_out: cute.ComposedLayout,
    ):  # fmt: skip
        """Adds up the row sums of both warpgroups, normalizes and stores O and the log-sum-exp."""
        mma = self.tiled_mmas(BFloat16)[1]
        thr_mma = mma.get_slice(tid)
        cO = wgmma.by_row(thr_mma.partition_C(cute.make_identity_tensor((HEADS_PER_CTA, HALF))))
        o = wgmma.by_row(acc_o)
        sSum = smem.row_sum.get_tensor(cute.make_layout((HEADS_PER_CTA, 2)))
        heads = mSink.shape[0] - head_block * HEADS_PER_CTA  # rows of this CTA that exist, or more
        writer = tid % 4 == 0
        for r in cutlass.range_constexpr(2):
            row_sum[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            if writer:
                sSum[cO[r, 0][0], wg] = row_sum[r]
        # also: nobody reads the stages any more, O may be staged there
        cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=256)
        for r in cutlass.range_constexpr(2):
            row = cO[r, 0][0]
            head = head_block * HEADS_PER_CTA + row
            total = sSum[row, 0] + sSum[row, 1]
            lse = (row_max[r] + cute.math.log2(total, fastmath=True) - P_SHIFT) * LN_2
            lse = cutlass.select_(total == 0.0, -Float32.inf, lse)
            denominator = total
            if row < heads:
                if const_expr(self.spec.split):
                    if writer and wg == 0:
                        mPartialLse[split_idx, batch_idx, query_idx, head] = lse
                else:
                    if writer and wg == 0:
                        mLse[batch_idx, query_idx, head] = lse
                    sink = mSink[head] * LOG2_E
                    denominator += cute.math.exp2(sink - self.finite(row_max[r]) + P_SHIFT, fastmath=True)
            inverse = 1.0 / denominator
            inverse = cutlass.select_(total == 0.0, Float32(0.0), inverse)
            for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                o[r, c] *= inverse

        if const_expr(self.spec.split):
            gO = cute.local_tile(
                mPartial[split_idx, batch_idx, query_idx, None, None], (HEADS_PER_CTA, HALF), (head_block, wg)
            )
            tOgO = wgmma.by_row(thr_mma.partition_C(gO))
            for r in cutlass.range_constexpr(2):
                if cO[r, 0][0] < heads:
                    cute.autovec_copy(o[r, None], tOgO[r, None])
        else:
            sO = smem.nope.get_tensor(layout_out.outer, swizzle=layout_out.inner)
            rO = cute.make_rmem_tensor(acc_o.shape, BFloat16)
            rO.store(acc_o.load().to(BFloat16))
            to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma)
            thr_copy = to_smem.get_slice(tid)
            cute.copy(to_smem, thr_copy.retile(rO), thr_copy.partition_D(sO[None, None, wg]))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
            gO = cute.local_tile(tOut, (HEADS_PER_CTA, HALF), (head_block, wg, query_idx, batch_idx))
            tOsO, tOgO = cpasync.tma_partition(
                store_out, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
            )
            if tid // 32 == 0:
                cute.copy(store_out, tOsO[None, wg], tOgO)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
