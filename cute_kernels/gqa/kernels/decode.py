"""GQA decoding on SM90 over a cache of int8, e4m3 or 16-bit numbers: persistent split-KV flash decoding.

A CTA decodes the query rows (tokens x heads) of one KV head over a range of the work list (scheduler.py), in tiles of
128 keys. Keys are rows of the matrix products, query rows their columns: S^T = K Q^T, O^T = V^T P^T with mma.sync
m16n8k16, so that 8 query rows fill an instruction, and a byte of K or V is widened in the registers of the one warp
that uses it (device/operands.py). Each consumer warp has 16 keys of every tile, its own maxima, sums and accumulators:
warps meet only where a sequence ends.

Scales of whole heads join the softmax scale and the result. Those of tokens multiply S, and P before it is rounded;
those of groups multiply partial sums of S, and P once a group. So dequantization costs a few instructions a key.

Q is scaled by a power of two per row, so that float16 holds it whatever its size; S is scaled back in float32.

Roles (384 threads; 160 without warps 9..11 and with tiles of 64 keys where a token has 512 bytes)
  warp 0..7   consumers, 200 registers: 16 keys of each tile (attend.py), then the results (epilogue.py)
  warp 8      producer, 104 registers: TMA copies of K and V, `stages` tiles ahead (load.py)
  warp 9, 10  scales of tokens, of K and of V, where there are any (scales.py); warp 11 has nothing to do

Barriers         arrivals per phase
  full[stage]    1 + the bytes of a tile of K and of V by TMA, + 32 for each scale warp
  empty[stage]   256: consumer threads, when they have K and V in registers
  named 1        256: consumers, where Q and where the warps' results change hands

Shared memory (d 128, int8, 8 columns, scales of tokens: 4 stages, 176 KB)
  tiles   stages x 2 x 128 x d x itemsize  rows of 128 bytes (or 64), swizzled; pages of paged_vllm as they are
  scales  stages x 128 x scales of a token x 4; bits of existing pages, a word or more for each stage
  q       columns x d x 2                  as fragments of B: a lane's 16 bytes of two k steps lie together
  sums    warps x columns x (d + 4) x 4    O of each warp
  stats   2 x warps x columns x 4;  facts 2 x 3 x columns x 4

A sequence that several CTAs share is merged by the last of them: each writes O, maximum and sum in float32, counts
itself, and whoever sees the full count adds them up in order. Nobody waits, and the order of additions is fixed. Short
sequences of small batches are shared by a cluster of eight instead, whose CTAs read each other's shared memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.gqa.kernels import scheduler
from cute_kernels.gqa.kernels.attend import FACTS, TileConsumer
from cute_kernels.gqa.kernels.epilogue import Finisher
from cute_kernels.gqa.kernels.load import TileProducer, box_shape, partition, tile_layout
from cute_kernels.gqa.kernels.scales import ScaleProducer
from cute_kernels.gqa.spec import GqaDecodeSpec

DTYPES = {"int8": Int8, "float8_e4m3fn": Float8E4M3FN, "bfloat16": BFloat16, "float16": Float16, "float32": Float32}
BAR_CONSUMERS = 1
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 104, 200  # 104 + 2 * 200 = 504 = 3 * 168, what 384 threads get at launch


class GqaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: GqaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = DTYPES[spec.kv_dtype]
        self.consumers = 32 * spec.warps
        # eight consumer warps can take registers from a producer warpgroup
        self.threads = self.consumers + (128 if spec.warps == 8 else 32)
        self.producer = TileProducer(spec)
        self.scaler = ScaleProducer(spec)
        self.consumer = TileConsumer(spec)
        self.finisher = Finisher(spec)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        batch, s_q, h_q, h_kv, outer, rows = (cute.sym_int() for _ in range(6))
        q_dtype = DTYPES[spec.q_dtype]

        def strided(dtype, shape, align):
            strides = [cute.sym_int64(divisibility=align // (dtype.width // 8)) for _ in shape[:-1]]
            return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

        q = strided(q_dtype, (batch, s_q, h_q, spec.d), 8)
        out = strided(q_dtype, (batch, s_q, h_q, spec.d), 8)
        lse = make_fake_tensor(Float32, (batch, s_q, h_q), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
        if spec.packed:
            x, page = 16 // spec.itemsize, spec.box_rows
            lead = [cute.sym_int64(divisibility=x) for _ in range(4)]
            k = make_fake_tensor(
                self.dtype, (outer, h_kv, spec.d // x, page, x), (*lead[:2], page * x, x, 1), assumed_align=16
            )
            v = make_fake_tensor(self.dtype, (outer, h_kv, spec.d, page), (*lead[2:], page, 1), assumed_align=16)
        else:
            size = {"o": outer, "r": rows, "h": h_kv, "d": spec.d}
            shape = tuple(size[axis] for axis in spec.cache_axes)
            k, v = strided(self.dtype, shape, 16), strided(self.dtype, shape, 16)
        table = strided(Int32, (batch, cute.sym_int()), 4) if spec.paged else None
        lengths = make_fake_tensor(Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        scales = [Int64(0)] * 10
        alibi = [Int64(0)] * 2
        numbers = (Float32(1.0), Float32(1.0), *[Int32(1)] * 5, Int64(0), Int64(0))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return (q, k, v, table, lengths, sink, out, lse, *scales, *alibi, *numbers, stream)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mTable: cute.Tensor | None,
        mLengths: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        k_scale: Int64,
        k_scale_outer: Int64,
        k_scale_head: Int64,
        k_scale_row: Int64,
        k_scale_group: Int64,
        v_scale: Int64,
        v_scale_outer: Int64,
        v_scale_head: Int64,
        v_scale_row: Int64,
        v_scale_group: Int64,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        window: Int32,
        causal: Int32,
        ranges: Int32,
        splits: Int32,
        ctas: Int32,
        scratch: Int64,
        counters: Int64,
        stream: cuda.CUstream,
    ):
        """One launch of `ctas` CTAs.

        Scales, slopes and what no caller sees come as addresses, which cost the host less than tensors; the strides of
        scales (outer, head, row, group) and of slopes are in elements. `window` is below 2^30. The work list is cut
        into `ranges`, or each sequence into `splits` where that is not 0. `scratch` has room for 2 x ranges x heads of
        the cache x blocks of columns (or splits x batch instead of ranges) states of columns x (d + 2) float32;
        `counters` has a word for each sequence, head of the cache and block of columns, 0 before and after.
        """
        spec = self.spec
        batch, s_q, h_q, _ = mQ.shape
        h_kv = mK.shape[spec.cache_axes.index("h")]
        ratio = h_q // h_kv
        blocks = cute.ceil_div(ratio * s_q, spec.columns)
        tiles = []
        for t in (mK, mV):
            if const_expr(spec.packed):
                rows, columns = box_shape(spec)
                strides = (columns, 1, t.stride[1], t.stride[0])
                view = cute.make_layout((rows, columns, t.shape[1], t.shape[0]), stride=strides)
            else:
                view = cute.select(t.layout, mode=[spec.cache_axes.index(axis) for axis in "rdho"])
            tiles.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    cute.make_tensor(t.iterator, view),
                    tile_layout(spec),
                    box_shape(spec),
                )
            )
        (load_k, tK), (load_v, tV) = tiles
        page_size = Int32(spec.box_rows)
        capacity = Int32(mK.shape[spec.cache_axes.index("r")])
        num_pages = Int32(mK.shape[spec.cache_axes.index("o")])
        if const_expr(spec.paged):
            if const_expr(spec.box_rows == spec.keys_per_tile):
                page_size = capacity
            assert mTable is not None
            capacity = page_size * Int32(mTable.shape[1])
        heads = h_kv * blocks
        units = heads * ranges
        if splits > 0:
            units = heads * splits * batch
        if const_expr(spec.cluster > 1):
            units = heads * spec.cluster * batch
        divisors = tuple(
            cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (heads, blocks, ratio, ranges, cutlass.max(splits, 1))
        )
        k_strides = (k_scale_outer, k_scale_head, k_scale_row, k_scale_group)
        v_strides = (v_scale_outer, v_scale_head, v_scale_row, v_scale_group)
        self.kernel(
            load_k, tK, load_v, tV, mQ, mTable, mLengths, mSink, mOut, mLse, k_scale, k_strides, v_scale, v_strides,
            alibi, alibi_batch, softmax_scale, softcap, (capacity, window, Int32(s_q)), causal, page_size, num_pages,
            ranges, splits, units, scratch, counters, divisors,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[spec.cluster, 1, 1] if const_expr(spec.cluster > 1) else None,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        load_k: cute.CopyAtom,
        tK: cute.Tensor,
        load_v: cute.CopyAtom,
        tV: cute.Tensor,
        mQ: cute.Tensor,
        mTable: cute.Tensor | None,
        mLengths: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        k_scale: Int64,
        k_strides: tuple,
        v_scale: Int64,
        v_strides: tuple,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        limits: tuple,
        causal: Int32,
        page_size: Int32,
        num_pages: Int32,
        ranges: Int32,
        splits: Int32,
        units: Int32,
        scratch: Int64,
        counters: Int64,
        divisors: tuple,
    ):
        spec = self.spec
        head_divisor, block_divisor, ratio_divisor, range_divisor, split_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tidx % 32
        if warp_idx == spec.warps:
            cpasync.prefetch_descriptor(load_k)
            cpasync.prefetch_descriptor(load_v)

        smem = SmemAllocator()
        tiles = smem.allocate_array(self.dtype, 2 * spec.stages * spec.tile_bytes // spec.itemsize, byte_alignment=1024)
        sQ = smem.allocate_array(DTYPES[spec.k_operand], spec.columns * spec.d, byte_alignment=16)
        sums = smem.allocate_array(Float32, spec.warps * spec.columns * spec.sums_stride, byte_alignment=16)
        stats = smem.allocate_array(Float32, 2 * spec.warps * spec.columns, byte_alignment=16)
        facts = smem.allocate_array(Float32, 2 * FACTS * spec.columns, byte_alignment=16)
        scales = smem.allocate_array(Float32, max(spec.stages * spec.scale_values, 1), byte_alignment=16)
        valid = smem.allocate_array(Int32, spec.stages * spec.valid_words, byte_alignment=4)
        barriers = smem.allocate_array(Int64, 2 * spec.stages, byte_alignment=8)
        arrived = smem.allocate_array(Int32, 1, byte_alignment=4)
        full, empty = barriers, barriers + spec.stages
        if tidx == 0:
            for i in cutlass.range_constexpr(spec.stages):
                cute.arch.mbarrier_init(full + i, 1 + 32 * spec.scale_warps)
                cute.arch.mbarrier_init(empty + i, self.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, lengths, new tokens, the counters

        limits = (*limits, spec.keys_per_tile)
        cut = (ranges, splits, range_divisor, split_divisor)
        page_shift = 31 - Int32(cute.arch.clz(page_size)) if const_expr(spec.paged) else Int32(0)

        if warp_idx >= spec.warps:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == spec.warps:
                self.copy_tiles(
                    load_k, tK, load_v, tV, mTable, mLengths, tiles, valid, full, empty, units, cut,
                    limits, page_shift, num_pages, head_divisor, block_divisor, lane,
                )  # fmt: skip
            elif warp_idx <= spec.warps + spec.scale_warps:
                if const_expr(spec.scale_warps > 0):
                    self.copy_scales(
                        mTable, mLengths, k_scale, k_strides, v_scale, v_strides, scales, full, empty, units, cut,
                        limits, page_shift, page_size, num_pages, head_divisor, block_divisor, warp_idx, lane,
                    )  # fmt: skip
        else:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.decode(
                mQ, mLengths, mSink, mOut, mLse, k_scale, k_strides, v_scale, v_strides, alibi, alibi_batch,
                softmax_scale, softcap, limits, causal, units, scratch, counters, divisors, cut, tiles,
                sQ, sums, stats, facts, scales, valid, full, empty, arrived, warp_idx, lane,
            )  # fmt: skip

    @cute.jit
    def copy_tiles(
        self,
        load_k: cute.CopyAtom,
        tK: cute.Tensor,
        load_v: cute.CopyAtom,
        tV: cute.Tensor,
        mTable,
        mLengths: cute.Tensor,
        tiles: cute.Pointer,
        valid: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        units: Int32,
        cut: tuple,
        limits: tuple,
        page_shift: Int32,
        num_pages: Int32,
        head_divisor,
        block_divisor,
        lane: Int32,
    ):
        """The producer warp: tiles of all units of this CTA, in order."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        known = self.survey(mLengths, limits, lane)
        gK, sK = partition(spec, load_k, tK, tiles, self.dtype)
        gV, sV = partition(spec, load_v, tV, tiles + spec.tile_bytes // spec.itemsize, self.dtype)
        pages = cute.make_rmem_tensor(self.producer.entries, Int32)
        pages_next = cute.make_rmem_tensor(self.producer.entries, Int32)
        exists = cute.make_rmem_tensor(self.producer.entries, Int32)
        batch_of_pages = const_expr(self.producer.batch)
        sValid = cute.make_tensor(valid, cute.make_layout((spec.valid_words, spec.stages)))
        stage, phase = Int32(0), Int32(0)
        for unit in cutlass.range(cta, units, ctas, unroll=1):
            kv_head, _, head, r = self.unit_of(unit, head_divisor, block_divisor)
            if const_expr(spec.cluster > 1 and spec.paged):
                self.producer.prefetch_pages(mTable, r // spec.cluster, lane)
            b, offset, left, _ = self.assignment(mLengths, limits, known, r, cut)
            while left > 0:
                length, first, count = scheduler.extent(mLengths, b, limits)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                if length > 0:
                    slot = Int32(0)
                    if const_expr(spec.paged):
                        self.producer.read_pages(pages_next, mTable, b, first + offset, length, page_shift, lane)
                    for tile in cutlass.range(first + offset, first + stop, unroll=1):
                        if const_expr(spec.paged):
                            if slot == 0:
                                for e in cutlass.range_constexpr(self.producer.entries):
                                    pages[e] = pages_next[e]
                                    inside = cutlass.min(cutlass.max(pages[e], 0), num_pages - 1)
                                    exists[e] = cute.arch.vote_ballot_sync(inside == pages[e])
                                ahead = tile + batch_of_pages
                                self.producer.read_pages(pages_next, mTable, b, ahead, length, page_shift, lane)
                        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            if const_expr(spec.paged):
                                for e in cutlass.range_constexpr(self.producer.entries):
                                    sValid[e, stage] = exists[e] >> (slot * self.producer.boxes % 32)
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, spec.copied_bytes)
                        self.producer.fill_tile(
                            load_k, load_v, (gK, gV), (sK, sV), full, stage, kv_head, b, tile, slot, pages, page_shift
                        )
                        slot = cutlass.select_(slot + 1 == batch_of_pages, Int32(0), slot + 1)
                        phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                        stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                offset = Int32(0)
                b += 1

    @cute.jit
    def copy_scales(
        self,
        mTable,
        mLengths: cute.Tensor,
        k_scale: Int64,
        k_strides: tuple,
        v_scale: Int64,
        v_strides: tuple,
        scales: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        units: Int32,
        cut: tuple,
        limits: tuple,
        page_shift: Int32,
        page_size: Int32,
        num_pages: Int32,
        head_divisor,
        block_divisor,
        warp_idx: Int32,
        lane: Int32,
    ):
        """A scale warp: the scales of K, or those of V, of all tiles of this CTA."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        known = self.survey(mLengths, limits, lane)
        of_v = warp_idx > spec.warps + const_expr(1 if spec.scale_groups(spec.k_scales) else 0)
        stage, phase = Int32(0), Int32(0)
        for unit in cutlass.range(cta, units, ctas, unroll=1):
            kv_head, _, head, r = self.unit_of(unit, head_divisor, block_divisor)
            source = self.scaler.source(k_scale, k_strides, v_scale, v_strides, kv_head, of_v)
            b, offset, left, _ = self.assignment(mLengths, limits, known, r, cut)
            while left > 0:
                length, first, count = scheduler.extent(mLengths, b, limits)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                if length > 0:
                    stage, phase = self.scaler.fill(
                        mTable, source, scales, full, empty, stage, phase, b, first + offset, first + stop, length,
                        page_shift, page_size, num_pages, of_v, lane,
                    )  # fmt: skip
                offset = Int32(0)
                b += 1

    @cute.jit
    def decode(
        self,
        mQ: cute.Tensor,
        mLengths: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        k_scale: Int64,
        k_strides: tuple,
        v_scale: Int64,
        v_strides: tuple,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        limits: tuple,
        causal: Int32,
        units: Int32,
        scratch: Int64,
        counters: Int64,
        divisors: tuple,
        cut: tuple,
        tiles: cute.Pointer,
        sQ: cute.Pointer,
        sums: cute.Pointer,
        stats: cute.Pointer,
        facts: cute.Pointer,
        scales: cute.Pointer,
        valid: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        arrived: cute.Pointer,
        warp_idx: Int32,
        lane: Int32,
    ):
        """A consumer warp: attention over all units of this CTA, results and partial results."""
        spec = self.spec
        head_divisor, block_divisor, ratio_divisor, _, _ = divisors
        tidx = warp_idx * 32 + lane
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        known = self.survey(mLengths, limits, lane)
        acc_o = self.consumer.accumulators()
        columns = const_expr(spec.columns // 4)  # of a thread
        row_max = cute.make_rmem_tensor(columns, Float32)
        row_sum = cute.make_rmem_tensor(columns, Float32)
        factor = cute.make_rmem_tensor(columns, Float32)
        slope = cute.make_rmem_tensor(columns if spec.alibi else 1, Float32)
        positions = cute.make_rmem_tensor(columns if spec.alibi else 1, Int32)
        _, window, s_q, _ = limits
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        for unit in cutlass.range(cta, units, ctas, unroll=1):
            kv_head, block, head, r = self.unit_of(unit, head_divisor, block_divisor)
            b, offset, left, line = self.assignment(mLengths, limits, known, r, cut)
            if const_expr(spec.cluster > 1):
                keys, origin, _ = scheduler.extent(mLengths, b, limits)
                whose = (b, kv_head, block, ratio_divisor)
                stage, phase = self.attend_range(
                    mQ, mSink, k_scale, k_strides, v_scale, v_strides, alibi, alibi_batch, softmax_scale, softcap,
                    window, causal, s_q, whose, origin + offset, origin + offset + left, keys, acc_o, row_max, row_sum,
                    factor, slope, positions, tiles, sQ, facts, scales, valid, full, empty, stage, phase, warp_idx,
                    lane,
                )  # fmt: skip
                self.finisher.meet(acc_o, row_max, row_sum, sums, stats, warp_idx, lane)
                self.finisher.merge_cluster(sums, stats, mOut, mLse, facts, whose, s_q, tidx)
                left = Int32(0)
            while left > 0:
                length, first, count = scheduler.extent(mLengths, b, limits)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                # two sets of facts in turns: slow warps may still read those of the sequence before
                own_facts = facts + turn * (FACTS * spec.columns)
                turn ^= 1
                place = (b, kv_head, block, ratio_divisor)
                stage, phase = self.attend_range(
                    mQ, mSink, k_scale, k_strides, v_scale, v_strides, alibi, alibi_batch, softmax_scale, softcap,
                    window, causal, s_q, place, first + offset, first + stop, length, acc_o, row_max,
                    row_sum, factor, slope, positions, tiles, sQ, own_facts, scales, valid, full,
                    empty, stage, phase, warp_idx, lane,
                )  # fmt: skip
                self.finisher.meet(acc_o, row_max, row_sum, sums, stats, warp_idx, lane)
                whole = offset == 0 and stop == count
                if whole:
                    self.finisher.store(sums, stats, mOut, mLse, own_facts, place, s_q, tidx)
                else:
                    opens = cutlass.select_(offset == 0, Int32(1), Int32(0))
                    self.finisher.store_partial(sums, stats, scratch, 2 * unit + opens, place, s_q, tidx)
                    first_range, sharing = scheduler.sharers(b, line, count, known[2], cut)
                    counter = counters + 4 * (Int64(b) * head_divisor.divisor + head)
                    last = self.finisher.count(counter, sharing, arrived, tidx)
                    if last:
                        first_state = 2 * (first_range * head_divisor.divisor + head)
                        self.finisher.merge(
                            sums, scratch, first_state, 2 * head_divisor.divisor, sharing, mOut, mLse, own_facts, place,
                            s_q, tidx,
                        )  # fmt: skip
                line += count
                offset = Int32(0)
                b += 1

    @cute.jit
    def attend_range(
        self,
        mQ: cute.Tensor,
        mSink: cute.Tensor,
        k_scale: Int64,
        k_strides: tuple,
        v_scale: Int64,
        v_strides: tuple,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        window: Int32,
        causal: Int32,
        s_q: Int32,
        place: tuple,
        start: Int32,
        stop: Int32,
        length: Int32,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        slope: cute.Tensor,
        positions: cute.Tensor,
        tiles: cute.Pointer,
        sQ: cute.Pointer,
        facts: cute.Pointer,
        scales: cute.Pointer,
        valid: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
        warp_idx: Int32,
        lane: Int32,
    ):
        """This warp's share of the tiles from `start` to `stop` of one sequence; returns stage and phase after."""
        spec = self.spec
        _, _, block, ratio_divisor = place
        self.consumer.load_q(mQ, mSink, sQ, facts, k_scale, k_strides, v_scale, v_strides, place, s_q, warp_idx, lane)
        cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=self.consumers)
        self.consumer.start(
            acc_o, row_max, row_sum, factor, slope, positions, facts, alibi, alibi_batch, softmax_scale, softcap, place,
            length, s_q, lane,
        )  # fmt: skip
        if length > 0:
            for tile in cutlass.range(start, stop, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                address = Int32(tiles.toint()) + stage * (2 * spec.tile_bytes)
                own_scales = scales + stage * spec.scale_values
                bits = self.consumer.valid_keys(valid + stage * spec.valid_words, warp_idx, lane)
                self.consumer.attend(
                    acc_o, row_max, row_sum, factor, slope, positions, own_scales, sQ, address, empty + stage, tile,
                    bits, length, window, causal, s_q, softcap, block, ratio_divisor, warp_idx, lane,
                )  # fmt: skip
                phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
        return stage, phase

    @cute.jit
    def unit_of(self, unit: Int32, head_divisor, block_divisor):
        """(head of the cache, block of columns, both as one number, range) of a unit of work.

        Neighbouring CTAs read the heads of the same tokens, or are the cluster that shares a sequence and head.
        """
        if const_expr(self.spec.cluster > 1):
            b, head = divmod(unit // self.spec.cluster, head_divisor)
            r = b * self.spec.cluster + unit % self.spec.cluster
        else:
            r, head = divmod(unit, head_divisor)
        kv_head, block = divmod(head, block_divisor)
        return kv_head, block, head, r

    @cute.jit
    def survey(self, mLengths: cute.Tensor, limits: tuple, lane: Int32):
        """What `assignment` needs to know of all sequences; nothing where a cluster has one to itself."""
        if const_expr(self.spec.cluster > 1):
            return Int32(0), Int32(0), Int32(0)
        return scheduler.survey(mLengths, limits, lane)

    @cute.jit
    def assignment(self, mLengths: cute.Tensor, limits: tuple, known: tuple, r: Int32, cut: tuple):
        """As `scheduler.assignment`; a cluster shares a sequence evenly."""
        if const_expr(self.spec.cluster > 1):
            b, part = r // self.spec.cluster, r % self.spec.cluster
            _, _, tiles = scheduler.extent(mLengths, b, limits)
            offset = tiles * part // self.spec.cluster
            return b, offset, tiles * (part + 1) // self.spec.cluster - offset, Int32(0)
        return scheduler.assignment(mLengths, limits, known, r, cut)
