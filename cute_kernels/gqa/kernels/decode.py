"""GQA decoding on SM90 over a cache of int8, e4m3 or 16-bit numbers: persistent split-KV flash decoding.

A CTA decodes the query rows (tokens x heads) of one KV head over a range of the work list (scheduler.py), in tiles of
128 keys. Keys are the M side of the products and query rows the N side (`swap_ab`): S^T = K Q^T, O^T = V^T P^T with
mma.sync m16n8k16, so that 8 query rows fill an instruction, and a byte of K or V is widened in the registers of the one
warp that uses it (device/operands.py). Each consumer warp has 16 keys of every tile and its own row_max, row_sum and
accumulators: warps meet only where a sequence ends.

Scales of whole heads join the softmax scale and the result. Those of tokens multiply S, and P before it is rounded;
those of groups multiply partial sums of S, and P once a group. So dequantization costs a few instructions a key.

Q is scaled by a power of two per row, so that float16 holds it whatever its size; S is scaled back in float32.

Roles (384 threads; 160 without warps 9..11 and with tiles of 64 keys where a token has 512 bytes)
  warp 0..7   consumers, 200 registers: QK, softmax and PV of 16 keys of each tile (consumer.py, query.py, qk.py,
              softmax.py, pv.py, nonfinite.py), then the results (epilogue.py)
  warp 8      load, 104 registers: TMA copies of K and V, `stages` tiles ahead (load.py)
  warp 9, 10  scales of tokens, of K and of V, where there are any (scales.py); warp 11 idles

Mbarriers: name[copies], arrivals of a phase. int8, d 128, scales of tokens:
  full[4]            65 + 32,768 bytes  K and V of a tile, and its scales
  empty[4]          256                 consumers have K and V in registers
Named barrier 1, CONSUMERS: 256 threads, where Q and where the warps' results change hands.

Shared memory (d 128, int8, 8 query rows, scales of tokens: 4 stages, 176 KB)
  tiles      stages x 2 x 128 x d x itemsize  rows of 128 bytes (or 64), swizzled; pages of paged_vllm as they are
  scales     stages x 128 x scales of a token x 4; bits of existing pages, a word or more for each stage
  q          rows x d x 2                  as fragments of B: a lane's 16 bytes of two k steps lie together
  sums       warps x rows x (d + 4) x 4    O of each warp
  stats      2 x warps x rows x 4;  row_terms 2 x 3 x rows x 4

A sequence that several CTAs share is merged by the last of them: each writes O, maximum and sum in float32, counts
itself, and whoever sees the full count adds them up in order. Nobody waits, and the order of additions is fixed. Short
sequences of small batches are shared by a cluster of eight instead, whose CTAs read each other's shared memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.device.barriers import initialize
from cute_kernels.gqa.kernels.arguments import (
    AlibiSlopes,
    Divisors,
    GridFacts,
    PageFacts,
    Request,
    ScaleSource,
    ScratchMemory,
    Tensors,
    TmaCopies,
)
from cute_kernels.gqa.kernels.barriers import barriers
from cute_kernels.gqa.kernels.consumer import ConsumerWarp
from cute_kernels.gqa.kernels.load import LoadWarp, box_shape, tile_layout
from cute_kernels.gqa.kernels.scales import ScaleWarp
from cute_kernels.gqa.kernels.scheduler import WorkList
from cute_kernels.gqa.kernels.smem import DTYPES, allocate
from cute_kernels.gqa.spec import GqaDecodeSpec

LOAD_REGISTERS, CONSUMER_REGISTERS = 104, 200  # 104 + 2 * 200 = 504 = 3 * 168, what 384 threads get at launch
CACHE_MODES = {"heads_first": (2, 3, 1, 0), "tokens_first": (1, 3, 2, 0)}  # to (rows, d, heads, outer)


class GqaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: GqaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = DTYPES[spec.kv_dtype]
        # eight consumer warps can take registers from a warpgroup that loads
        self.threads = 32 * spec.warps + (128 if spec.warps == 8 else 32)
        self.load = LoadWarp(spec)
        self.scales = ScaleWarp(spec)
        self.consumer = ConsumerWarp(spec)

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
        the cache x blocks of query rows (or splits x batch instead of ranges) partials of rows x (d + 2) float32;
        `counters` has a word for each sequence, head of the cache and block of query rows, 0 before and after.
        """
        spec = self.spec
        batch, s_q, h_q, _ = mQ.shape
        h_kv = mK.shape[1 if const_expr(spec.layout != "tokens_first") else 2]
        ratio = h_q // h_kv
        blocks = cute.ceil_div(ratio * s_q, spec.columns)
        copies = []
        for t in (mK, mV):
            if const_expr(spec.layout == "vllm"):
                rows, width = box_shape(spec)
                strides = (width, 1, t.stride[1], t.stride[0])
                view = cute.make_layout((rows, width, t.shape[1], t.shape[0]), stride=strides)
            else:
                view = cute.select(t.layout, mode=list(CACHE_MODES[spec.layout]))
            copies += cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                cute.make_tensor(t.iterator, view),
                tile_layout(spec),
                box_shape(spec),
            )
        page_size = Int32(spec.box_rows)
        capacity = Int32(mK.shape[2 if const_expr(spec.layout == "heads_first") else 1])
        num_pages = Int32(mK.shape[0])
        if const_expr(spec.paged):
            if const_expr(spec.box_rows == spec.keys_per_tile):
                page_size = capacity
            assert mTable is not None
            capacity = page_size * Int32(mTable.shape[1])
        head_blocks = h_kv * blocks
        work_tiles = head_blocks * ranges
        if splits > 0:
            work_tiles = head_blocks * splits * batch
        if const_expr(spec.cluster > 1):
            work_tiles = head_blocks * spec.cluster * batch
        divisors = Divisors(
            *(
                cute.fast_divmod_create_divisor_v2(Int32(n))
                for n in (head_blocks, blocks, ratio, ranges, cutlass.max(splits, 1))
            )
        )
        self.kernel(
            TmaCopies(*copies),
            Tensors(mQ, mTable, mLengths, mSink, mOut, mLse),
            ScaleSource(k_scale, k_scale_outer, k_scale_head, k_scale_row, k_scale_group),
            ScaleSource(v_scale, v_scale_outer, v_scale_head, v_scale_row, v_scale_group),
            AlibiSlopes(alibi, alibi_batch),
            Request(softmax_scale, softcap, capacity, window, Int32(s_q), causal),
            PageFacts(page_size, num_pages),
            GridFacts(ranges, splits, work_tiles),
            ScratchMemory(scratch, counters),
            divisors,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[spec.cluster, 1, 1] if const_expr(spec.cluster > 1) else None,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        copies: TmaCopies,
        tensors: Tensors,
        k_scale: ScaleSource,
        v_scale: ScaleSource,
        alibi: AlibiSlopes,
        request: Request,
        paging: PageFacts,
        grid: GridFacts,
        scratch: ScratchMemory,
        divisors: Divisors,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tidx % 32
        if warp_idx == spec.warps:
            cpasync.prefetch_descriptor(copies.k_atom)
            cpasync.prefetch_descriptor(copies.v_atom)

        smem = allocate(spec)
        if tidx == 0:
            initialize(smem, barriers(spec))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, lengths, new tokens, the counters

        work = WorkList(
            tensors.lengths,
            request.capacity,
            request.window,
            request.s_q,
            grid,
            divisors.head_blocks,
            divisors.blocks,
            divisors.ranges,
            divisors.splits,
        )
        page_shift = 31 - Int32(cute.arch.clz(paging.size)) if const_expr(spec.paged) else Int32(0)

        if warp_idx >= spec.warps:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == spec.warps:
                self.load.run(copies, tensors.table, work, paging, page_shift, smem, lane)
            elif warp_idx <= spec.warps + spec.scale_warps:
                if const_expr(spec.scale_warps > 0):
                    self.scales.run(k_scale, v_scale, tensors.table, work, paging, page_shift, smem, warp_idx, lane)
        else:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consumer.run(
                tensors, k_scale, v_scale, alibi, request, work, divisors.ratio, scratch, smem, warp_idx, lane
            )
