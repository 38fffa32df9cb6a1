"""FP8 MLA decoding on SM90: split-KV flash decoding of 64 query heads over 656-byte tokens.

One CTA serves 64 heads of one query token over a range of its keys, in tiles of 64 keys that alternate between two
shared-memory stages. Tile t belongs to consumer warpgroup t % 2, which computes S and P of the whole tile; each
warpgroup owns 256 of the 512 output columns (two quantization tiles), so both need P of every tile.

Scales. The scale of a (token, 128 columns) tile is split into a power of two and f in [1, 2). Shared memory holds
code x power as bf16, which is exact; f is a factor of a column of S and of P and is applied there in float32:
    S = q_rope k_rope + sum_j f_j (q_j k_j)      as a chain: S = ((S / f_0 + q_0 k_0) f_0 / f_1 + q_1 k_1) ... f_3
    O_j += (P f_j) k_j                           rounded to bf16 once, per quantization tile j
So scores are as exact as float32 sums are, whatever the scales, without a second accumulator.

Splits. Several CTAs may share the keys of a query. Each leaves a float32 partial in global memory and counts itself;
CTAs with higher numbers wait for the count and merge with the code of `merge_states`, in the same launch. They wait
only for CTAs that were started before them, so nobody waits in vain however few run at a time.

Roles (384 threads)
  warpgroup 0     producer, 104 registers: gathers rows into registers two passes (32 rows) ahead, stores them as bf16
  warpgroup 1, 2  consumers, 200 registers: 128 of O, 32 of S, 48 of P; warp 4 issues the TMA load of Q

Barriers                      arrivals per phase
  q_full                      1 + 73,728 bytes of TMA
  full[stage]                 128: producer threads, each after a proxy fence
  empty[stage]                256: consumer threads, after their last wgmma on the stage
  p_full[w]                   128: threads of w have written P and the row maxima of their tile, the other one may read
  sums_full                   256: all row sums are written, and nobody reads the stages any more
  named 1, 2  BAR_OWNER + w   128: all warps of w have finished QK, P may overwrite the rope block
  named 3  BAR_STORED         256: this CTA's partial is in global memory
All threads arrive, not one for a warp: it costs nothing measurable, and racecheck can follow it.

Shared memory (229,376 of 232,448 bytes)
  nope    2 x 64 x 512 x 2    131,072   codes as bf16, 128-byte swizzle; O is staged here at the end
  rope    2 x 64 x 64 x 2      16,384   P of a tile overwrites its rope block, which only its owner's QK reads
  q       64 x 576 x 2         73,728
  factor  2 x 8 x 64 x 4        4,096   quotients and f of each token's four scales
  rest                                  masks, maxima and sums of rows, barriers

P crosses from its owner to the other warpgroup as float16, each thread's own fragment: thread t of one warpgroup holds
the same rows and columns as thread t of the other. P is scaled by 2^8, so float16 keeps what is above 2^-33 of the
largest.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import softmax, token_cache, wgmma
from cute_kernels.merge.kernel import MergeKernel
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE, ROPE, STAGES, KeyProducer
from cute_kernels.mla.spec import HEADS_PER_CTA, TOKENS_PER_TILE, MlaDecodeSpec

QK = NOPE + ROPE
THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 104, 200  # 104 + 2 * 200 = 504 = 3 * 168, what 384 threads get at launch
BAR_OWNER, BAR_STORED = 1, 3
P_SHIFT = 8.0


def _layouts():
    """Shared memory: codes (64, 512, stages), rope (64, 64, stages), Q (64, 576, 1), staged O (64, 128, groups)."""
    row, tile = LayoutEnum.ROW_MAJOR, (HEADS_PER_CTA, TOKENS_PER_TILE)
    return (
        sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, STAGES),
        sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, STAGES),
        sm90.make_smem_layout_a(row, (*tile, QK), BFloat16, 1),
        sm90.make_smem_layout_epi(BFloat16, row, (HEADS_PER_CTA, GROUP), GROUPS),
    )


def _shared_storage():
    layout_nope, layout_rope, layout_q, _ = _layouts()

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        factor: cute.struct.MemRange[Float32, STAGES * 2 * GROUPS * TOKENS_PER_TILE]  # see `factors`
        mask: cute.struct.MemRange[Float32, STAGES * TOKENS_PER_TILE]  # 0 or -inf, added to the scores
        row_max: cute.struct.MemRange[Float32, STAGES * HEADS_PER_CTA]
        row_sum: cute.struct.MemRange[Float32, 2 * HEADS_PER_CTA]
        partial_sum: cute.struct.MemRange[Float32, 2 * 256]  # of each consumer thread's two rows
        q_full: Int64
        sums_full: Int64
        p_full: cute.struct.MemRange[Int64, 2]
        full: cute.struct.MemRange[Int64, STAGES]
        empty: cute.struct.MemRange[Int64, STAGES]

    return Shared


def _tiled_mmas():
    """S = Q K^T with both operands in shared memory; O += P V of one group with P in registers."""
    k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
    registers = warpgroup.OperandSource.RMEM
    return (
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, one, (HEADS_PER_CTA, TOKENS_PER_TILE)),
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, mn, Float32, one, (HEADS_PER_CTA, GROUP), registers),
    )


class MlaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: MlaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.producer = KeyProducer(spec.sparse)
        if spec.split:
            merge = MergeSpec(
                NOPE, "float32", "bfloat16", has_sink=True, has_lse=True, lanes=spec.merge_lanes, loads=16
            )
            self.merger = MergeKernel(merge)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        batch, s_q, h_q = (cute.sym_int() for _ in range(3))

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
        tensors = (q, kv, index, length, sink, out, lse)
        numbers = (Int64(0), Int64(0), Int64(0), Float32(1.0), Int32(1), Int32(1), Int32(1))
        return (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

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
        scratch: Int64,
        counters: Int64,
        zero_row: Int64,
        softmax_scale: Float32,
        num_splits: Int32,
        merge_ctas: Int32,
        causal: Int32,
        stream: cuda.CUstream,
    ):
        """One launch. Split specs have CTAs behind the others that merge what those leave in the scratch memory.

        Memory that no caller sees comes as addresses, which cost the host less than tensors. `scratch` has room for
        num_splits * batch * s_q * h_q rows of 512 float32, then as many log-sum-exps; `counters` has a word for each 64
        heads of each query, 0 before and after the launch; `zero_row` is 656 zeros. merge_ctas CTAs merge 64 heads.
        """
        batch, s_q, h_q, _ = mQ.shape
        mPartial = mPartialLse = None
        if const_expr(self.spec.split):
            shape, per_query, per_request = (num_splits, batch, s_q, h_q), Int64(h_q), Int64(h_q) * s_q
            rows = (per_request * batch, per_request, per_query, Int64(1))  # strides: a partial may exceed 2^31 values
            values = tuple(cute.assume(stride * NOPE, divby=NOPE) for stride in rows)
            end = cute.assume(rows[0] * num_splits * NOPE, divby=NOPE)
            first = cute.make_ptr(Float32, scratch, AddressSpace.gmem, assumed_align=16)
            mPartial = cute.make_tensor(first, cute.make_layout((*shape, NOPE), stride=(*values, 1)))
            mPartialLse = cute.make_tensor(first + end, cute.make_layout(shape, stride=rows))
        head_blocks = cute.ceil_div(h_q, HEADS_PER_CTA)
        _, _, layout_q, layout_out = _layouts()
        # heads and columns first: TMA fills and clips what lies beyond the last head
        mQ_tile, mOut_tile = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (mQ, mOut)
        )
        load_q, tQ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), mQ_tile, cute.select(layout_q, mode=[0, 1]), (HEADS_PER_CTA, QK)
        )
        store_out, tOut = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mOut_tile, cute.select(layout_out, mode=[0, 1]), (HEADS_PER_CTA, GROUP)
        )
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in sizes)
        groups = batch * s_q * head_blocks
        self.kernel(
            load_q, tQ, mKV, mIndex, mLength, mSink, store_out, tOut, mOut, mLse, mPartial, mPartialLse, counters,
            zero_row, softmax_scale * softmax.LOG2_E, num_splits, groups * num_splits, causal, divisors,
        ).launch(
            grid=[groups * num_splits + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

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
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        counters: Int64,
        zero_row: Int64,
        scale_log2: Float32,
        num_splits: Int32,
        decode_ctas: Int32,
        causal: Int32,
        divisors: tuple,
    ):
        page_divisor, head_divisor, split_divisor, query_divisor, merge_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        item = block
        if const_expr(self.spec.split):
            item = cutlass.min(block, decode_ctas - 1)  # the CTAs behind merge, and read no length of their own
        # neighbouring CTAs read the same rows: the second one finds them in L2
        rest, head_block = divmod(item, head_divisor)
        rest, split_idx = divmod(rest, split_divisor)
        batch_idx, query_idx = divmod(rest, query_divisor)
        work = (head_block, split_idx, query_idx, batch_idx)
        if const_expr(self.spec.sparse):
            limit = cutlass.min(mLength[batch_idx, query_idx], mIndex.shape[2])
        else:
            limit = mLength[batch_idx] - causal * (query_divisor.divisor - 1 - query_idx)
            limit = cutlass.min(limit, mIndex.shape[1] * mKV.shape[1])
        tiles = cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE)
        tiles_per_split = cute.ceil_div(tiles, num_splits)
        first_tile = split_idx * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)

        smem = SmemAllocator().allocate(_shared_storage())
        if tidx == 0:
            cute.arch.mbarrier_init(smem.q_full.ptr, 1)
            cute.arch.mbarrier_init(smem.sums_full.ptr, 256)
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(smem.p_full.data_ptr() + i, 128)
                cute.arch.mbarrier_init(smem.full.data_ptr() + i, 128)
                cute.arch.mbarrier_init(smem.empty.data_ptr() + i, 256)
        if tidx < HEADS_PER_CTA:  # the maxima before tile 0
            sMax = smem.row_max.get_tensor(cute.make_layout((HEADS_PER_CTA, STAGES)))
            sMax[tidx, STAGES - 1] = -Float32.inf
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        merges = False
        if const_expr(self.spec.split):
            merges = block >= decode_ctas
        if merges:
            if const_expr(self.spec.split):
                group, part = divmod(block - decode_ctas, merge_divisor)
                rest, head_block = divmod(group, head_divisor)
                batch_idx, query_idx = divmod(rest, query_divisor)
                place = (batch_idx, query_idx, head_block)
                counter = self.counter(counters, group)
                merge_ctas = merge_divisor.divisor
                self.merge(smem, mPartial, mPartialLse, mSink, mOut, mLse, counter, place, part, merge_ctas, num_splits)
        elif warp_idx < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if count > 0:
                if const_expr(self.spec.sparse):
                    entries = mIndex[batch_idx, query_idx, None]
                else:
                    entries = mIndex[batch_idx, None]
                self.producer.fill(
                    smem, mKV, zero_row, entries, first_tile * TOKENS_PER_TILE, limit, count, page_divisor, tidx
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            wg, tid = warp_idx // 4 - 1, tidx % 128
            _, mma_pv = _tiled_mmas()
            shape = mma_pv.partition_shape_C((HEADS_PER_CTA, GROUP))
            acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
            for half in cutlass.range_constexpr(2):
                acc_o[half].fill(0.0)
            sSum, _ = self.row_state(smem, wg, tid)
            sSum.fill(0.0)
            if count > 0:
                if warp_idx == 4:
                    self.load_q(smem, load_q, tQ, work)
                cute.arch.mbarrier_wait(smem.q_full.ptr, 0)
                self.attend(smem, acc_o, scale_log2, count, wg, tid)
            row_max, row_sum = self.finish_rows(smem, count, wg, tid)
            if const_expr(self.spec.split):
                self.store_partial(acc_o, row_max, row_sum, mSink, mPartial, mPartialLse, work, wg, tid)
                cute.arch.barrier(barrier_id=BAR_STORED, number_of_threads=256)
                if tidx == 128:
                    group = (batch_idx * query_divisor.divisor + query_idx) * head_divisor.divisor + head_block
                    cute.arch.atomic_add(self.counter(counters, group), Int32(1), sem="acq_rel", scope="gpu")
            else:
                self.store(smem, acc_o, row_max, row_sum, mSink, store_out, tOut, mLse, work, wg, tid)

    def counter(self, counters: Int64, group: Int32) -> cute.Pointer:
        """The counter of 64 heads of a query: how many of its splits are in global memory, then of its merges."""
        return cute.make_ptr(Int32, counters + 4 * Int64(group), AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def merge(
        self,
        smem,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        counter: cute.Pointer,
        place,
        part: Int32,
        merge_ctas: Int32,
        num_splits: Int32,
    ):
        """Merges one of `merge_ctas` parts of the 64 heads at `place`, merge_lanes threads a row.

        Waits for the CTAs that decode these heads. They have lower numbers, so they have been started before this one
        and need nothing from it. The last of the parts leaves the counter at 0 for the next launch.
        """
        batch_idx, query_idx, head_block = place
        tidx, _, _ = cute.arch.thread_idx()
        lanes, rows = self.spec.merge_lanes, THREADS // self.spec.merge_lanes
        row_in_cta = tidx // lanes
        if tidx == 0:
            while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < num_splits:
                pass
        cute.arch.sync_threads()
        heads = cutlass.min(mSink.shape[0] - head_block * HEADS_PER_CTA, HEADS_PER_CTA)
        for first in cutlass.range(part * rows, heads, merge_ctas * rows, unroll=1):
            valid = first + row_in_cta < heads
            head = head_block * HEADS_PER_CTA + cutlass.min(first + row_in_cta, heads - 1)
            self.merger.merge_row(
                mPartial,
                mPartialLse,
                mSink,
                mOut,
                mLse,
                cute.recast_ptr(smem.nope.data_ptr(), dtype=Float32),
                None,
                (batch_idx, query_idx, head),
                valid,
                tidx % lanes,
                row_in_cta,
            )
        if tidx == 0:
            done = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu") + 1
            if done == num_splits + merge_ctas:
                cute.arch.store(counter, Int32(0))

    @cute.jit
    def load_q(self, smem, load_q: cute.CopyAtom, tQ: cute.Tensor, work):
        """Starts the load of this CTA's 64 rows of Q. Called by one warp."""
        head_block, _, query_idx, batch_idx = work
        _, _, layout_q, _ = _layouts()
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        gQ = cute.local_tile(tQ, (HEADS_PER_CTA, QK), (head_block, 0, query_idx, batch_idx))
        tQsQ, tQgQ = cpasync.tma_partition(
            load_q, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full.ptr, HEADS_PER_CTA * QK * 2)
        cute.copy(load_q, tQgQ, tQsQ[None, 0], tma_bar_ptr=smem.q_full.ptr)

    @cute.jit
    def attend(
        self,
        smem,
        acc_o,
        scale_log2: Float32,
        count: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Online softmax over `count` tiles.

        The running maxima (units of log2, common to both warpgroups) and sums (of this one's tiles) live in shared
        memory: 192 accumulators leave no register for what is touched once a tile.
        """
        layout_nope, layout_rope, layout_q, _ = _layouts()
        mma_qk, mma_pv = _tiled_mmas()
        thr_qk, thr_pv = mma_qk.get_slice(tid), mma_pv.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sSum, sMax = self.row_state(smem, wg, tid)
        of_columns = cute.make_layout((HEADS_PER_CTA, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
        sMask = smem.mask.get_tensor(of_columns)
        # the fragment that a thread hands to its counterpart, as four 16-byte pieces over the rope block
        sP = cute.make_tensor(
            cute.recast_ptr(smem.rope.data_ptr(), dtype=Float16) + cute.assume(tid * 8, divby=8),
            cute.make_layout((8, 4, STAGES), stride=(1, 128 * 8, TOKENS_PER_TILE * ROPE)),
        )
        full, empty, p_full = smem.full.data_ptr(), smem.empty.data_ptr(), smem.p_full.data_ptr()

        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]
        rNope = mma_qk.make_fragment_B(thr_qk.partition_B(sNope))
        rRope = mma_qk.make_fragment_B(thr_qk.partition_B(sRope))
        sV = cute.local_tile(wgmma.transposed(sNope), (GROUP, TOKENS_PER_TILE), (None, 0, None))
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        rP = cute.make_rmem_tensor((8, 4), Float16)
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((HEADS_PER_CTA, TOKENS_PER_TILE)), Float32)
        s = wgmma.by_row(acc_s)
        columns = cute.size(s, mode=[1])
        alpha = cute.make_rmem_tensor(2, Float32)

        for t in cutlass.range(count, unroll=1):
            stage, use = t % STAGES, t // STAGES
            cute.arch.mbarrier_wait(full + stage, use % 2)
            if stage == wg:
                quotient, f = self.factors(smem, thr_qk, stage)
                of_rope = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
                warpgroup.fence()
                wgmma.issue(mma_qk, acc_s, rQ, rRope[None, None, None, stage], False, of_rope)
                for j in cutlass.range_constexpr(GROUPS):
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    by_column = wgmma.by_row(quotient[None, None, None, j])
                    for c in cutlass.range_constexpr(columns):
                        for r in cutlass.range_constexpr(2):
                            s[r, c] *= by_column[0, c]
                    of_group = [(GROUP // 16 * j + k, GROUP // 16 * j + k) for k in range(GROUP // 16)]
                    warpgroup.fence()
                    wgmma.issue(mma_qk, acc_s, rQ, rNope[None, None, None, stage], True, of_group)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)

                mask = wgmma.by_row(thr_qk.partition_C(sMask[None, None, stage]))
                last = wgmma.by_row(f[None, None, None, GROUPS - 1])
                for r in cutlass.range_constexpr(2):
                    new_max = sMax[r, 1 - stage]
                    for c in cutlass.range_constexpr(columns):
                        s[r, c] = s[r, c] * (last[0, c] * scale_log2) + mask[0, c]
                        new_max = cute.arch.fmax(new_max, s[r, c])
                    new_max = cute.arch.warp_reduction_max(new_max, threads_in_group=4)
                    alpha[r] = softmax.rescaling(sMax[r, 1 - stage], new_max)
                    shift = softmax.finite(new_max) - P_SHIFT
                    partial = Float32(0.0)
                    for c in cutlass.range_constexpr(columns):
                        s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                        partial += s[r, c]
                    sSum[r] = sSum[r] * alpha[r] + partial  # this thread's columns only; lanes are added at the end
                    if tid % 4 == 0:
                        sMax[r, stage] = new_max
                rP.store(acc_s.load().to(Float16).reshape(rP.shape))
                cute.autovec_copy(rP, sP[None, None, stage])
                cute.arch.mbarrier_arrive(p_full + wg)
            else:
                cute.arch.mbarrier_wait(p_full + 1 - wg, use % 2)
                cute.autovec_copy(sP[None, None, stage], rP)
                for r in cutlass.range_constexpr(2):
                    alpha[r] = softmax.rescaling(sMax[r, 1 - stage], sMax[r, stage])
                    sSum[r] *= alpha[r]

            softmax.rescale(acc_o, alpha)
            _, f_of_tile = self.factors(smem, thr_qk, stage)
            for half in cutlass.range_constexpr(2):
                by_column = wgmma.by_row(f_of_tile[None, None, None, 2 * wg + half])
                acc_s.store(rP.load().to(Float32).reshape(acc_s.shape))
                for c in cutlass.range_constexpr(columns):
                    for r in cutlass.range_constexpr(2):
                        s[r, c] *= by_column[0, c]
                operand = mma_pv.make_fragment_A(mma_pv.partition_shape_A((HEADS_PER_CTA, TOKENS_PER_TILE)))
                operand.store(acc_s.load().to(BFloat16).reshape(operand.shape))
                warpgroup.fence()
                values = rV[None, None, None, 2 * wg + half, stage]
                all_keys = [(k, k) for k in range(TOKENS_PER_TILE // 16)]
                wgmma.issue(mma_pv, acc_o[half], operand, values, True, all_keys)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def factors(self, smem, thr_qk, stage: Int32):
        """f_(j-1) / f_j and f_j of the columns of this thread's fragment of S, each (fragment, GROUPS)."""
        layout = cute.make_layout((HEADS_PER_CTA, TOKENS_PER_TILE, GROUPS), stride=(0, 1, TOKENS_PER_TILE))
        per_stage = 2 * GROUPS * TOKENS_PER_TILE
        first = smem.factor.data_ptr() + cute.assume(stage * per_stage, divby=per_stage)
        quotient, f = (cute.make_tensor(first + i * GROUPS * TOKENS_PER_TILE, layout) for i in range(2))
        return thr_qk.partition_C(quotient), thr_qk.partition_C(f)

    def row_state(self, smem, wg: Int32, tid: Int32):
        """This thread's sums of its two rows (2), and their running maxima after the tile in a stage (2, stages)."""
        sums = smem.partial_sum.data_ptr() + cute.assume((wg * 128 + tid) * 2, divby=2)
        maxima = cute.make_layout((2, STAGES), stride=(8, HEADS_PER_CTA))
        return (
            cute.make_tensor(sums, cute.make_layout(2)),
            cute.make_tensor(smem.row_max.data_ptr() + wgmma.row(tid, 0), maxima),
        )

    @cute.jit
    def finish_rows(self, smem, count: Int32, wg: Int32, tid: Int32):
        """Final maxima and complete sums of this thread's rows: over the four lanes of a row and both warpgroups.

        Afterwards nobody reads the stages any more, so O may be staged there.
        """
        partial, sMax = self.row_state(smem, wg, tid)
        sSum = smem.row_sum.get_tensor(cute.make_layout((HEADS_PER_CTA, 2)))
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(partial[r], threads_in_group=4)
            if tid % 4 == 0:
                sSum[wgmma.row(tid, r), wg] = total
        cute.arch.mbarrier_arrive(smem.sums_full.ptr)
        cute.arch.mbarrier_wait(smem.sums_full.ptr, 0)
        for r in cutlass.range_constexpr(2):
            row_max[r] = sMax[r, (count + STAGES - 1) % STAGES]
            row_sum[r] = sSum[wgmma.row(tid, r), 0] + sSum[wgmma.row(tid, r), 1]
        return row_max, row_sum

    @cute.jit
    def store(
        self,
        smem,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mLse: cute.Tensor,
        work,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O, sink included, and stores it as bf16 by TMA; stores the log-sum-exp."""
        head_block, _, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
            head = head_block * HEADS_PER_CTA + wgmma.row(tid, r)
            if head < mSink.shape[0]:
                sink = mSink[head] * softmax.LOG2_E
                denominator[r] += cute.math.exp2(sink - softmax.finite(row_max[r]) + P_SHIFT, fastmath=True)
                if wg == 0 and tid % 4 == 0:
                    mLse[batch_idx, query_idx, head] = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
        softmax.normalize(acc_o, row_sum, denominator)

        _, _, _, layout_out = _layouts()
        _, mma_pv = _tiled_mmas()
        sO = smem.nope.get_tensor(layout_out.outer, swizzle=layout_out.inner)
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma_pv)
        thr_copy = to_smem.get_slice(tid)
        for half in cutlass.range_constexpr(2):
            rO = cute.make_rmem_tensor(acc_o[half].shape, BFloat16)
            rO.store(acc_o[half].load().to(BFloat16))
            cute.copy(to_smem, thr_copy.retile(rO), thr_copy.partition_D(sO[None, None, 2 * wg + half]))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
        gO = cute.local_tile(tOut, (HEADS_PER_CTA, GROUP), (head_block, None, query_idx, batch_idx))
        tOsO, tOgO = cpasync.tma_partition(
            store_out, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        if tid // 32 == 0:
            for half in cutlass.range_constexpr(2):
                cute.copy(store_out, tOsO[None, 2 * wg + half], tOgO[None, 2 * wg + half])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_partial(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        work,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O without the sink and stores it as float32, with its log-sum-exp, for the merge."""
        head_block, split_idx, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
        softmax.normalize(acc_o, row_sum, denominator)
        thr_pv = _tiled_mmas()[1].get_slice(tid)
        gO = cute.local_tile(
            mPartial[split_idx, batch_idx, query_idx, None, None], (HEADS_PER_CTA, GROUP), (head_block, None)
        )
        for r in cutlass.range_constexpr(2):
            head = head_block * HEADS_PER_CTA + wgmma.row(tid, r)
            if head < mSink.shape[0]:
                if wg == 0 and tid % 4 == 0:
                    lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                    mPartialLse[split_idx, batch_idx, query_idx, head] = lse
                for half in cutlass.range_constexpr(2):
                    target = wgmma.by_row(thr_pv.partition_C(gO[None, None, 2 * wg + half]))
                    cute.autovec_copy(wgmma.by_row(acc_o[half])[r, None], target[r, None])
