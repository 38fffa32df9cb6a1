"""GQA decoding on SM90 over a cache of int8, e4m3 or 16-bit numbers: persistent split-KV flash decoding.

A CTA decodes the query rows (tokens x heads) of one KV head over a range of the work list (work_kernel.py), in tiles of
64 keys. Keys are rows of the matrix products, query rows their columns: S^T = K Q^T, O^T = V^T P^T with mma.sync
m16n8k16, so that 8 query rows fill an instruction, and a byte of K or V is widened in the registers of the one warp
that uses it (device/operands.py). Each consumer warp has 16 keys of every tile, its own maxima, sums and accumulators:
warps meet only where a sequence ends.

Scales of whole heads join the softmax scale and the result. Those of tokens multiply S, and P before it is rounded;
those of groups multiply partial sums of S, and P once a group. So dequantization costs a few instructions a key.

Q is scaled by a power of two per row, so that float16 holds it whatever its size; S is scaled back in float32.

Roles (160 threads, two CTAs on an SM where registers and shared memory allow it)
  warp 0..3   consumers: 16 keys of each tile
  warp 4      producer: TMA copies of K and V, `stages` tiles ahead (producer_kernel.py)

Barriers         arrivals per phase
  full[stage]    1 + the bytes of a tile of K and of V by TMA
  empty[stage]   128: consumer threads, after their last read of the stage
  named 1        128: consumers, where Q and where the warps' results change hands

Shared memory, per CTA (d 128, int8, 8 columns: 5 stages, 104 KB)
  tiles   stages x 2 x 64 x d x itemsize   rows of 128 bytes (or 64), swizzled; pages of paged_vllm as they are
  q       columns x d x 2                  as fragments of B: a lane's 16 bytes of two k steps lie together
  sums    4 x columns x (d + 4) x 4        O of each warp; weights of a merge
  stats   2 x 4 x columns x 4, q_factor columns x 4

A sequence that several CTAs share is merged by the last of them: each writes O, maximum and sum in float32, counts
itself, and whoever sees the full count adds them up in order. Nobody waits, and the order of additions is fixed.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import operands, softmax
from cute_kernels.gqa import work_kernel
from cute_kernels.gqa.consumer_kernel import TileConsumer
from cute_kernels.gqa.finish_kernel import Finisher
from cute_kernels.gqa.producer_kernel import TileProducer, box_shape, partition, tile_layout
from cute_kernels.gqa.spec import CONSUMER_WARPS, KEYS_PER_TILE, GqaDecodeSpec

DTYPES = {"int8": Int8, "float8_e4m3fn": Float8E4M3FN, "bfloat16": BFloat16, "float16": Float16, "float32": Float32}
CONSUMERS = 32 * CONSUMER_WARPS
THREADS = CONSUMERS + 32
BAR_CONSUMERS = 1
CACHE_MODES = {"heads_first": (2, 3, 1, 0), "tokens_first": (1, 3, 2, 0)}  # to (rows, d, heads, outer)


class GqaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: GqaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = DTYPES[spec.kv_dtype]
        self.producer = TileProducer(spec)
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
        if spec.layout == "vllm":
            x, page = 16 // spec.itemsize, spec.box_rows
            lead = [cute.sym_int64(divisibility=x) for _ in range(4)]
            k = make_fake_tensor(
                self.dtype, (outer, h_kv, spec.d // x, page, x), (*lead[:2], page * x, x, 1), assumed_align=16
            )
            v = make_fake_tensor(self.dtype, (outer, h_kv, spec.d, page), (*lead[2:], page, 1), assumed_align=16)
        else:
            shape = (outer, h_kv, rows, spec.d) if spec.layout == "heads_first" else (outer, rows, h_kv, spec.d)
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
        h_kv = mK.shape[1 if const_expr(spec.layout != "tokens_first") else 2]
        ratio = h_q // h_kv
        blocks = cute.ceil_div(ratio * s_q, spec.columns)
        tiles = []
        for t in (mK, mV):
            if const_expr(spec.layout == "vllm"):
                rows, columns = box_shape(spec)
                strides = (columns, 1, t.stride[1], t.stride[0])
                view = cute.make_layout((rows, columns, t.shape[1], t.shape[0]), stride=strides)
            else:
                view = cute.select(t.layout, mode=list(CACHE_MODES[spec.layout]))
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
        capacity = Int32(mK.shape[2 if const_expr(spec.layout == "heads_first") else 1])
        num_pages = Int32(mK.shape[0])
        if const_expr(spec.paged):
            if const_expr(spec.box_rows == KEYS_PER_TILE):
                page_size = capacity
            capacity = page_size * Int32(mTable.shape[1])
        heads = h_kv * blocks
        units = heads * ranges
        if splits > 0:
            units = heads * splits * batch
        divisors = tuple(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (heads, blocks, ratio))
        k_strides = (k_scale_outer, k_scale_head, k_scale_row, k_scale_group)
        v_strides = (v_scale_outer, v_scale_head, v_scale_row, v_scale_group)
        self.kernel(
            load_k, tK, load_v, tV, mQ, mTable, mLengths, mSink, mOut, mLse, k_scale, k_strides, v_scale, v_strides,
            alibi, alibi_batch, softmax_scale, softcap, (capacity, window, Int32(s_q)), causal, page_size, num_pages,
            ranges, splits, units, scratch, counters, divisors,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=spec.ctas_per_sm,
            preferred_smem_carveout=100,  # else the compiler asks the driver, and kernels are compiled without one
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
        head_divisor, block_divisor, ratio_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tidx % 32

        smem = SmemAllocator()
        tiles = smem.allocate_array(self.dtype, spec.stages * 2 * KEYS_PER_TILE * spec.d, byte_alignment=1024)
        sQ = smem.allocate_array(DTYPES[spec.k_operand], spec.columns * spec.d, byte_alignment=16)
        sums = smem.allocate_array(Float32, CONSUMER_WARPS * spec.columns * spec.sums_stride, byte_alignment=16)
        stats = smem.allocate_array(Float32, 2 * CONSUMER_WARPS * spec.columns, byte_alignment=16)
        q_factor = smem.allocate_array(Float32, spec.columns, byte_alignment=16)
        barriers = smem.allocate_array(Int64, 2 * spec.stages, byte_alignment=8)
        arrived = smem.allocate_array(Int32, 1, byte_alignment=4)
        full, empty = barriers, barriers + spec.stages
        if tidx == 0:
            for i in cutlass.range_constexpr(spec.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, lengths, new tokens, the counters

        before, total = work_kernel.survey(mLengths, limits, lane)
        stage, phase = Int32(0), Int32(0)
        page_shift = 31 - Int32(cute.arch.clz(page_size)) if const_expr(spec.paged) else Int32(0)

        if warp_idx == CONSUMER_WARPS:
            sources, targets = [], []
            for load, tensor, offset in ((load_k, tK, 0), (load_v, tV, KEYS_PER_TILE * spec.d)):
                source, target = partition(spec, load, tensor, tiles + offset, self.dtype)
                sources.append(source)
                targets.append(target)
            gK, gV = sources
            sK, sV = targets
            pages = cute.make_rmem_tensor(self.producer.entries, Int32)
            pages_next = cute.make_rmem_tensor(self.producer.entries, Int32)
            for unit in cutlass.range(cta, units, ctas, unroll=1):
                r, head = divmod(unit, head_divisor)
                kv_head, _ = divmod(head, block_divisor)
                b, offset, left = work_kernel.assignment(mLengths, limits, before, total, r, ranges, splits)
                while left > 0:
                    length, first, count = work_kernel.extent(mLengths, b, limits)
                    stop = cutlass.min(offset + left, count)
                    left -= stop - offset
                    if length > 0:
                        batch_of_pages = const_expr(self.producer.batch)
                        slot = Int32(0)
                        if const_expr(spec.paged):
                            self.producer.read_pages(pages_next, mTable, b, first + offset, length, page_shift, lane)
                        for tile in cutlass.range(first + offset, first + stop, unroll=1):
                            if const_expr(spec.paged):
                                if slot == 0:
                                    for e in cutlass.range_constexpr(self.producer.entries):
                                        pages[e] = pages_next[e]
                                    ahead = tile + batch_of_pages
                                    self.producer.read_pages(pages_next, mTable, b, ahead, length, page_shift, lane)
                            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * spec.tile_bytes)
                            self.producer.fill_tile(
                                load_k, load_v, (gK, gV), (sK, sV), full, stage, kv_head, b, tile, slot, pages,
                                page_shift,
                            )  # fmt: skip
                            slot = cutlass.select_(slot + 1 == batch_of_pages, Int32(0), slot + 1)
                            phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                            stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                    offset = Int32(0)
                    b += 1
        else:
            acc_o = self.consumer.accumulators()
            columns = const_expr(spec.columns // 4)  # of a thread
            row_max = cute.make_rmem_tensor(columns, Float32)
            row_sum = cute.make_rmem_tensor(columns, Float32)
            factor = cute.make_rmem_tensor(columns, Float32)
            slope = cute.make_rmem_tensor(columns if spec.alibi else 1, Float32)
            shift = cute.make_rmem_tensor(columns if spec.alibi else 1, Float32)
            scale_loads = const_expr(self.consumer.scale_loads)
            scales = cute.make_rmem_tensor(max(scale_loads, 1), self.consumer.scale_dtype)
            scales_next = cute.make_rmem_tensor(max(scale_loads, 1), self.consumer.scale_dtype)
            capacity, window, s_q = limits
            for unit in cutlass.range(cta, units, ctas, unroll=1):
                r, head = divmod(unit, head_divisor)
                kv_head, block = divmod(head, block_divisor)
                b, offset, left = work_kernel.assignment(mLengths, limits, before, total, r, ranges, splits)
                line = work_kernel.range_start(r, total, cutlass.min(ranges, total)) - offset
                while left > 0:
                    length, first, count = work_kernel.extent(mLengths, b, limits)
                    stop = cutlass.min(offset + left, count)
                    left -= stop - offset
                    place = (b, kv_head, block, ratio_divisor)
                    self.consumer.load_q(mQ, sQ, q_factor, place, s_q, warp_idx, lane)
                    cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=CONSUMERS)
                    self.consumer.start(
                        acc_o, row_max, row_sum, factor, slope, shift, q_factor, k_scale, k_strides, alibi, alibi_batch,
                        softmax_scale, softcap, place, mQ.shape[2], length, s_q, lane,
                    )  # fmt: skip
                    if length > 0:
                        where = self.consumer.scale_source(k_scale, k_strides, v_scale, v_strides, kv_head, lane)
                        entry = self.consumer.entry(mTable, b, first + offset, length, page_shift, warp_idx, lane)
                        self.consumer.load_scales(
                            scales_next, where, entry, num_pages, first + offset, length, page_size, warp_idx, lane
                        )
                        entry_next = self.consumer.entry(
                            mTable, b, first + offset + 1, length, page_shift, warp_idx, lane
                        )
                        for tile in cutlass.range(first + offset, first + stop, unroll=1):
                            valid = self.consumer.valid_keys(entry, num_pages)
                            for i in cutlass.range_constexpr(scale_loads):
                                scales[i] = scales_next[i]
                            entry = entry_next
                            self.consumer.load_scales(
                                scales_next, where, entry, num_pages, tile + 1, length, page_size, warp_idx, lane
                            )
                            entry_next = self.consumer.entry(
                                mTable, b, tile + 2, length, page_shift, warp_idx, lane
                            )
                            cute.arch.mbarrier_wait(full + stage, phase)
                            address = Int32(tiles.toint()) + stage * (2 * spec.tile_bytes)
                            self.consumer.attend(
                                acc_o, row_max, row_sum, factor, slope, shift, scales, sQ, address, empty + stage, tile,
                                valid, length, window, causal, s_q, softcap, block, ratio_divisor, warp_idx, lane,
                            )  # fmt: skip
                            phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                            stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                    self.finisher.meet(acc_o, row_max, row_sum, sums, stats, warp_idx, lane)
                    whole = offset == 0 and stop == count
                    if whole:
                        self.finisher.store(
                            sums, stats, mOut, mLse, mSink, v_scale, v_strides, place, s_q, tidx
                        )
                    else:
                        first_range, sharing = work_kernel.sharers(b, line, count, total, ranges, splits)
                        own = r * head_divisor.divisor + head
                        opens = cutlass.select_(offset == 0, Int32(1), Int32(0))
                        self.finisher.store_partial(sums, stats, scratch, 2 * own + opens, place, s_q, tidx)
                        counter = counters + 4 * (Int64(b) * head_divisor.divisor + head)
                        last = self.finisher.count(counter, sharing, arrived, tidx)
                        if last:
                            first_state = 2 * (first_range * head_divisor.divisor + head)
                            self.finisher.merge(
                                sums, scratch, first_state, 2 * head_divisor.divisor, sharing, mOut, mLse, mSink, v_scale,
                                v_strides, place, s_q, tidx,
                            )  # fmt: skip
                    line += count
                    offset = Int32(0)
                    b += 1
